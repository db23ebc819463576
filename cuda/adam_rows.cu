// Row-wise Adam on several parameters at once (Kingma & Ba 2015, algorithm 1, and many of its steps with zero gradient).
//
// Torch twin: odin_nerfstudio/shadow/adam/reference.py. The formulas: __init__.py beside it.
//
// All parameters have the same rows; here they are columns of one wide row. A block has a tile of rows. First a warp
// looks up what the rows need to know of one column, then a thread goes down the tile at one place of the wide row, so
// that neighbouring threads share sectors where the columns allow it, and nothing of the place is computed twice.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kMaxColumns = 8;
constexpr int kTile = 32; // rows
constexpr int kThreads = kMaxColumns * kTile;
constexpr int kBatch = 4; // rows that a thread has in flight

} // namespace

struct Column {
    float *values;     // (N, width), rows `stride` apart
    float *exp_avg;    // (N, width)
    float *exp_avg_sq; // (N, width)
    float *row_step;   // (N,) the step that each row is up to date with
    int64_t stride;
    int32_t width;
    int32_t step; // to take, or to catch up to
    double beta1;
    double beta2;
    double log2_beta1;
    double log2_beta2;
    int64_t horizon; // missed steps after which the momentum moves nothing
    float eps;
    float safety; // bound on ε/√v for the closed form
    // to take
    float rate;        // lr/c₁
    float root;        // 1/√c₂
    const float *grad; // (R, width)
    // to catch up
    const double *first;  // (step + 1,) A
    const double *second; // (step + 1,) B
    const double *rates;  // (step + 1,) learning rates
};

struct Columns { // by value in a kernel's parameters: constant memory
    Column at[kMaxColumns];
    int32_t count;
    int32_t width; // of all columns together
};

struct Table {
    double *first;      // A
    double *second;     // B
    double *rates;      // learning rates
    double log2_decay1; // log₂ β₁/√β₂
    double log2_decay2; // log₂ β₁/β₂
    double weight1;     // lr·√c₂/c₁
    double weight2;     // lr·c₂/c₁
    double rate;        // lr
    int64_t now;        // the new step
    int64_t reached;    // steps before it that it adds to
};

struct Tables {
    Table at[kMaxColumns];
    int64_t count;
};

namespace {

// Calls visit(c, d, first, by) for every place of this thread: element d of column c, in rows first, first + by, …
template <typename Visit> __device__ void for_places(const Columns &columns, Visit visit) {
    const int width = max(1, min(columns.width, kThreads)); // places that the block works on at the same time
    const int by = kThreads / width;
    const int first = threadIdx.x / width;
    if (first >= by) {
        return;
    }
    for (int place = threadIdx.x % width; place < columns.width; place += width) {
        int c = 0, d = place;
        while (d >= columns.at[c].width) {
            d -= columns.at[c++].width;
        }
        visit(c, d, first, by);
    }
}

// How far the last `gap` steps, taken one by one, move an element whose √v is close to ε.
__device__ float walk(const Column &column, int gap, float m, float v) {
    const int last = column.step - gap;
    const int count = static_cast<int>(min(static_cast<int64_t>(gap), column.horizon));
    double decay1 = 1.0, decay2 = 1.0; // βʲ
    double power1 = exp2(last * column.log2_beta1), power2 = exp2(last * column.log2_beta2); // β to the step
    float move = 0.0f;
#pragma unroll 1 // rare; the registers are wanted elsewhere
    for (int j = 1; j <= count; ++j) {
        decay1 *= column.beta1;
        decay2 *= column.beta2;
        power1 *= column.beta1;
        power2 *= column.beta2;
        const float rate = static_cast<float>(column.rates[last + j]) / static_cast<float>(1.0 - power1);
        const float root = sqrtf(v * static_cast<float>(decay2) / static_cast<float>(1.0 - power2));
        move += rate * (m * static_cast<float>(decay1)) / (root + column.eps);
    }
    return move;
}

struct Missed { // by a row, in one column
    float first, second;  // A, B
    float decay1, decay2; // of the moments
};

__global__ void __launch_bounds__(kThreads, 4)
    catch_up_kernel(const int64_t n, const int64_t *__restrict__ rows, const __grid_constant__ Columns columns) {
    __shared__ int64_t tile[kTile];
    __shared__ int gaps[kTile][kMaxColumns + 1]; // one more than there are: fewer bank conflicts
    __shared__ Missed missed[kTile][kMaxColumns + 1];
    {
        const int c = threadIdx.x / kTile, k = threadIdx.x % kTile;
        const int64_t i = static_cast<int64_t>(blockIdx.x) * kTile + k;
        if (c < columns.count) {
            const Column &column = columns.at[c];
            int gap = 0;
            if (i < n) {
                const int64_t row = rows ? rows[i] : i;
                if (c == 0) {
                    tile[k] = row;
                }
                const int last = row < 0 ? column.step : static_cast<int>(column.row_step[row]);
                gap = column.step - last;
                if (gap > 0) {
                    column.row_step[row] = static_cast<float>(column.step);
                    missed[k][c] = {
                        static_cast<float>(column.first[last]), static_cast<float>(column.second[last]),
                        static_cast<float>(exp2(gap * column.log2_beta1)),
                        static_cast<float>(exp2(gap * column.log2_beta2))
                    };
                }
            }
            gaps[k][c] = gap;
        }
    }
    __syncthreads();
    for_places(columns, [&](int c, int d, int first, int by) {
        const Column &column = columns.at[c];
        const auto store = [&](int k, float value, float m, float v) {
            const int64_t row = tile[k];
            column.values[row * column.stride + d] = value;
            column.exp_avg[row * column.width + d] = m * missed[k][c].decay1;
            column.exp_avg_sq[row * column.width + d] = v * missed[k][c].decay2;
        };
        uint32_t close = 0; // rows, one a bit, where √v is close to ε: few, so they are left for the end
        for (int start = first; start < kTile; start += kBatch * by) {
            float value[kBatch], m[kBatch], v[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = start + b * by;
                if (k < kTile && gaps[k][c] > 0) {
                    const int64_t row = tile[k];
                    value[b] = column.values[row * column.stride + d];
                    m[b] = column.exp_avg[row * column.width + d];
                    v[b] = column.exp_avg_sq[row * column.width + d];
                }
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = start + b * by;
                if (k < kTile && gaps[k][c] > 0) {
                    const float root = sqrtf(v[b]);
                    if (root * column.safety > column.eps) {
                        const float first_order = m[b] / root * missed[k][c].first;
                        const float second_order = column.eps * (m[b] / v[b]) * missed[k][c].second;
                        store(k, value[b] - (first_order - second_order), m[b], v[b]);
                    } else if (m[b] == 0.0f) {
                        store(k, value[b], m[b], v[b]);
                    } else {
                        close |= 1u << k;
                    }
                }
            }
        }
        for (; close; close &= close - 1) {
            const int k = __ffs(close) - 1;
            const int64_t row = tile[k];
            const float m = column.exp_avg[row * column.width + d], v = column.exp_avg_sq[row * column.width + d];
            const float move = walk(column, gaps[k][c], m, v);
            store(k, column.values[row * column.stride + d] - move, m, v);
        }
    });
}

__global__ void __launch_bounds__(kThreads) take_kernel(
    const int64_t n, const int64_t *__restrict__ rows, const bool *__restrict__ active,
    const __grid_constant__ Columns columns
) {
    __shared__ int64_t tile[kTile]; // −1: not active
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
    {
        const int c = threadIdx.x / kTile, k = threadIdx.x % kTile;
        const int64_t i = begin + k;
        if (c < columns.count) {
            const int64_t row = i < n && (!active || active[i]) ? rows[i] : -1;
            if (c == 0) {
                tile[k] = row;
            }
            if (row >= 0) {
                columns.at[c].row_step[row] = static_cast<float>(columns.at[c].step);
            }
        }
    }
    __syncthreads();
    for_places(columns, [&](int c, int d, int first, int by) {
        const Column &column = columns.at[c];
        const float beta1 = static_cast<float>(column.beta1), rest1 = static_cast<float>(1.0 - column.beta1);
        const float beta2 = static_cast<float>(column.beta2), rest2 = static_cast<float>(1.0 - column.beta2);
        for (int start = first; start < kTile; start += kBatch * by) {
            float value[kBatch], m[kBatch], v[kBatch], g[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = start + b * by;
                if (k < kTile && tile[k] >= 0) {
                    const int64_t row = tile[k];
                    value[b] = column.values[row * column.stride + d];
                    m[b] = column.exp_avg[row * column.width + d];
                    v[b] = column.exp_avg_sq[row * column.width + d];
                    g[b] = column.grad[(begin + k) * column.width + d];
                }
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = start + b * by;
                if (k < kTile && tile[k] >= 0) {
                    const int64_t row = tile[k];
                    const float later = m[b] * beta1 + g[b] * rest1;
                    const float later_sq = v[b] * beta2 + g[b] * g[b] * rest2;
                    const float move = column.rate * later / (sqrtf(later_sq) * column.root + column.eps);
                    column.values[row * column.stride + d] = value[b] - move;
                    column.exp_avg[row * column.width + d] = later;
                    column.exp_avg_sq[row * column.width + d] = later_sq;
                }
            }
        }
    });
}

// Each thread: one of the steps before the new one.
__global__ void __launch_bounds__(kThreads) announce_kernel(const __grid_constant__ Tables tables) {
    const Table &table = tables.at[blockIdx.y];
    const int64_t age = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x + 1;
    if (age == 1) {
        table.rates[table.now] = table.rate;
    }
    if (age <= table.reached) {
        const int64_t since = table.now - age;
        const double steps = static_cast<double>(age);
        table.first[since] += table.weight1 * exp2(steps * table.log2_decay1);
        table.second[since] += table.weight2 * exp2(steps * table.log2_decay2);
    }
}

unsigned blocks(int64_t n, int of) { return static_cast<unsigned>((n + of - 1) / of); }

} // namespace

// Pointers in the structures are device memory of contiguous arrays, the structures themselves host memory. Rows are all
// different. The functions leave `device` as the current one and return a cudaError_t.
extern "C" {

// rows (n,), null for the rows 0, …, n − 1. Writes values, moments and row_step of all columns.
int adam_catch_up(int device, cudaStream_t stream, int64_t n, const int64_t *rows, const Columns *columns) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || n == 0) {
        return error;
    }
    catch_up_kernel<<<blocks(n, kTile), kThreads, 0, stream>>>(n, rows, *columns);
    return cudaGetLastError();
}

// rows (n,), active (n,) or null. Writes values, moments and row_step of all columns.
int adam_take(
    int device, cudaStream_t stream, int64_t n, const int64_t *rows, const bool *active, const Columns *columns
) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || n == 0) {
        return error;
    }
    take_kernel<<<blocks(n, kTile), kThreads, 0, stream>>>(n, rows, active, *columns);
    return cudaGetLastError();
}

// Adds a step to all tables; it reaches `longest` steps back in one of them, and in none further.
int adam_announce(int device, cudaStream_t stream, int64_t longest, const Tables *tables) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) {
        return error;
    }
    announce_kernel<<<dim3(blocks(longest, kThreads), static_cast<unsigned>(tables->count)), kThreads, 0, stream>>>(*tables);
    return cudaGetLastError();
}
}
