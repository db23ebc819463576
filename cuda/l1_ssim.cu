// The loss between a rendered and a true image, (1 − λ) · L1 + λ · (1 − SSIM), and its gradient (SSIM: Wang et al. 2004).
//
// Torch twin: odin_nerfstudio/splat/l1_ssim/reference.py.
//
// SSIM compares means, variances and the covariance in 11 × 11 Gaussian windows that lie within the image, so there are
// (H − 10) × (W − 10) windows. The window is separable: a block filters the columns of its tile from global memory into
// shared memory, a thread a column, and then the rows from there. Channels are interleaved and never mix, so a row of
// the image is one line of 3W numbers whose filter steps by 3. The forward pass keeps the derivatives of each window's
// SSIM by its filtered values; the backward pass filters these once more. All sums are in a fixed order.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kChannels = 3;
constexpr int kTaps = 11;
constexpr int kReach = kTaps - 1;
constexpr int kTileRows = 8;
constexpr int kTileColumns = 64 * kChannels;                 // numbers, not pixels
constexpr int kThreads = 224;                                // whole warps, of which the last has two idle threads
constexpr int kColumns = kTileColumns + kReach * kChannels;  // of a tile with its surroundings: one for each thread
constexpr int kWarps = kThreads / 32;
constexpr int kSumThreads = 256;
static_assert(kColumns <= kThreads && kThreads % 32 == 0 && kTileColumns % 32 == 0, "");

constexpr float kC1 = 0.0001f; // (0.01 · the largest value)²
constexpr float kC2 = 0.0009f; // (0.03 · the largest value)²

// Normalised Gaussian of deviation 1.5 at the distance of a tap from the middle.
__device__ constexpr float weight(int tap) {
    constexpr float at[] = {0.26601171f, 0.21300553f, 0.10936069f, 0.036000773f, 0.007598758f, 0.0010283804f};
    return at[tap < kReach / 2 ? kReach / 2 - tap : tap - kReach / 2];
}

__device__ float intensity(float value) { return value; }

// value / 255, correctly rounded: the quotient by the reciprocal, and one correction.
__device__ float intensity(uint8_t value) {
    constexpr float reciprocal = 1.0f / 255.0f;
    const float quotient = value * reciprocal;
    return fmaf(fmaf(-255.0f, quotient, value), reciprocal, quotient);
}

struct Size {
    int64_t rows, columns; // of the image; a column is one number
    __device__ __host__ int64_t window_rows() const { return rows - kReach; }
    __device__ __host__ int64_t window_columns() const { return columns - kReach * kChannels; }
    __host__ double pixels() const { return static_cast<double>(rows) * columns; }
    __host__ double windows() const { return static_cast<double>(window_rows()) * window_columns(); }
};

dim3 tiles(const Size &size) {
    return dim3(
        static_cast<unsigned>((size.columns + kTileColumns - 1) / kTileColumns),
        static_cast<unsigned>((size.rows + kTileRows - 1) / kTileRows)
    );
}

__device__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_down_sync(0xffffffffu, value, step);
    }
    return value;
}

// What SSIM is made of, after a filter: E[x], E[y], E[x²], E[y²], E[xy]; x is the prediction, y the truth.
constexpr int kMoments = 5;

template <typename Truth>
__global__ void __launch_bounds__(kThreads) forward_kernel(
    const float *__restrict__ prediction, const Truth *__restrict__ truth, const Size size,
    float *__restrict__ derivatives, float2 *__restrict__ sums
) {
    __shared__ float filtered[kMoments][kTileRows][kThreads];
    __shared__ float2 warp_sums[kWarps];
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTileRows;
    const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTileColumns;

    float difference = 0.0f;
    {
        const int64_t column = first_column + threadIdx.x;
        const bool within = threadIdx.x < kColumns && column < size.columns;
        float sum[kTileRows][kMoments] = {};
#pragma unroll
        for (int j = 0; j < kTileRows + kReach; ++j) {
            float x = 0.0f, y = 0.0f;
            if (within && first_row + j < size.rows) {
                const int64_t at = (first_row + j) * size.columns + column;
                x = prediction[at];
                y = intensity(truth[at]);
            }
            if (j < kTileRows && threadIdx.x < kTileColumns) { // the tile's own pixels; 0 outside the image
                difference += fabsf(x - y);
            }
            const float moments[kMoments] = {x, y, x * x, y * y, x * y};
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                if (j >= r && j - r < kTaps) {
#pragma unroll
                    for (int m = 0; m < kMoments; ++m) {
                        sum[r][m] = fmaf(weight(j - r), moments[m], sum[r][m]);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
#pragma unroll
            for (int m = 0; m < kMoments; ++m) {
                filtered[m][r][threadIdx.x] = sum[r][m];
            }
        }
    }
    __syncthreads();

    float similarity = 0.0f;
    const int64_t plane = size.window_rows() * size.window_columns();
    for (int i = threadIdx.x; i < kTileRows * kTileColumns; i += kThreads) {
        const int r = i / kTileColumns, c = i % kTileColumns;
        const int64_t row = first_row + r, column = first_column + c;
        if (row >= size.window_rows() || column >= size.window_columns()) {
            continue;
        }
        float mean[kMoments] = {};
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
            for (int m = 0; m < kMoments; ++m) {
                mean[m] = fmaf(weight(tap), filtered[m][r][c + kChannels * tap], mean[m]);
            }
        }
        const float x = mean[0], y = mean[1];
        const float luminance = 2.0f * x * y + kC1, luminance_scale = x * x + y * y + kC1;
        const float contrast = 2.0f * (mean[4] - x * y) + kC2;
        const float contrast_scale = (mean[2] - x * x) + (mean[3] - y * y) + kC2;
        const float over = 1.0f / (luminance_scale * contrast_scale);
        const float ssim = luminance * contrast * over;
        similarity += ssim;
        if (derivatives != nullptr) {
            // By E[x], E[x²] and E[xy], each with the other two fixed.
            const int64_t at = row * size.window_columns() + column;
            derivatives[at] = 2.0f * y * (contrast - luminance) * over +
                              2.0f * x * ssim * (1.0f / contrast_scale - 1.0f / luminance_scale);
            derivatives[plane + at] = -ssim / contrast_scale;
            derivatives[2 * plane + at] = 2.0f * luminance * over;
        }
    }

    difference = warp_sum(difference);
    similarity = warp_sum(similarity);
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = make_float2(difference, similarity);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float2 sum = warp_sums[0];
        for (int warp = 1; warp < kWarps; ++warp) {
            sum.x += warp_sums[warp].x;
            sum.y += warp_sums[warp].y;
        }
        sums[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    }
}

// loss = constant + Σ (of_difference · difference + of_similarity · similarity), by one block.
__global__ void __launch_bounds__(kSumThreads) sum_kernel(
    const float2 *__restrict__ sums, const int64_t count, const double constant, const double of_difference,
    const double of_similarity, float *__restrict__ loss
) {
    __shared__ double partial[kSumThreads];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
        sum += of_difference * sums[i].x + of_similarity * sums[i].y;
    }
    partial[threadIdx.x] = sum;
    for (int half = kSumThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            partial[threadIdx.x] += partial[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        *loss = static_cast<float>(constant + partial[0]);
    }
}

constexpr int kDerivatives = 3;

template <typename Truth>
__global__ void __launch_bounds__(kThreads) backward_kernel(
    const float *__restrict__ prediction, const Truth *__restrict__ truth, const Size size,
    const float *__restrict__ derivatives, const float *__restrict__ upstream, const float of_difference,
    const float of_similarity, float *__restrict__ gradient
) {
    __shared__ float filtered[kDerivatives][kTileRows][kThreads];
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTileRows;
    const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTileColumns;
    {
        // A pixel is in the windows that begin up to ten pixels above it and to its left.
        const int64_t column = first_column + threadIdx.x - kReach * kChannels;
        const bool within = threadIdx.x < kColumns && column >= 0 && column < size.window_columns();
        const int64_t plane = size.window_rows() * size.window_columns();
        float sum[kTileRows][kDerivatives] = {};
#pragma unroll
        for (int j = 0; j < kTileRows + kReach; ++j) {
            const int64_t row = first_row + j - kReach;
            float value[kDerivatives] = {};
            if (within && row >= 0 && row < size.window_rows()) {
                const int64_t at = row * size.window_columns() + column;
#pragma unroll
                for (int d = 0; d < kDerivatives; ++d) {
                    value[d] = derivatives[d * plane + at];
                }
            }
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                if (j >= r && j - r < kTaps) {
#pragma unroll
                    for (int d = 0; d < kDerivatives; ++d) {
                        sum[r][d] = fmaf(weight(j - r), value[d], sum[r][d]);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
#pragma unroll
            for (int d = 0; d < kDerivatives; ++d) {
                filtered[d][r][threadIdx.x] = sum[r][d];
            }
        }
    }
    __syncthreads();

    const float scale = *upstream;
    for (int i = threadIdx.x; i < kTileRows * kTileColumns; i += kThreads) {
        const int r = i / kTileColumns, c = i % kTileColumns;
        const int64_t row = first_row + r, column = first_column + c;
        if (row >= size.rows || column >= size.columns) {
            continue;
        }
        float by[kDerivatives] = {};
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
            for (int d = 0; d < kDerivatives; ++d) {
                by[d] = fmaf(weight(tap), filtered[d][r][c + kChannels * tap], by[d]);
            }
        }
        const int64_t at = row * size.columns + column;
        const float x = prediction[at], y = intensity(truth[at]);
        const float sign = static_cast<float>((x > y) - (x < y));
        gradient[at] = scale * (of_difference * sign + of_similarity * (by[0] + 2.0f * x * by[1] + y * by[2]));
    }
}

// What the sums over the pixels and over the windows count in the loss.
struct Shares {
    double difference, similarity;
    Shares(const Size &size, double ssim_lambda)
        : difference((1.0 - ssim_lambda) / size.pixels()), similarity(-ssim_lambda / size.windows()) {}
};

// Calls launch(size, grid) on the device; returns a cudaError_t.
template <typename Launch> int on_device(int device, int64_t height, int64_t width, Launch launch) {
    const Size size = {height, width * kChannels};
    if (height < kTaps || width < kTaps || tiles(size).y > 65535) {
        return cudaErrorInvalidValue;
    }
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) {
        return error;
    }
    launch(size, tiles(size));
    return cudaGetLastError();
}

} // namespace

// The loss, and the derivatives that its gradient needs.
//
//   prediction:  (height, width, 3) float32
//   truth:       (height, width, 3) uint8, of which 255 is 1, where truth_is_uint8, else float32
//   derivatives: (3, height − 10, width − 10, 3) float32, written; null where no gradient is wanted
//   sums:        (number of tiles, 2) float32, scratch
//   loss:        () float32, written
extern "C" int l1_ssim_forward(
    int device, cudaStream_t stream, const float *prediction, const void *truth, int64_t truth_is_uint8, int64_t height,
    int64_t width, double ssim_lambda, float *derivatives, float2 *sums, int64_t num_sums, float *loss
) {
    if (tiles({height, width * kChannels}).x * static_cast<int64_t>(tiles({height, width * kChannels}).y) != num_sums) {
        return cudaErrorInvalidValue;
    }
    return on_device(device, height, width, [&](const Size &size, dim3 grid) {
        if (truth_is_uint8) {
            forward_kernel<<<grid, kThreads, 0, stream>>>(
                prediction, static_cast<const uint8_t *>(truth), size, derivatives, sums
            );
        } else {
            forward_kernel<<<grid, kThreads, 0, stream>>>(
                prediction, static_cast<const float *>(truth), size, derivatives, sums
            );
        }
        const Shares shares(size, ssim_lambda);
        sum_kernel<<<1, kSumThreads, 0, stream>>>(
            sums, num_sums, ssim_lambda, shares.difference, shares.similarity, loss
        );
    });
}

// The gradient by the prediction; arguments as above.
//
//   upstream: () float32, the derivative by the loss
//   gradient: (height, width, 3) float32, written
extern "C" int l1_ssim_backward(
    int device, cudaStream_t stream, const float *prediction, const void *truth, int64_t truth_is_uint8, int64_t height,
    int64_t width, double ssim_lambda, const float *derivatives, const float *upstream, float *gradient
) {
    return on_device(device, height, width, [&](const Size &size, dim3 grid) {
        const Shares shares(size, ssim_lambda);
        const auto of_difference = static_cast<float>(shares.difference);
        const auto of_similarity = static_cast<float>(shares.similarity);
        if (truth_is_uint8) {
            backward_kernel<<<grid, kThreads, 0, stream>>>(
                prediction, static_cast<const uint8_t *>(truth), size, derivatives, upstream, of_difference,
                of_similarity, gradient
            );
        } else {
            backward_kernel<<<grid, kThreads, 0, stream>>>(
                prediction, static_cast<const float *>(truth), size, derivatives, upstream, of_difference,
                of_similarity, gradient
            );
        }
    });
}
