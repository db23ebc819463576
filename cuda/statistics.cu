// What densification wants to know of rows: lengths of gradients and numbers of views, added up, and the largest radius.
//
// Torch twin and wrapper: odin_nerfstudio/splat/densify/statistics.py. A thread has one splat. Sums use atomics: equal up
// to the order of float32 additions where three or more splats share a row.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) add_kernel(
    const int64_t n, const int64_t *__restrict__ rows, const float *__restrict__ grads, const int64_t grad_stride,
    const int *__restrict__ radii, const int64_t radius_stride, const float2 scale, const float size,
    float *__restrict__ lengths, float *__restrict__ counts, float *__restrict__ largest
) {
    const int64_t splat = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (splat >= n) {
        return;
    }
    const int64_t row = rows[splat];
    const float x = scale.x * grads[grad_stride * splat], y = scale.y * grads[grad_stride * splat + 1];
    const float length = sqrtf(x * x + y * y);
    if (length != 0.0f) { // also what is not a number
        atomicAdd(lengths + row, length);
    }
    const int radius = radii[radius_stride * splat];
    if (radius > 0) {
        atomicAdd(counts + row, 1.0f);
        if (largest) { // of numbers that are not negative, larger ones have larger bits
            atomicMax(reinterpret_cast<int *>(largest + row), __float_as_int(static_cast<float>(radius) / size));
        }
    }
}

} // namespace

// All pointers are device memory. It leaves `device` as the current one and returns a cudaError_t.
//
// rows (n,), grads (n, 2) with consecutive columns and rows grad_stride apart, radii (n,) radius_stride apart → lengths,
// counts and largest (·,): of grad · scale, which is added; of views with a radius, added; and of radius / size, the
// maximum. What is in largest is not negative; it may be null.
extern "C" int statistics_add(
    int device, cudaStream_t stream, int64_t n, const int64_t *rows, const float *grads, int64_t grad_stride,
    const int *radii, int64_t radius_stride, double scale_x, double scale_y, double size, float *lengths, float *counts,
    float *largest
) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || n == 0) {
        return error;
    }
    add_kernel<<<static_cast<unsigned>((n + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        n, rows, grads, grad_stride, radii, radius_stride,
        make_float2(static_cast<float>(scale_x), static_cast<float>(scale_y)), static_cast<float>(size), lengths,
        counts, largest
    );
    return cudaGetLastError();
}
