// Which rows a view may touch: conservative culling by interval arithmetic in camera space.
//
// Torch twin: odin_nerfstudio/shadow/scope/reference.py, where the bounds are explained.
//
// A thread has one row and goes through the views. What a warp finds for a view is 32 bits of the view's set: half a
// word, and since words are little-endian, halves lie in the order of their rows.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kViews = 32; // in shared memory at a time
constexpr int kCameraSize = 18;
constexpr float kRounding = 1e-4f; // the twin's _ROUNDING

// A camera and what follows from it alone.
struct alignas(16) View {
    float pose[12]; // world → camera, 3×4
    float focal[2];
    float centre[2];
    float size[2];
    float limit[2]; // of the slopes x/z and y/z in the projection of covariances
    float largest_focal;

    View() = default;

    __device__ explicit View(const float *camera) {
        for (int i = 0; i < 12; ++i) {
            pose[i] = camera[i];
        }
        for (int a = 0; a < 2; ++a) {
            focal[a] = camera[12 + a];
            centre[a] = camera[14 + a];
            size[a] = camera[16 + a];
            limit[a] = fmaxf(centre[a], size[a] - centre[a]) / focal[a] + 0.15f * size[a] / focal[a];
        }
        largest_focal = fmaxf(focal[0], focal[1]);
    }
};

// By how much the values of a row may still move, by the step that the row is up to date with.
struct Drift {
    const float *row_step; // (n), or null: rows are current
    const double *table;   // (size)
    int size;
    double factor; // of the table

    __device__ float of(int64_t row) const {
        if (!row_step) {
            return 0.0f;
        }
        const int step = min(max(static_cast<int>(row_step[row]), 0), size - 1);
        return __double2float_ru(factor * table[step]); // up: it is a bound
    }
};

struct Range {
    float near, far;
};

// A ball around an uncertain centre.
struct Ball {
    float mean[3];
    float drift; // of the mean
    float axis;  // one standard deviation

    __device__ bool may_touch(const View &view, const Range &range, float eps2d) const {
        float at[3];
        for (int a = 0; a < 3; ++a) {
            const float *line = view.pose + 4 * a;
            at[a] = line[0] * mean[0] + line[1] * mean[1] + line[2] * mean[2] + line[3];
        }
        const float band = kRounding * (fabsf(at[0]) + fabsf(at[1]) + fabsf(at[2])) + drift;
        if (!(at[2] + band >= range.near && at[2] - band <= range.far)) {
            return false;
        }
        // A reciprocal rounds once more than a division, by far less than what the band has for it.
        const float over_nearest = 1.0f / fmaxf(at[2] - band, range.near);
        const float over_farthest = 1.0f / fmaxf(at[2] + band, range.near);
        float low[2], high[2];
        float stretch = 1.0f; // ‖J‖² / (f/z)²
        for (int a = 0; a < 2; ++a) {
            low[a] = at[a] - band;
            high[a] = at[a] + band;
            low[a] *= low[a] < 0.0f ? over_nearest : over_farthest;
            high[a] *= high[a] > 0.0f ? over_nearest : over_farthest;
            const float slope = fminf(fmaxf(fabsf(low[a]), fabsf(high[a])), view.limit[a]);
            stretch += slope * slope;
        }
        const float deviation = axis * view.largest_focal * over_nearest;
        // √0.1 and the rounding up by less than a pixel are the renderer's.
        const float radius =
            3.0f * sqrtf(deviation * deviation * stretch + eps2d + 0.31622777f) * (1.0f + kRounding) + 1.0f;
        bool inside = true;
        for (int a = 0; a < 2; ++a) {
            inside = inside && high[a] * view.focal[a] + view.centre[a] + radius > 0.0f &&
                     low[a] * view.focal[a] + view.centre[a] - radius < view.size[a];
        }
        return inside;
    }
};

__global__ void __launch_bounds__(kThreads) cull_kernel(
    const int64_t n, const int num_views, const float *__restrict__ means, const float *__restrict__ scales,
    const float *__restrict__ cameras, const Drift means_drift, const Drift scales_drift, const Range range,
    const float eps2d, uint32_t *__restrict__ halves
) {
    __shared__ View views[kViews];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t halves_of_view = (n + 63) / 64 * 2;
    const bool exists = row < n;
    Ball ball = {};
    if (exists) {
        for (int a = 0; a < 3; ++a) {
            ball.mean[a] = means[3 * row + a];
        }
        ball.drift = 1.7320508f * means_drift.of(row); // along every axis at once
        const float largest = fmaxf(fmaxf(scales[3 * row], scales[3 * row + 1]), scales[3 * row + 2]);
        ball.axis = expf(largest + scales_drift.of(row));
    }
    for (int first = 0; first < num_views; first += kViews) {
        const int count = min(kViews, num_views - first);
        __syncthreads(); // all have done with the views before
        if (threadIdx.x < count) {
            views[threadIdx.x] = View(cameras + kCameraSize * (first + static_cast<int>(threadIdx.x)));
        }
        __syncthreads();
        for (int v = 0; v < count; ++v) {
            const uint32_t inside = __ballot_sync(0xffffffffu, exists && ball.may_touch(views[v], range, eps2d));
            if (threadIdx.x % 32 == 0 && row / 32 < halves_of_view) {
                halves[(first + v) * halves_of_view + row / 32] = inside;
            }
        }
    }
}

} // namespace

// All pointers are device memory, all arrays contiguous and, if not said otherwise, of float32. It leaves `device` as
// the current one and returns a cudaError_t.
//
// means (n, 3), scales (n, 3), cameras (num_views, 18) → words (num_views, ⌈n/64⌉) int64, written. Of each drift
// row_step (n) and table (size > 0) float64, or two null pointers.
extern "C" int cull_views(
    int device, cudaStream_t stream, int64_t n, int64_t num_views, const float *means, const float *scales,
    const float *cameras, const float *means_step, const double *means_table, int64_t means_table_size,
    double means_factor, const float *scales_step, const double *scales_table, int64_t scales_table_size,
    double scales_factor, double near, double far, double eps2d, uint32_t *words
) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || n == 0 || num_views == 0) {
        return error;
    }
    const int64_t rows = (n + 63) / 64 * 64; // whole words, so that bits beyond n are written too
    cull_kernel<<<static_cast<unsigned>((rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        n, static_cast<int>(num_views), means, scales, cameras,
        Drift{means_step, means_table, static_cast<int>(means_table_size), means_factor},
        Drift{scales_step, scales_table, static_cast<int>(scales_table_size), scales_factor},
        Range{static_cast<float>(near), static_cast<float>(far)}, static_cast<float>(eps2d), words
    );
    return cudaGetLastError();
}
