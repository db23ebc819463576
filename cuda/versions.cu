// Versions of rows: which one a reader got, and whether it was still the newest when the row was published.
//
// Torch twin and wrapper: odin_nerfstudio/shadow/versions.py. Sets of rows are packed: row r is bit r mod 64 of word
// r / 64.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 128;

__device__ int64_t number_of_thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__device__ bool contains(const uint64_t *words, int64_t row) { return words[row / 64] >> row % 64 & 1; }

// A thread has one row.
__global__ void __launch_bounds__(kThreads) hand_out_kernel(
    const int64_t n, const uint64_t *__restrict__ words, const int *__restrict__ versions, int *__restrict__ read
) {
    const int64_t row = number_of_thread();
    if (row < n && contains(words, row)) {
        read[row] = versions[row];
    }
}

// A thread has half a word of the sets, so that most of those that have nothing to do are not even begun.
__global__ void __launch_bounds__(kThreads) publish_kernel(
    const int64_t halves, const uint32_t *__restrict__ words, const uint32_t *__restrict__ stale,
    const int *__restrict__ read, int *__restrict__ versions, const int step, uint32_t *__restrict__ broken
) {
    const int64_t half = number_of_thread();
    if (half >= halves) {
        return;
    }
    uint32_t moved = 0;
    for (uint32_t left = words[half]; left; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const int64_t row = half * 32 + bit;
        if (read[row] != versions[row]) {
            moved |= 1u << bit;
        }
        versions[row] = step;
    }
    broken[half] = moved ? moved & ~stale[half] : 0;
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

// Calls launch() on the device unless there is nothing to do; returns a cudaError_t.
template <typename Launch> int on_device(int device, int64_t work, Launch launch) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || work == 0) {
        return error;
    }
    launch();
    return cudaGetLastError();
}

} // namespace

// All pointers are device memory, all arrays contiguous: n rows or ⌈n/64⌉ words. They leave `device` as the current one
// and return a cudaError_t.
extern "C" {

// read[row] = versions[row] for the rows of a set.
int versions_hand_out(
    int device, cudaStream_t stream, int64_t n, const uint64_t *words, const int *versions, int *read
) {
    return on_device(device, n, [&] {
        hand_out_kernel<<<blocks(n), kThreads, 0, stream>>>(n, words, versions, read);
    });
}

// versions[row] = step for the rows of a set → broken, written: those that are not stale and had another version than
// the one that was read.
int versions_publish(
    int device, cudaStream_t stream, int64_t n, const uint32_t *words, const uint32_t *stale, const int *read,
    int *versions, int64_t step, uint32_t *broken
) {
    return on_device(device, n, [&] {
        const int64_t halves = (n + 63) / 64 * 2; // of whole words, in which bits beyond n are zero
        publish_kernel<<<blocks(halves), kThreads, 0, stream>>>(
            halves, words, stale, read, versions, static_cast<int>(step), broken
        );
    });
}
}
