// From rows of Gaussians to the splats that travel, and back: gather, project (EWA splatting, Zwicker et al. 2001),
// shade (spherical harmonics; Sloan, "Efficient Spherical Harmonic Evaluation", JCGT 2013) and pack in one launch.
//
// Torch twin: odin_nerfstudio/splat/raster/fused/reference.py. Layout of the camera table: camera_table.py; of a block
// of splats: comm/splat_block.py. Semantics are those of gsplat 1.4.0; covariances are kept as factors, which makes
// determinants sums of squares.
//
// A pair is a row as seen in one view; a thread has one pair. The rows of a block's pairs lie field by field in shared
// memory: they are fetched with neighbouring lanes at neighbouring words, many at once, and written as whole pieces.
//
// Sums of gradients use atomics: equal up to the order of float32 additions where three or more pairs share a row.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int kMaxViews = 64;

struct Views { // pairs [offset[v], offset[v + 1]) belong to view v
    int64_t count;
    int64_t offset[kMaxViews + 1];
};

struct Settings {
    int64_t degree; // of the harmonics; -1: the colour is sigmoid(dc)
    int64_t antialiased;
    float near;
    float far;
    float eps2d;
};

namespace {

constexpr int kPairs = 128;  // of a block of threads
constexpr int kWarp = 32;
constexpr int kNarrow = 14;  // floats of a row without `rest`
constexpr int kSplat = 13;   // floats of a packed splat
constexpr int kCamera = 18;  // floats of a camera
constexpr int kGrad = 10;    // floats of the gradient of a splat
constexpr int kMaxGrad = 12; // with those that densification needs
constexpr int kDefaultSharedBytes = 48 * 1024 - kPairs * sizeof(uint32_t); // beside the numbers of the rows
constexpr uint32_t kNone = 0xffffffff; // instead of a row; no GPU holds so many

// ------------------------------------------------------------------------------------------------------------ algebra
//
// Sums of products are explicit fused operations wherever visibility depends on them: left to the compiler, forward and
// backward could round differently and disagree on which rows are seen.

__device__ float3 operator+(float3 a, float3 b) { return make_float3(a.x + b.x, a.y + b.y, a.z + b.z); }
__device__ float3 operator-(float3 a, float3 b) { return make_float3(a.x - b.x, a.y - b.y, a.z - b.z); }
__device__ float3 operator*(float s, float3 a) { return make_float3(s * a.x, s * a.y, s * a.z); }

__device__ float dot(float3 a, float3 b) { return fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)); }

__device__ float3 cross(float3 a, float3 b) {
    return make_float3(
        fmaf(a.y, b.z, -(a.z * b.y)), fmaf(a.z, b.x, -(a.x * b.z)), fmaf(a.x, b.y, -(a.y * b.x))
    );
}

__device__ float3 float3_at(const float *p) { return make_float3(p[0], p[1], p[2]); }

__device__ void put(float *p, float3 a) {
    p[0] = a.x;
    p[1] = a.y;
    p[2] = a.z;
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ------------------------------------------------------------------------------------------------------------ cameras

struct Camera {
    float3 row[3]; // of the rotation world → camera
    float3 shift;
    float fx, fy, cx, cy, width, height;

    __device__ explicit Camera(const float *__restrict__ p)
        : row{float3_at(p), float3_at(p + 4), float3_at(p + 8)}, shift(make_float3(p[3], p[7], p[11])), fx(p[12]),
          fy(p[13]), cx(p[14]), cy(p[15]), width(p[16]), height(p[17]) {}

    __device__ float3 turned(float3 a) const { return make_float3(dot(row[0], a), dot(row[1], a), dot(row[2], a)); }

    __device__ float3 turned_back(float3 a) const { return a.x * row[0] + a.y * row[1] + a.z * row[2]; }

    __device__ float3 position_of(float3 a) const {
        return make_float3(
            fmaf(row[0].z, a.z, fmaf(row[0].y, a.y, fmaf(row[0].x, a.x, shift.x))),
            fmaf(row[1].z, a.z, fmaf(row[1].y, a.y, fmaf(row[1].x, a.x, shift.y))),
            fmaf(row[2].z, a.z, fmaf(row[2].y, a.y, fmaf(row[2].x, a.x, shift.z)))
        );
    }

    // World position: −W⁻¹·t, for a matrix that need not be quite orthogonal.
    __device__ float3 centre() const {
        const float3 yz = cross(row[1], row[2]);
        const float3 adjugate = shift.x * yz + shift.y * cross(row[2], row[0]) + shift.z * cross(row[0], row[1]);
        return (-1.0f / dot(row[0], yz)) * adjugate;
    }
};

__device__ int view_of(const Views &views, int64_t pair) {
    int view = 0;
    for (int v = 1; v < views.count; ++v) {
        view += pair >= views.offset[v];
    }
    return view;
}

// --------------------------------------------------------------------------------------------------------- projection

// A row in the image: Σ₂ = P·Pᵀ with P = J·W·R·S, of which `first` and `second` are the rows.
struct Projection {
    float3 position; // in camera axes
    float rz;        // 1/z
    float u, v;      // x/z and y/z, clamped to 15 % of the image size outside the image
    bool free_u, free_v;
    float4 unit;     // the quaternion, normalised
    float shortness; // 1 / its length
    float3 axis[3]; // R, column by column
    float scale[3];
    float3 depth; // z of the scaled axes in camera space
    float3 first, second;
    float sharp_xx, sharp_yy, xy, sharp_determinant;
    float xx, yy, determinant; // after the blur
    float a, b, c;             // of the inverse [[a, b], [b, c]]
    float x, y, radius;
    bool visible;

    __device__ Projection(
        const Camera &camera, const Settings &settings, const float *mean, const float *log_scales, const float *quat
    ) {
        position = camera.position_of(float3_at(mean));
        rz = 1.0f / position.z;
        const float slope_x = position.x * rz, slope_y = position.y * rz;
        u = clamped(slope_x, camera.fx, camera.cx, camera.width);
        v = clamped(slope_y, camera.fy, camera.cy, camera.height);
        free_u = u == slope_x;
        free_v = v == slope_y;

        const float w = quat[0], i = quat[1], j = quat[2], k = quat[3];
        shortness = 1.0f / sqrtf(fmaf(k, k, fmaf(j, j, fmaf(i, i, w * w))));
        unit = make_float4(w * shortness, i * shortness, j * shortness, k * shortness);
        turn(unit.x, unit.y, unit.z, unit.w);

        const float jx = camera.fx * rz, jy = camera.fy * rz;
        float flat[2][3], along[3];
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            scale[n] = expf(log_scales[n]);
            const float3 in_camera = camera.turned(scale[n] * axis[n]);
            flat[0][n] = jx * fmaf(-u, in_camera.z, in_camera.x);
            flat[1][n] = jy * fmaf(-v, in_camera.z, in_camera.y);
            along[n] = in_camera.z;
        }
        first = float3_at(flat[0]);
        second = float3_at(flat[1]);
        depth = float3_at(along);

        sharp_xx = dot(first, first);
        sharp_yy = dot(second, second);
        xy = dot(first, second);
        const float3 area = cross(first, second);
        sharp_determinant = dot(area, area); // Binet and Cauchy
        xx = sharp_xx + settings.eps2d;
        yy = sharp_yy + settings.eps2d;
        determinant = fmaf(settings.eps2d, sharp_xx + yy, sharp_determinant);
        const float inverse = 1.0f / determinant;
        a = yy * inverse;
        b = -xy * inverse;
        c = xx * inverse;

        const float half = 0.5f * (xx - yy);
        const float largest = 0.5f * (xx + yy) + sqrtf(fmaxf(0.1f, fmaf(half, half, xy * xy)));
        radius = ceilf(3.0f * sqrtf(largest));
        x = fmaf(camera.fx, slope_x, camera.cx);
        y = fmaf(camera.fy, slope_y, camera.cy);
        // Also false for what is not a number.
        visible = position.z >= settings.near && position.z <= settings.far && determinant > 0.0f &&
                  x + radius > 0.0f && x - radius < camera.width && y + radius > 0.0f && y - radius < camera.height;
    }

    // √(det Σ / det(Σ + ε·I)), squared.
    __device__ float ratio() const { return sharp_determinant / determinant; }

  private:
    __device__ static float clamped(float slope, float focal, float centre, float size) {
        const float pixel = 1.0f / focal, border = 0.15f * size * pixel;
        return fminf(fmaxf(slope, -fmaf(centre, pixel, border)), fmaf(size - centre, pixel, border));
    }

    __device__ void turn(float w, float x, float y, float z) {
        axis[0] = make_float3(
            fmaf(-2.0f, fmaf(y, y, z * z), 1.0f), 2.0f * fmaf(x, y, w * z), 2.0f * fmaf(x, z, -(w * y))
        );
        axis[1] = make_float3(
            2.0f * fmaf(x, y, -(w * z)), fmaf(-2.0f, fmaf(x, x, z * z), 1.0f), 2.0f * fmaf(y, z, w * x)
        );
        axis[2] = make_float3(
            2.0f * fmaf(x, z, w * y), 2.0f * fmaf(y, z, -(w * x)), fmaf(-2.0f, fmaf(x, x, y * y), 1.0f)
        );
    }
};

// ------------------------------------------------------------------------------------------------------------ shading

constexpr int kTerms = 16; // harmonics up to degree 3
constexpr float kY1 = 0.4886025119029199f;
constexpr float kY20 = 1.0925484305920792f, kY21 = 0.31539156525252005f, kY22 = 0.5462742152960396f;
constexpr float kY30 = 0.5900435899266435f, kY31 = 2.890611442640554f, kY32 = 0.4570457994644658f;
constexpr float kY33 = 0.3731763325901154f, kY34 = 1.4453057213202769f;

__device__ int terms_of(int64_t degree) { return degree < 0 ? 1 : static_cast<int>((degree + 1) * (degree + 1)); }

// The real harmonics in the direction of a unit vector.
struct Harmonics {
    float at[kTerms];

    __device__ explicit Harmonics(float3 d) {
        const float x = d.x, y = d.y, z = d.z, xx = x * x, yy = y * y, zz = z * z;
        at[0] = 0.28209479177387814f;
        at[1] = -kY1 * y;
        at[2] = kY1 * z;
        at[3] = -kY1 * x;
        at[4] = kY20 * x * y;
        at[5] = -kY20 * y * z;
        at[6] = kY21 * (3.0f * zz - 1.0f);
        at[7] = -kY20 * x * z;
        at[8] = kY22 * (xx - yy);
        at[9] = -kY30 * y * (3.0f * xx - yy);
        at[10] = kY31 * x * y * z;
        at[11] = -kY32 * y * (5.0f * zz - 1.0f);
        at[12] = kY33 * z * (5.0f * zz - 3.0f);
        at[13] = -kY32 * x * (5.0f * zz - 1.0f);
        at[14] = kY34 * z * (xx - yy);
        at[15] = -kY30 * x * (xx - 3.0f * yy);
    }

    // ½ + Σ_k Y_k·coefficient_k, before the clamp at 0.
    __device__ float3 color(const float *dc, const float *rest, int terms) const {
        float3 sum = make_float3(0.5f, 0.5f, 0.5f) + at[0] * float3_at(dc);
#pragma unroll
        for (int k = 1; k < kTerms; ++k) {
            if (k < terms) {
                sum = sum + at[k] * float3_at(rest + 3 * (k - 1));
            }
        }
        return sum;
    }
};

// Σ_k g_k·∂Y_k/∂d, with g_k = 0 above the degree.
__device__ float3 harmonics_backward(float3 d, const float *g) {
    const float x = d.x, y = d.y, z = d.z, xx = x * x, yy = y * y, zz = z * z;
    const float band = kY32 * (5.0f * zz - 1.0f);
    float3 slope = make_float3(-kY1 * g[3], -kY1 * g[1], kY1 * g[2]);
    slope.x += kY20 * (y * g[4] - z * g[7]) + 2.0f * kY22 * x * g[8];
    slope.y += kY20 * (x * g[4] - z * g[5]) - 2.0f * kY22 * y * g[8];
    slope.z += 6.0f * kY21 * z * g[6] - kY20 * (y * g[5] + x * g[7]);
    slope.x += kY31 * y * z * g[10] - band * g[13] + 2.0f * kY34 * x * z * g[14];
    slope.x -= kY30 * (6.0f * x * y * g[9] + 3.0f * (xx - yy) * g[15]);
    slope.y += kY31 * x * z * g[10] - band * g[11] - 2.0f * kY34 * y * z * g[14];
    slope.y -= kY30 * (3.0f * (xx - yy) * g[9] - 6.0f * x * y * g[15]);
    slope.z += kY31 * x * y * g[10] - 10.0f * kY32 * z * (y * g[11] + x * g[13]);
    slope.z += kY33 * (15.0f * zz - 3.0f) * g[12] + kY34 * (xx - yy) * g[14];
    return slope;
}

// ----------------------------------------------------------------------------------------------- rows and their copies

// Rows as the model stores them, (·, 3), (·, 3), (·, 4), (·, 3), (·, width), (·, 1); T is const where they are read.
template <typename T> struct Fields {
    T *means, *log_scales, *quats, *dc, *rest, *logits;
    int width;

    __device__ Fields from(int64_t row) const {
        return {means + 3 * row, log_scales + 3 * row, quats + 4 * row, dc + 3 * row, rest + width * row, logits + row,
                width};
    }
};

// Those of a block's pairs in shared memory; every field begins at a multiple of 16 bytes.
__device__ Fields<float> tile_in(float *memory, int width) {
    return {memory, memory + 3 * kPairs, memory + 6 * kPairs, memory + 10 * kPairs, memory + kNarrow * kPairs,
            memory + 13 * kPairs, width};
}

// Where a row begins: one instruction.
__device__ uint64_t begin_of(uint32_t row, uint32_t width) { return static_cast<uint64_t>(row) * width; }

// A narrow field of a block's pairs, spread over its threads: word i·kPairs + t of the field is word i of thread t.
template <int kWidth> struct Narrow {
    float at[kWidth];

    // Reads row[pair] for each pair.
    __device__ Narrow(const float *__restrict__ from, const uint32_t *row) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const uint32_t word = i * kPairs + threadIdx.x, source = row[word / kWidth];
            at[i] = source == kNone ? 0.0f : __ldg(from + begin_of(source, kWidth) + word % kWidth);
        }
    }

    __device__ void write(float *tile) const {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            tile[i * kPairs + threadIdx.x] = at[i];
        }
    }
};

// Fetches the first `columns` of row[pair] of `from` to `pair` of the tile; a warp has a row, and eight on their way.
__device__ void fetch_wide(float *tile, const float *__restrict__ from, const uint32_t *row, int width, int columns) {
    constexpr int kBatch = 8, kWarps = kPairs / kWarp;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int begin = 0; begin < columns; begin += 2 * kWarp) {
        const int column = begin + lane;
        const bool low = column < columns, high = column + kWarp < columns;
#pragma unroll 1
        for (int start = warp; start < kPairs; start += kBatch * kWarps) {
            float word[kBatch][2];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const uint32_t source = row[start + i * kWarps];
                const float *p = from + begin_of(source, width) + column;
                word[i][0] = low && source != kNone ? __ldg(p) : 0.0f;
                word[i][1] = high && source != kNone ? __ldg(p + kWarp) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float *p = tile + (start + i * kWarps) * width + column;
                if (low) {
                    p[0] = word[i][0];
                }
                if (high) {
                    p[kWarp] = word[i][1];
                }
            }
        }
    }
}

// Fetches row[pair] of `from` to `pair` of the tile, of `rest` as far as `columns`; zeros instead of kNone.
__device__ void fetch(const Fields<float> &tile, const Fields<const float> &from, const uint32_t *row, int columns) {
    const Narrow<3> means(from.means, row), log_scales(from.log_scales, row), dc(from.dc, row);
    const Narrow<4> quats(from.quats, row);
    const Narrow<1> logits(from.logits, row);
    fetch_wide(tile.rest, from.rest, row, from.width, columns);
    means.write(tile.means);
    log_scales.write(tile.log_scales);
    quats.write(tile.quats);
    dc.write(tile.dc);
    logits.write(tile.logits);
    __syncthreads();
}

// Copies `words` floats from shared memory; both sides begin at a multiple of 16 bytes.
__device__ void store(float *to, const float *from, int words) {
    const int quads = words / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < quads; i += kPairs) {
        reinterpret_cast<float4 *>(to)[i] = reinterpret_cast<const float4 *>(from)[i];
    }
    for (int i = 4 * quads + static_cast<int>(threadIdx.x); i < words; i += kPairs) {
        to[i] = from[i];
    }
}

__device__ void store(const Fields<float> &to, const Fields<float> &tile, int count) {
    store(to.means, tile.means, 3 * count);
    store(to.log_scales, tile.log_scales, 3 * count);
    store(to.quats, tile.quats, 4 * count);
    store(to.dc, tile.dc, 3 * count);
    store(to.logits, tile.logits, count);
    store(to.rest, tile.rest, tile.width * count);
}

__device__ void add(float *sum, float value) {
    if (value != 0.0f) {
        atomicAdd(sum, value);
    }
}

template <int kWidth> __device__ void add(float *to, const float *tile, const uint32_t *row) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        const uint32_t word = i * kPairs + threadIdx.x, target = row[word / kWidth];
        if (target != kNone) {
            add(to + begin_of(target, kWidth) + word % kWidth, tile[word]);
        }
    }
}

// Adds `pair` of the tile to row[pair] of `to`, of `rest` as far as `columns`.
__device__ void add(const Fields<float> &to, const Fields<float> &tile, const uint32_t *row, int columns) {
    add<3>(to.means, tile.means, row);
    add<3>(to.log_scales, tile.log_scales, row);
    add<4>(to.quats, tile.quats, row);
    add<3>(to.dc, tile.dc, row);
    add<1>(to.logits, tile.logits, row);
    for (int pair = threadIdx.x / kWarp; pair < kPairs; pair += kPairs / kWarp) {
        const uint32_t target = row[pair];
        if (target != kNone) {
            float *sums = to.rest + begin_of(target, to.width);
            for (int column = threadIdx.x % kWarp; column < columns; column += kWarp) {
                add(sums + column, tile.rest[pair * to.width + column]);
            }
        }
    }
}

extern __shared__ float4 shared_memory[];

// ------------------------------------------------------------------------------------------------------------- forward

__global__ void __launch_bounds__(kPairs) project_kernel(
    const int64_t n, const int64_t *__restrict__ rows, const Views views, const float *__restrict__ table,
    const Settings settings, const int64_t *__restrict__ ids, const Fields<const float> params,
    int64_t *__restrict__ copied_ids, const Fields<float> copies, float *__restrict__ block
) {
    __shared__ uint32_t row[kPairs];
    float *memory = reinterpret_cast<float *>(shared_memory);
    const Fields<float> tile = tile_in(memory, params.width);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPairs;
    const int count = static_cast<int>(n - first < kPairs ? n - first : kPairs);
    const int t = threadIdx.x;
    const bool mine = t < count;
    row[t] = mine ? static_cast<uint32_t>(rows[first + t]) : kNone;
    const int64_t id = mine ? ids[row[t]] : 0;
    __syncthreads();
    fetch(tile, params, row, params.width);
    if (mine) {
        copied_ids[first + t] = id;
    }
    store(copies.from(first), tile, count);

    float splat[kSplat] = {};
    if (mine) {
        splat[0] = __int_as_float(static_cast<int>(id));
        splat[1] = __int_as_float(static_cast<int>(id >> 32));
        const Camera camera(table + kCamera * view_of(views, first + t));
        const Fields<float> of = tile.from(t);
        const Projection seen(camera, settings, of.means, of.log_scales, of.quats);
        if (seen.visible) {
            splat[2] = seen.x;
            splat[3] = seen.y;
            splat[4] = seen.position.z;
            put(splat + 5, make_float3(seen.a, seen.b, seen.c));
            splat[8] = sigmoid(of.logits[0]) * (settings.antialiased ? sqrtf(seen.ratio()) : 1.0f);
            if (settings.degree < 0) {
                put(splat + 9, make_float3(sigmoid(of.dc[0]), sigmoid(of.dc[1]), sigmoid(of.dc[2])));
            } else {
                const float3 to = float3_at(of.means) - camera.centre();
                const Harmonics harmonics((1.0f / sqrtf(dot(to, to))) * to);
                const float3 color = harmonics.color(of.dc, of.rest, terms_of(settings.degree));
                put(splat + 9, make_float3(fmaxf(color.x, 0.0f), fmaxf(color.y, 0.0f), fmaxf(color.z, 0.0f)));
            }
            splat[12] = __int_as_float(__float2int_rz(seen.radius)); // saturates
        }
    }
    __syncthreads(); // the rows are no longer needed: splats take their place
    if (mine) {
#pragma unroll
        for (int c = 0; c < kSplat; ++c) {
            memory[kSplat * t + c] = splat[c];
        }
    }
    __syncthreads();
    store(block + kSplat * first, memory, kSplat * count);
}

// ------------------------------------------------------------------------------------------------------------ backward

// Gradient of a splat, column by column as it travels.
struct SplatGrad {
    float at[kGrad];

    __device__ bool any() const {
        bool found = false;
#pragma unroll
        for (int c = 0; c < kGrad; ++c) {
            found = found || at[c] != 0.0f; // also what is not a number
        }
        return found;
    }
};

// Replaces dc and rest of a row by their gradients; returns what the colour adds to the gradient of the mean.
__device__ float3 shade_backward(const Fields<float> &of, const Camera &camera, int64_t degree, float3 g) {
    for (int c = 3 * (terms_of(degree) - 1); c < of.width; ++c) {
        of.rest[c] = 0.0f;
    }
    if (degree < 0) {
        const float r = sigmoid(of.dc[0]), green = sigmoid(of.dc[1]), b = sigmoid(of.dc[2]);
        put(of.dc, make_float3(g.x * r * (1.0f - r), g.y * green * (1.0f - green), g.z * b * (1.0f - b)));
        return make_float3(0.0f, 0.0f, 0.0f);
    }
    const int terms = terms_of(degree);
    const float3 to = float3_at(of.means) - camera.centre();
    const float nearness = 1.0f / sqrtf(dot(to, to));
    const float3 direction = nearness * to;
    const Harmonics harmonics(direction);
    const float3 color = harmonics.color(of.dc, of.rest, terms);
    g = make_float3(color.x < 0.0f ? 0.0f : g.x, color.y < 0.0f ? 0.0f : g.y, color.z < 0.0f ? 0.0f : g.z);
    put(of.dc, harmonics.at[0] * g);
    float g_harmonics[kTerms] = {};
#pragma unroll
    for (int k = 1; k < kTerms; ++k) {
        if (k < terms) {
            float *coefficient = of.rest + 3 * (k - 1);
            g_harmonics[k] = dot(g, float3_at(coefficient));
            put(coefficient, harmonics.at[k] * g);
        }
    }
    const float3 slope = harmonics_backward(direction, g_harmonics);
    return nearness * (slope - dot(slope, direction) * direction); // only what is across the direction counts
}

// Replaces a row in shared memory by its gradient.
__device__ void row_backward(
    const Fields<float> &of, const Camera &camera, const Settings &settings, const Projection &seen,
    const SplatGrad &grad
) {
    const float *g = grad.at;
    const float3 g_mean = shade_backward(of, camera, settings.degree, float3_at(g + 7));

    // Inverse of the covariance: dQ = −Q·dΣ·Q; gxy is of one of two equal entries.
    const float a = seen.a, b = seen.b, c = seen.c;
    const float ga = g[3], gb = 0.5f * g[4], gc = g[5];
    float gxx = -(a * a * ga + 2.0f * a * b * gb + b * b * gc);
    float gxy = -(a * b * ga + (a * c + b * b) * gb + b * c * gc);
    float gyy = -(b * b * ga + 2.0f * b * c * gb + c * c * gc);

    // Opacity, and its compensation √(det Σ / det(Σ + ε·I)).
    const float opacity = sigmoid(of.logits[0]);
    float g_opacity = g[6];
    if (settings.antialiased) {
        const float compensation = sqrtf(seen.ratio());
        // A compensation of 0 has an infinite slope; gsplat adds this to the denominator.
        const float g_ratio = 0.5f * g_opacity * opacity / (compensation + 1e-6f);
        // ∂ratio/∂Σ, written so that nothing cancels where the ratio is near 1.
        const float slope = settings.eps2d / seen.determinant / seen.determinant * g_ratio;
        const float xy2 = seen.xy * seen.xy;
        gxx += slope * (seen.sharp_yy * seen.yy + xy2);
        gxy -= slope * (seen.sharp_xx + seen.yy) * seen.xy;
        gyy += slope * (seen.sharp_xx * seen.xx + xy2);
        g_opacity *= compensation;
    }
    of.logits[0] = g_opacity * opacity * (1.0f - opacity);

    // Σ₂ = P·Pᵀ, then P = J·A and the projected centre.
    const float3 g_first = 2.0f * (gxx * seen.first + gxy * seen.second);
    const float3 g_second = 2.0f * (gxy * seen.first + gyy * seen.second);
    const float rz = seen.rz, jx = camera.fx * rz, jy = camera.fy * rz;
    const float g_u = camera.fx * g[0] - (seen.free_u ? jx * dot(g_first, seen.depth) : 0.0f);
    const float g_v = camera.fy * g[1] - (seen.free_v ? jy * dot(g_second, seen.depth) : 0.0f);
    const float3 g_position = make_float3(
        g_u * rz, g_v * rz,
        g[2] - (g_u * seen.position.x + g_v * seen.position.y) * rz * rz -
            (dot(g_first, seen.first) + dot(g_second, seen.second)) * rz
    );
    put(of.means, g_mean + camera.turned_back(g_position));

    // Principal axes: A = W·R·S.
    const float along_x[3] = {jx * g_first.x, jx * g_first.y, jx * g_first.z};
    const float along_y[3] = {jy * g_second.x, jy * g_second.y, jy * g_second.z};
    float3 g_turn[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const float along_z = -(seen.u * along_x[i] + seen.v * along_y[i]);
        const float3 g_axis = seen.scale[i] * camera.turned_back(make_float3(along_x[i], along_y[i], along_z));
        of.log_scales[i] = dot(g_axis, seen.axis[i]);
        g_turn[i] = g_axis;
    }

    // Rotation matrix of a unit quaternion, which was normalised.
    const float w = seen.unit.x, x = seen.unit.y, y = seen.unit.z, z = seen.unit.w;
    const float3 p = g_turn[0], q = g_turn[1], r = g_turn[2];
    const float gw = 2.0f * (x * (q.z - r.y) + y * (r.x - p.z) + z * (p.y - q.x));
    const float gx = 2.0f * (w * (q.z - r.y) + y * (q.x + p.y) + z * (r.x + p.z) - 2.0f * x * (q.y + r.z));
    const float gy = 2.0f * (w * (r.x - p.z) + x * (q.x + p.y) + z * (r.y + q.z) - 2.0f * y * (p.x + r.z));
    const float gz = 2.0f * (w * (p.y - q.x) + x * (r.x + p.z) + y * (r.y + q.z) - 2.0f * z * (p.x + q.y));
    const float radial = gw * w + gx * x + gy * y + gz * z;
    of.quats[0] = seen.shortness * (gw - radial * w);
    of.quats[1] = seen.shortness * (gx - radial * x);
    of.quats[2] = seen.shortness * (gy - radial * y);
    of.quats[3] = seen.shortness * (gz - radial * z);
}

__device__ void clear_row(const Fields<float> &of) {
    put(of.means, make_float3(0.0f, 0.0f, 0.0f));
    put(of.log_scales, make_float3(0.0f, 0.0f, 0.0f));
    put(of.quats, make_float3(0.0f, 0.0f, 0.0f));
    of.quats[3] = 0.0f;
    put(of.dc, make_float3(0.0f, 0.0f, 0.0f));
    of.logits[0] = 0.0f;
    for (int c = 0; c < of.width; ++c) {
        of.rest[c] = 0.0f;
    }
}

// Where the gradients of rows are added up: in the places that the rows have in the list of a set's rows.
struct Sums {
    const int64_t *rows;   // of the pairs; null where gradients are written, not added
    const uint64_t *words; // the set: 64 rows a word
    const int *prefix;     // rows below each word
    bool *active;          // by place: set for a pair whose splat has a gradient

    __device__ uint32_t place(int64_t pair) const {
        const int64_t row = rows[pair], word = row / 64;
        return prefix[word] + __popcll(words[word] & ((uint64_t{1} << row % 64) - 1));
    }
};

// chosen: null for all pairs in order.
__global__ void __launch_bounds__(kPairs) pull_back_kernel(
    const int64_t n, const int64_t *__restrict__ chosen, const Views views, const float *__restrict__ table,
    const Settings settings, const float *__restrict__ grads, const int grad_width, const Fields<const float> values,
    const Sums sums, const Fields<float> out
) {
    __shared__ uint32_t row[kPairs];
    float *memory = reinterpret_cast<float *>(shared_memory);
    const Fields<float> tile = tile_in(memory, values.width);
    float *tile_grads = memory + (kNarrow + values.width) * kPairs;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPairs;
    const int count = static_cast<int>(n - first < kPairs ? n - first : kPairs);
    const int t = threadIdx.x;
    const bool mine = t < count;

    float words[kMaxGrad];
#pragma unroll
    for (int i = 0; i < kMaxGrad; ++i) {
        const int word = i * kPairs + t;
        words[i] = word < grad_width * count ? grads[grad_width * first + word] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kMaxGrad; ++i) {
        tile_grads[i * kPairs + t] = words[i];
    }
    const int64_t pair = mine && chosen ? chosen[first + t] : first + t;
    __syncthreads();
    SplatGrad grad;
#pragma unroll
    for (int c = 0; c < kGrad; ++c) {
        grad.at[c] = tile_grads[grad_width * t + c]; // zeros beyond the last pair
    }
    const bool wanted = grad.any();
    row[t] = wanted ? static_cast<uint32_t>(pair) : kNone; // most splats that travelled are hidden by others
    __syncthreads();
    const int columns = 3 * (terms_of(settings.degree) - 1);
    fetch(tile, values, row, columns);

    bool written = false;
    const Fields<float> of = tile.from(t);
    if (wanted) {
        const Camera camera(table + kCamera * view_of(views, pair));
        const Projection seen(camera, settings, of.means, of.log_scales, of.quats);
        if (seen.visible) {
            row_backward(of, camera, settings, seen, grad);
            written = true;
        }
    }
    if (sums.rows) {
        const uint32_t place = wanted ? sums.place(pair) : kNone;
        if (wanted) {
            sums.active[place] = true; // also where the view does not see the row
        }
        row[t] = written ? place : kNone;
    } else if (!written) {
        clear_row(of);
    }
    __syncthreads();
    if (sums.rows) {
        add(out, tile, row, columns);
    } else {
        store(out.from(first), tile, count);
    }
}

// Launches a kernel with a tile of rows of `width` and `more` floats for each pair; returns a cudaError_t.
template <typename... Parameters, typename... Arguments>
int launch(
    int device, cudaStream_t stream, int64_t n, int64_t width, int more, void (*kernel)(Parameters...),
    Arguments... arguments
) {
    const auto bytes = static_cast<int>((kNarrow + width + more) * kPairs * sizeof(float));
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess && bytes > kDefaultSharedBytes) { // more than a kernel may have unasked
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    if (error != cudaSuccess) {
        return error;
    }
    kernel<<<static_cast<unsigned>((n + kPairs - 1) / kPairs), kPairs, bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

} // namespace

// All pointers but `views` and `settings` (host memory) are device memory; arrays are contiguous, and those that are
// written begin at a multiple of 16 bytes; n > 0. `width` is that of `rest`: 3·(K − 1), at least what the degree needs.
// They leave `device` as the current one and return a cudaError_t.
extern "C" {

// rows (n,) of the params (·, …) → their copies (n, …) and the block (n, 13), written.
int splat_rows_project(
    int device, cudaStream_t stream, int64_t n, int64_t width, const Views *views, const Settings *settings,
    const int64_t *rows, const float *table, const int64_t *ids, const float *means, const float *log_scales,
    const float *quats, const float *dc, const float *rest, const float *logits, int64_t *copied_ids,
    float *copied_means, float *copied_log_scales, float *copied_quats, float *copied_dc, float *copied_rest,
    float *copied_logits, float *block
) {
    const auto w = static_cast<int>(width);
    const Fields<const float> params{means, log_scales, quats, dc, rest, logits, w};
    const Fields<float> copies{
        copied_means, copied_log_scales, copied_quats, copied_dc, copied_rest, copied_logits, w
    };
    return launch(
        device, stream, n, width, 0, project_kernel, n, rows, *views, table, *settings, ids, params, copied_ids, copies,
        block
    );
}

// grads (n, grad_width) of the pairs chosen (n,), whose rows are `values` (·, …) → out (n, …), written. With rows (·,) of
// all pairs it is added to, at the places that they have in the set of words (w,) with its prefix (w,); and active (·,)
// becomes true at those of gradients that are not zero. chosen may be null, and so may rows to active, all of them.
int splat_rows_pull_back(
    int device, cudaStream_t stream, int64_t n, int64_t width, int64_t grad_width, const Views *views,
    const Settings *settings, const int64_t *chosen, const float *table, const float *grads, const int64_t *rows,
    const uint64_t *words, const int *prefix, bool *active, const float *means, const float *log_scales,
    const float *quats, const float *dc, const float *rest, const float *logits, float *out_means,
    float *out_log_scales, float *out_quats, float *out_dc, float *out_rest, float *out_logits
) {
    if (grad_width < kGrad || grad_width > kMaxGrad) {
        return cudaErrorInvalidValue;
    }
    const auto w = static_cast<int>(width);
    const Fields<const float> values{means, log_scales, quats, dc, rest, logits, w};
    const Fields<float> out{out_means, out_log_scales, out_quats, out_dc, out_rest, out_logits, w};
    return launch(
        device, stream, n, width, kMaxGrad, pull_back_kernel, n, chosen, *views, table, *settings, grads,
        static_cast<int>(grad_width), values, Sums{rows, words, prefix, active}, out
    );
}
}
