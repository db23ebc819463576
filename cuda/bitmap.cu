// Sets of rows as packed bitmaps: row r is bit r mod 64 of word r / 64.
//
// Torch twin: odin_nerfstudio/shadow/bitmap/reference.py.
//
// The rows below a word are counted in two passes and without a scan over all words: a block counts the rows of its
// tile, then every block adds up the tiles before its own, a few hundred numbers that lie in the L2 cache.
//
// What is to be made of several sets comes as a program in the kernel's parameters, and every thread runs it on its own
// words: all threads take the same branches, and the stack is in registers.

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 512;
constexpr int kTile = kThreads; // words; the wrapper's _TILE
constexpr int kWarps = kThreads / 32;
constexpr int kMaxSets = 256; // of one launch
constexpr int kMaxPrograms = 128;     // of one launch
constexpr int kMaxInstructions = 448; // of all of them: parameters have 4 KB
constexpr int kDepth = 6;             // of the stack; enough for what LONGEST of the package allows
constexpr int kMaxNumbers = 8;        // that travel with counts
constexpr int kWordsCounted = 2;      // by a thread for each program
constexpr unsigned kWholeWarp = 0xffffffffu;

struct Sums {
    int64_t before; // of the threads before this one
    int64_t total;  // of the block
};

// To be called by all threads of a block.
__device__ Sums block_sums(int64_t value) {
    __shared__ int64_t of_warp[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t up_to = value; // of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t lower = __shfl_up_sync(kWholeWarp, up_to, distance);
        up_to += lane >= distance ? lower : 0;
    }
    if (lane == 31) {
        of_warp[warp] = up_to;
    }
    __syncthreads();
    Sums sums = {up_to - value, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        sums.before += w < warp ? of_warp[w] : 0;
        sums.total += of_warp[w];
    }
    __syncthreads(); // the next call writes of_warp again
    return sums;
}

// A set is a row of blocks.
__global__ void __launch_bounds__(kThreads) count_kernel(
    const int64_t width, const uint64_t *__restrict__ words, unsigned long long *__restrict__ counts
) {
    const uint64_t *set = words + blockIdx.x * width;
    const int64_t stride = static_cast<int64_t>(gridDim.y) * kThreads;
    int64_t count = 0;
#pragma unroll 8
    for (int64_t w = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; w < width; w += stride) {
        count += __popcll(set[w]);
    }
    const int64_t total = block_sums(count).total;
    if (threadIdx.x == 0) {
        if (gridDim.y == 1) {
            counts[blockIdx.x] = total;
        } else {
            atomicAdd(counts + blockIdx.x, static_cast<unsigned long long>(total));
        }
    }
}

// A thread has one byte of the mask; what a warp finds is half a word. Sets are along y.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const int64_t n, const uint8_t *__restrict__ mask, uint32_t *__restrict__ halves) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t halves_of_set = (n + 63) / 64 * 2;
    const uint32_t half = __ballot_sync(kWholeWarp, i < n && mask[blockIdx.y * n + i] != 0);
    if (threadIdx.x % 32 == 0 && i / 32 < halves_of_set) {
        halves[blockIdx.y * halves_of_set + i / 32] = half;
    }
}

__global__ void __launch_bounds__(kThreads)
    insert_kernel(
        const int64_t n, const int64_t *__restrict__ rows, const bool *__restrict__ chosen,
        uint32_t *__restrict__ halves
    ) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n && (chosen == nullptr || chosen[i])) {
        atomicOr(halves + rows[i] / 32, 1u << rows[i] % 32);
    }
}

// A thread has one byte of the words, eight rows.
__global__ void __launch_bounds__(kThreads)
    mask_kernel(const int64_t n, const uint8_t *__restrict__ bytes, uint64_t *__restrict__ mask) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        // Bit k of the byte goes to bit k of byte k; adding 127 carries whatever bit that is to the top.
        const uint64_t apart = bytes[i] * 0x0101010101010101ull & 0x8040201008040201ull;
        mask[i] = (apart + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    }
}

__global__ void __launch_bounds__(kThreads) contains_kernel(
    const int64_t n, const uint64_t *__restrict__ words, const int64_t *__restrict__ rows, bool *__restrict__ found
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        found[i] = words[rows[i] / 64] >> rows[i] % 64 & 1;
    }
}

// The thread's word of the block's tile of a set; 0 beyond the last one.
__device__ uint64_t word_of_thread(const int64_t width, const uint64_t *words) {
    const int64_t w = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
    return w < width ? words[blockIdx.y * width + w] : 0;
}

__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const int64_t width, const uint64_t *__restrict__ words, int *__restrict__ tiles) {
    const int64_t total = block_sums(__popcll(word_of_thread(width, words))).total;
    if (threadIdx.x == 0) {
        tiles[blockIdx.y * static_cast<int64_t>(gridDim.x) + blockIdx.x] = static_cast<int>(total);
    }
}

// Rows of the set below the thread's word, and up to the end of the block's tile.
__device__ Sums rows_below(const uint64_t word, const int *tiles) {
    const int *of_set = tiles + blockIdx.y * static_cast<int64_t>(gridDim.x);
    int64_t earlier = 0;
    for (int tile = threadIdx.x; tile < blockIdx.x; tile += kThreads) {
        earlier += of_set[tile];
    }
    earlier = block_sums(earlier).total;
    const Sums sums = block_sums(__popcll(word));
    return {earlier + sums.before, earlier + sums.total};
}

__global__ void __launch_bounds__(kThreads) prefix_kernel(
    const int64_t width, const uint64_t *__restrict__ words, const int *__restrict__ tiles, int *__restrict__ prefix
) {
    const int64_t w = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
    const Sums below = rows_below(word_of_thread(width, words), tiles);
    if (w < width) {
        prefix[w] = static_cast<int>(below.before);
    }
}

__global__ void __launch_bounds__(kThreads) place_kernel(
    const int64_t n, const uint64_t *__restrict__ words, const int *__restrict__ prefix,
    const int64_t *__restrict__ rows, int64_t *__restrict__ places
) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        const int64_t w = rows[i] / 64;
        places[i] = prefix[w] + __popcll(words[w] & ((1ull << rows[i] % 64) - 1));
    }
}

struct Starts { // of the sets in the list of rows, and its end; by value in the kernel's parameters
    int64_t at[kMaxSets + 1];
};

__global__ void __launch_bounds__(kThreads) rows_kernel(
    const int64_t width, const uint64_t *__restrict__ words, const int *__restrict__ tiles, const Starts starts,
    int64_t *__restrict__ rows
) {
    const int lane = threadIdx.x % 32;
    const uint64_t word = word_of_thread(width, words);
    const Sums below = rows_below(word, tiles);
    const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x - lane) * 64; // of the warp
    const int64_t room = starts.at[blockIdx.y + 1] - starts.at[blockIdx.y];
    rows += starts.at[blockIdx.y];
    // The warp writes its words one after the other, two bits a lane, to neighbouring places.
    for (unsigned left = __ballot_sync(kWholeWarp, word != 0); left != 0; left &= left - 1) {
        const int source = __ffs(left) - 1;
        const uint64_t bits = __shfl_sync(kWholeWarp, word, source);
        const int64_t start = __shfl_sync(kWholeWarp, below.before, source);
#pragma unroll
        for (int bit = lane; bit < 64; bit += 32) {
            const int64_t place = start + __popcll(bits & ((1ull << bit) - 1));
            if ((bits >> bit & 1) && place < room) {
                rows[place] = first_row + source * 64 + bit;
            }
        }
    }
    if (blockIdx.x == gridDim.x - 1) { // fewer rows than was said
        for (int64_t place = below.total + threadIdx.x; place < room; place += kThreads) {
            rows[place] = 0;
        }
    }
}

enum Operation : uint64_t { kAnd, kOr, kMinus, kFrom, kOperations }; // program.py of the package

struct Programs { // by value in the kernel's parameters; program p ends before instruction end[p]
    uint64_t code[kMaxInstructions]; // an Operation, or else the address of words to put on the stack
    uint16_t end[kMaxPrograms];
};

// Runs program blockIdx.y on the words first, first + kThreads, ... of sets of `width`. No program gives zeros.
template <int kWords>
__device__ __forceinline__ void
run(const Programs &programs, const int64_t width, const int64_t first, uint64_t (&result)[kWords]) {
    uint64_t stack[kDepth][kWords] = {}; // the top is 0
    const int end = programs.end[blockIdx.y];
    for (int i = blockIdx.y == 0 ? 0 : programs.end[blockIdx.y - 1]; i < end; ++i) {
        const uint64_t code = programs.code[i];
        if (code < kOperations) {
#pragma unroll
            for (int k = 0; k < kWords; ++k) {
                const uint64_t below = stack[1][k], top = stack[0][k];
                stack[0][k] = code == kAnd     ? below & top
                              : code == kOr    ? below | top
                              : code == kMinus ? below & ~top
                                               : top & ~below;
#pragma unroll
                for (int depth = 1; depth < kDepth - 1; ++depth) {
                    stack[depth][k] = stack[depth + 1][k];
                }
            }
        } else {
            const uint64_t *words = reinterpret_cast<const uint64_t *>(code);
#pragma unroll
            for (int k = 0; k < kWords; ++k) {
#pragma unroll
                for (int depth = kDepth - 1; depth > 0; --depth) {
                    stack[depth][k] = stack[depth - 1][k];
                }
                const int64_t w = first + k * kThreads;
                stack[0][k] = w < width ? __ldg(words + w) : 0;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
        result[k] = stack[0][k];
    }
}

__global__ void __launch_bounds__(kThreads)
    evaluate_kernel(const __grid_constant__ Programs programs, const int64_t width, uint64_t *__restrict__ words) {
    const int64_t w = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    uint64_t result[1];
    run(programs, width, w, result);
    if (w < width) {
        words[blockIdx.y * width + w] = result[0];
    }
}

__global__ void __launch_bounds__(kThreads) count_all_kernel(
    const __grid_constant__ Programs programs, const int64_t width, unsigned long long *__restrict__ counts
) {
    uint64_t result[kWordsCounted];
    run(programs, width, static_cast<int64_t>(blockIdx.x) * (kWordsCounted * kThreads) + threadIdx.x, result);
    int64_t count = 0;
#pragma unroll
    for (int k = 0; k < kWordsCounted; ++k) {
        count += __popcll(result[k]);
    }
    const int64_t total = block_sums(count).total;
    if (threadIdx.x == 0 && total != 0) {
        atomicAdd(counts + blockIdx.y, static_cast<unsigned long long>(total));
    }
}

struct Numbers { // by value in the kernel's parameters
    int64_t at[kMaxNumbers];
};

// Zeros, then the numbers.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const int64_t zeros, const int64_t n, const __grid_constant__ Numbers numbers, int64_t *out) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < zeros + n) {
        out[i] = i < zeros ? 0 : numbers.at[i - zeros];
    }
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

unsigned tiles_of(int64_t width) { return std::max(1u, blocks(width)); } // the last one fills up, so there is one

// Calls launch() on the device unless there is nothing to do; returns a cudaError_t.
template <typename Launch> int on_device(int device, int64_t work, Launch launch) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || work == 0) {
        return error;
    }
    launch();
    return cudaGetLastError();
}

// Calls launch(programs, first, how many) for as many of the programs at a time as parameters hold, with the code of
// all and where each ends; returns a cudaError_t.
template <typename Launch>
int in_parts(int64_t count, const uint64_t *code, const int64_t *ends, Launch launch) {
    for (int64_t first = 0; first < count;) {
        const int64_t begin = first == 0 ? 0 : ends[first - 1];
        Programs programs = {};
        int64_t n = 0;
        while (first + n < count && n < kMaxPrograms && ends[first + n] - begin <= kMaxInstructions) {
            programs.end[n] = static_cast<uint16_t>(ends[first + n] - begin);
            ++n;
        }
        if (n == 0) {
            return cudaErrorInvalidValue; // one that is too long
        }
        std::copy(code + begin, code + begin + programs.end[n - 1], programs.code);
        launch(programs, first, static_cast<unsigned>(n));
        first += n;
    }
    return cudaGetLastError();
}

} // namespace

// All pointers but those said to be in host memory are device memory, all arrays contiguous; any size may be 0. Rows must be
// such that their words exist. They leave `device` as the current one and return a cudaError_t.
extern "C" {

// words (sets, width) → counts (sets), written.
int bitmap_count(
    int device, cudaStream_t stream, int64_t sets, int64_t width, const uint64_t *words, unsigned long long *counts
) {
    return on_device(device, sets, [&] {
        // One block reads 2 million rows in a few microseconds; several have to start from 0.
        const int64_t parts = std::clamp<int64_t>(width / (64 * kThreads), 1, 64);
        if (parts > 1) {
            cudaMemsetAsync(counts, 0, sets * sizeof(*counts), stream);
        }
        count_kernel<<<dim3(sets, parts), kThreads, 0, stream>>>(width, words, counts);
    });
}

// mask (sets ≤ 65,535, n) bytes → words (sets, ⌈n/64⌉), written.
int bitmap_pack(int device, cudaStream_t stream, int64_t sets, int64_t n, const uint8_t *mask, uint32_t *words) {
    return on_device(device, sets * n, [&] {
        const int64_t rows = (n + 63) / 64 * 64; // whole words, so that bits beyond n are written too
        pack_kernel<<<dim3(blocks(rows), sets), kThreads, 0, stream>>>(n, mask, words);
    });
}

// rows (n), and which of them are meant (n), or null: all → words as 32-bit halves, added to.
int bitmap_insert(
    int device, cudaStream_t stream, int64_t n, const int64_t *rows, const bool *chosen, uint32_t *words
) {
    return on_device(device, n, [&] {
        insert_kernel<<<blocks(n), kThreads, 0, stream>>>(n, rows, chosen, words);
    });
}

// words (width) → mask (64 · width) bytes 0 or 1, written.
int bitmap_mask(int device, cudaStream_t stream, int64_t width, const uint8_t *words, uint64_t *mask) {
    return on_device(device, width, [&] {
        mask_kernel<<<blocks(8 * width), kThreads, 0, stream>>>(8 * width, words, mask);
    });
}

// words, rows (n) → found (n), written.
int bitmap_contains(
    int device, cudaStream_t stream, int64_t n, const uint64_t *words, const int64_t *rows, bool *found
) {
    return on_device(device, n, [&] {
        contains_kernel<<<blocks(n), kThreads, 0, stream>>>(n, words, rows, found);
    });
}

// words (width) → prefix (width), written: rows below each word. Scratch: tiles (max(1, ⌈width / kTile⌉)).
int bitmap_prefix(
    int device, cudaStream_t stream, int64_t width, const uint64_t *words, int *tiles, int *prefix
) {
    return on_device(device, width, [&] {
        tiles_kernel<<<tiles_of(width), kThreads, 0, stream>>>(width, words, tiles);
        prefix_kernel<<<tiles_of(width), kThreads, 0, stream>>>(width, words, tiles, prefix);
    });
}

// words, prefix, rows (n) → places (n), written: rows of the set below each of `rows`.
int bitmap_place(
    int device, cudaStream_t stream, int64_t n, const uint64_t *words, const int *prefix, const int64_t *rows,
    int64_t *places
) {
    return on_device(device, n, [&] {
        place_kernel<<<blocks(n), kThreads, 0, stream>>>(n, words, prefix, rows, places);
    });
}

// words (sets, width), counts (sets) in host memory → rows (Σ counts), written: the ascending rows of each set, or as
// many as there is room for; 0 where there are fewer. Scratch: tiles (sets, max(1, ⌈width / kTile⌉)).
int bitmap_rows(
    int device, cudaStream_t stream, int64_t sets, int64_t width, const uint64_t *words, const int64_t *counts,
    int *tiles, int64_t *rows
) {
    return on_device(device, sets, [&] {
        for (int64_t first = 0; first < sets; first += kMaxSets) {
            const int64_t chunk = std::min<int64_t>(kMaxSets, sets - first);
            Starts starts = {};
            for (int64_t set = 0; set < chunk; ++set) {
                starts.at[set + 1] = starts.at[set] + counts[first + set];
            }
            const dim3 grid(tiles_of(width), static_cast<unsigned>(chunk));
            const uint64_t *chunk_words = words + first * width;
            tiles_kernel<<<grid, kThreads, 0, stream>>>(width, chunk_words, tiles);
            rows_kernel<<<grid, kThreads, 0, stream>>>(width, chunk_words, tiles, starts, rows);
            rows += starts.at[chunk];
        }
    });
}

// Programs in host memory: their code, and where each (count) ends → words (count, width), written.
int bitmap_evaluate(
    int device, cudaStream_t stream, int64_t count, int64_t width, const uint64_t *code, const int64_t *ends,
    uint64_t *words
) {
    int error = cudaSuccess;
    const int other = on_device(device, count * width, [&] {
        error = in_parts(count, code, ends, [&](const Programs &programs, int64_t first, unsigned n) {
            evaluate_kernel<<<dim3(blocks(width), n), kThreads, 0, stream>>>(programs, width, words + first * width);
        });
    });
    return error != cudaSuccess ? error : other;
}

// Programs as above, numbers (n ≤ kMaxNumbers) in host memory → counts (count + n), written: bits set in what each
// program gives, then the numbers.
int bitmap_count_all(
    int device, cudaStream_t stream, int64_t count, int64_t width, const uint64_t *code, const int64_t *ends,
    int64_t n, const int64_t *numbers, int64_t *counts
) {
    if (n > kMaxNumbers) {
        return cudaErrorInvalidValue;
    }
    int error = cudaSuccess;
    const int other = on_device(device, count + n, [&] {
        Numbers travelling = {};
        std::copy(numbers, numbers + n, travelling.at);
        begin_kernel<<<blocks(count + n), kThreads, 0, stream>>>(count, n, travelling, counts);
        if (width > 0) {
            error = in_parts(count, code, ends, [&](const Programs &programs, int64_t first, unsigned part) {
                const dim3 grid(blocks((width + kWordsCounted - 1) / kWordsCounted), part);
                auto *of_part = reinterpret_cast<unsigned long long *>(counts + first);
                count_all_kernel<<<grid, kThreads, 0, stream>>>(programs, width, of_part);
            });
        }
    });
    return error != cudaSuccess ? error : other;
}
}
