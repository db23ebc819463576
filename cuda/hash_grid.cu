// Multiresolution hash encoding (Müller et al. 2022, "Instant neural graphics primitives", §3).
//
// Torch twin: odin_nerfstudio/nerfxl/hash_grid/reference.py. Layout of the table: layout.py beside it.
//
// A thread has one position at one level. Blocks are numbered level by level, so that those that run at the same time
// share one level of the table in the L2 cache. Encodings are stored feature by feature, (levels · F, N): a warp writes
// whole sectors. The gradient of the table is summed with atomics: equal up to the order of float32 additions, not to
// the bit. The gradient of the positions has a thread per position and is deterministic.

#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

struct Level {
    float scale;         // cells per unit length
    uint32_t resolution; // vertices along an edge
    uint32_t offset;     // first entry in the table
    uint32_t entries;
    uint32_t hashed;
};

namespace {

constexpr int kMaxLevels = 32;
constexpr int kThreads = 256;

struct Levels { // by value in the kernel's parameters: constant memory
    Level level[kMaxLevels];
};

template <int F> struct alignas(F * sizeof(float)) Row {
    float at[F];
};

template <> struct alignas(16) Row<8> { // no load is wider than 16 bytes
    float at[8];
};

// A cell of the lattice and where in it the position lies.
struct Cell {
    uint32_t corner[3];
    float fraction[3];

    __device__ Cell(const Level &level, const float *position) {
        for (int axis = 0; axis < 3; ++axis) {
            const float scaled = fmaf(position[axis], level.scale, 0.5f);
            const float floor = floorf(scaled);
            corner[axis] = static_cast<uint32_t>(static_cast<int>(floor));
            fraction[axis] = scaled - floor;
        }
    }

    // Entry of one of the eight vertices; bit a of `vertex` says whether it is the upper one along axis a.
    __device__ uint32_t entry(const Level &level, int vertex) const {
        const uint32_t x = corner[0] + (vertex & 1);
        const uint32_t y = corner[1] + (vertex >> 1 & 1);
        const uint32_t z = corner[2] + (vertex >> 2 & 1);
        if (level.hashed) { // a power of two entries
            return level.offset + ((x ^ y * 2654435761u ^ z * 805459861u) & (level.entries - 1));
        }
        const uint32_t index = x + level.resolution * (y + level.resolution * z);
        return level.offset + (index < level.entries ? index : index % level.entries);
    }

    __device__ float weight(int axis, int vertex) const {
        return (vertex >> axis & 1) ? fraction[axis] : 1.0f - fraction[axis];
    }
};

template <int F>
__global__ void __launch_bounds__(kThreads) forward_kernel(
    const int64_t n, const float *__restrict__ positions, const Row<F> *__restrict__ table, const Levels levels,
    float *__restrict__ encoding
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    const Level &level = levels.level[blockIdx.y];
    const Cell cell(level, positions + 3 * i);
    float sum[F] = {};
#pragma unroll
    for (int vertex = 0; vertex < 8; ++vertex) {
        const float weight = cell.weight(0, vertex) * cell.weight(1, vertex) * cell.weight(2, vertex);
        const Row<F> row = table[cell.entry(level, vertex)];
#pragma unroll
        for (int f = 0; f < F; ++f) {
            sum[f] = fmaf(weight, row.at[f], sum[f]);
        }
    }
#pragma unroll
    for (int f = 0; f < F; ++f) {
        encoding[(static_cast<int64_t>(blockIdx.y) * F + f) * n + i] = sum[f];
    }
}

template <int F> __device__ void atomic_add(Row<F> *row, const Row<F> &value) {
    int f = 0;
#if __CUDA_ARCH__ >= 900 // two at once
#pragma unroll
    for (; f + 1 < F; f += 2) {
        atomicAdd(reinterpret_cast<float2 *>(row->at + f), make_float2(value.at[f], value.at[f + 1]));
    }
#endif
#pragma unroll
    for (; f < F; ++f) {
        atomicAdd(row->at + f, value.at[f]);
    }
}

template <int F>
__global__ void __launch_bounds__(kThreads) table_backward_kernel(
    const int64_t n, const float *__restrict__ positions, const Levels levels, const float *__restrict__ grad,
    Row<F> *__restrict__ grad_table
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    const Level &level = levels.level[blockIdx.y];
    float g[F];
    bool zero = true;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        g[f] = grad[(static_cast<int64_t>(blockIdx.y) * F + f) * n + i];
        zero = zero && g[f] == 0.0f;
    }
    if (zero) { // samples behind a surface
        return;
    }
    const Cell cell(level, positions + 3 * i);
#pragma unroll
    for (int vertex = 0; vertex < 8; ++vertex) {
        const float weight = cell.weight(0, vertex) * cell.weight(1, vertex) * cell.weight(2, vertex);
        Row<F> value;
#pragma unroll
        for (int f = 0; f < F; ++f) {
            value.at[f] = weight * g[f];
        }
        atomic_add(grad_table + cell.entry(level, vertex), value);
    }
}

template <int F>
__global__ void __launch_bounds__(kThreads) positions_backward_kernel(
    const int64_t n, const float *__restrict__ positions, const Row<F> *__restrict__ table, const Levels levels,
    const int num_levels, const float *__restrict__ grad, float *__restrict__ grad_positions
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    float sum[3] = {};
    for (int l = 0; l < num_levels; ++l) {
        const Level &level = levels.level[l];
        const Cell cell(level, positions + 3 * i);
        float g[F];
#pragma unroll
        for (int f = 0; f < F; ++f) {
            g[f] = grad[(static_cast<int64_t>(l) * F + f) * n + i];
        }
#pragma unroll
        for (int vertex = 0; vertex < 8; ++vertex) {
            const Row<F> row = table[cell.entry(level, vertex)];
            float along = 0.0f;
#pragma unroll
            for (int f = 0; f < F; ++f) {
                along = fmaf(g[f], row.at[f], along);
            }
            along *= level.scale;
#pragma unroll
            for (int axis = 0; axis < 3; ++axis) {
                const float others = cell.weight((axis + 1) % 3, vertex) * cell.weight((axis + 2) % 3, vertex);
                sum[axis] += (vertex >> axis & 1) ? along * others : -along * others;
            }
        }
    }
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        grad_positions[3 * i + axis] = sum[axis];
    }
}

Levels copied(const Level *levels, int num_levels) {
    Levels copy = {};
    for (int l = 0; l < num_levels; ++l) {
        copy.level[l] = levels[l];
    }
    return copy;
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

// Calls launch(std::integral_constant<int, features>) on the device; returns a cudaError_t.
template <typename Launch> int on_device(int device, int features, int num_levels, Launch launch) {
    if (num_levels < 1 || num_levels > kMaxLevels) {
        return cudaErrorInvalidValue;
    }
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) {
        return error;
    }
    switch (features) {
    case 1: launch(std::integral_constant<int, 1>()); break;
    case 2: launch(std::integral_constant<int, 2>()); break;
    case 4: launch(std::integral_constant<int, 4>()); break;
    case 8: launch(std::integral_constant<int, 8>()); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

} // namespace

// All pointers but `levels` are device memory of float32, all arrays contiguous; n > 0. `levels` is host memory.
// They leave `device` as the current one and return a cudaError_t.
extern "C" {

// positions (n, 3), table (entries, F) → encoding (num_levels · F, n), written.
int hash_grid_forward(
    int device, cudaStream_t stream, int64_t n, int64_t features, int64_t num_levels, const Level *levels,
    const float *positions, const float *table, float *encoding
) {
    return on_device(device, features, num_levels, [&](auto constant) {
        constexpr int F = decltype(constant)::value;
        forward_kernel<F><<<dim3(blocks(n), num_levels), kThreads, 0, stream>>>(
            n, positions, reinterpret_cast<const Row<F> *>(table), copied(levels, num_levels), encoding
        );
    });
}

// grad (num_levels · F, n) → grad_table (entries, F), added to.
int hash_grid_table_backward(
    int device, cudaStream_t stream, int64_t n, int64_t features, int64_t num_levels, const Level *levels,
    const float *positions, const float *grad, float *grad_table
) {
    return on_device(device, features, num_levels, [&](auto constant) {
        constexpr int F = decltype(constant)::value;
        table_backward_kernel<F><<<dim3(blocks(n), num_levels), kThreads, 0, stream>>>(
            n, positions, copied(levels, num_levels), grad, reinterpret_cast<Row<F> *>(grad_table)
        );
    });
}

// grad (num_levels · F, n) → grad_positions (n, 3), written.
int hash_grid_positions_backward(
    int device, cudaStream_t stream, int64_t n, int64_t features, int64_t num_levels, const Level *levels,
    const float *positions, const float *table, const float *grad, float *grad_positions
) {
    return on_device(device, features, num_levels, [&](auto constant) {
        constexpr int F = decltype(constant)::value;
        positions_backward_kernel<F><<<blocks(n), kThreads, 0, stream>>>(
            n, positions, reinterpret_cast<const Row<F> *>(table), copied(levels, num_levels), num_levels, grad,
            grad_positions
        );
    });
}
}
