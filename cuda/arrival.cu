// Splats that arrive in pieces, merged by id into the fields of one view, and their gradients back in the order of the
// pieces.
//
// Torch twin: odin_nerfstudio/splat/fused/leaves/reference.py. Layout of splats and gradients: comm/splat_block.py.
//
// Every piece ascends in id, and no id is in two of them. The place of a splat in the merged order is therefore its
// place in its own piece and the number of smaller ids in each other one: a binary search each, no sort. The splats of a
// warp are neighbours and search almost the same way, so that most of it is served from the caches.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int kMaxPieces = 64;

struct Pieces {
    int64_t count;
    const float *at[kMaxPieces];
    int64_t start[kMaxPieces + 1]; // of each piece in the list of all splats, and its end
};

struct Fields { // of the merged splats, contiguous
    int64_t *ids;
    int64_t *index; // where it was in the list of all splats
    float *means2d;
    float *depths;
    float *conics;
    float *opacities;
    float *colors;
    int32_t *radii;
};

struct Gradients { // of the merged splats, contiguous; null: zero
    const float *means2d;
    const float *depths;
    const float *conics;
    const float *opacities;
    const float *colors;
    const float *absgrad;
};

namespace {

constexpr int kThreads = 256;
constexpr int kSplat = 13; // floats of a packed splat
constexpr int kGrad = 12;  // of its gradient

// The id of splat k of a piece: two words, which are aligned as floats are.
__device__ int64_t id_of(const float *piece, int64_t k) {
    const uint32_t *words = reinterpret_cast<const uint32_t *>(piece) + kSplat * k;
    return static_cast<int64_t>(static_cast<uint64_t>(__ldg(words + 1)) << 32 | __ldg(words));
}

// Splats of a piece of `size` whose ids are smaller.
__device__ int64_t smaller(const float *piece, int64_t size, int64_t id) {
    int64_t first = 0;
    while (size > 0) {
        const int64_t half = size / 2;
        const bool beyond = id_of(piece, first + half) < id;
        first = beyond ? first + half + 1 : first;
        size = beyond ? size - half - 1 : half;
    }
    return first;
}

template <int kWidth> __device__ void copy(float *to, const float *from) {
#pragma unroll
    for (int column = 0; column < kWidth; ++column) {
        to[column] = from[column];
    }
}

// A thread has one splat.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ Pieces pieces, const Fields merged, int64_t *__restrict__ places) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= pieces.start[pieces.count]) {
        return;
    }
    int own = 0;
    for (int piece = 1; piece < pieces.count; ++piece) {
        own += i >= pieces.start[piece];
    }
    const int64_t k = i - pieces.start[own];
    const int64_t id = id_of(pieces.at[own], k);
    int64_t place = k;
    for (int piece = 0; piece < pieces.count; ++piece) {
        if (piece != own) {
            place += smaller(pieces.at[piece], pieces.start[piece + 1] - pieces.start[piece], id);
        }
    }
    float splat[kSplat];
    copy<kSplat>(splat, pieces.at[own] + kSplat * k);
    merged.ids[place] = id;
    merged.index[place] = i;
    copy<2>(merged.means2d + 2 * place, splat + 2);
    merged.depths[place] = splat[4];
    copy<3>(merged.conics + 3 * place, splat + 5);
    merged.opacities[place] = splat[8];
    copy<3>(merged.colors + 3 * place, splat + 9);
    merged.radii[place] = __float_as_int(splat[12]);
    if (places) {
        places[i] = place;
    }
}

template <int kWidth> __device__ void fetch(float *to, const float *column, int64_t place) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        to[i] = column ? column[kWidth * place + i] : 0.0f;
    }
}

// A thread has one splat; it writes three vectors.
__global__ void __launch_bounds__(kThreads) gradients_kernel(
    const int64_t n, const Gradients merged, const int64_t *__restrict__ places, float4 *__restrict__ block
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    const int64_t place = places ? places[i] : i;
    float row[kGrad];
    fetch<2>(row, merged.means2d, place);
    fetch<1>(row + 2, merged.depths, place);
    fetch<3>(row + 3, merged.conics, place);
    fetch<1>(row + 6, merged.opacities, place);
    fetch<3>(row + 7, merged.colors, place);
    fetch<2>(row + 10, merged.absgrad, place);
#pragma unroll
    for (int part = 0; part < kGrad / 4; ++part) {
        const float *at = row + 4 * part;
        block[kGrad / 4 * i + part] = make_float4(at[0], at[1], at[2], at[3]);
    }
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

// Structures are in host memory, what they point to in device memory. They leave `device` as the current one and return
// a cudaError_t.
extern "C" {

// pieces → merged, and places (M) of the splats in the order of the pieces or null; written.
int arrival_merge(int device, cudaStream_t stream, const Pieces *pieces, const Fields *merged, int64_t *places) {
    const int64_t n = pieces->start[pieces->count];
    return on_device(device, n, [&] { merge_kernel<<<blocks(n), kThreads, 0, stream>>>(*pieces, *merged, places); });
}

// merged (n), places (n) or null: the splats are in order → block (n, 12), aligned to 16 bytes, written.
int arrival_gradients(
    int device, cudaStream_t stream, int64_t n, const Gradients *merged, const int64_t *places, float4 *block
) {
    return on_device(device, n, [&] {
        gradients_kernel<<<blocks(n), kThreads, 0, stream>>>(n, *merged, places, block);
    });
}
}
