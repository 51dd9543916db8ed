// y [rows, OUT] = x times the matrix of each row's expert: w [EXPERTS, OUT, K] where it is TRANSPOSED, else [EXPERTS, K, OUT].
// Rows of x are sorted by expert, or, with GATHER, x[order[row] / TOP]. With SWIGLU, w has OUT rows for gate and then as many for up:
// y = weight * silu(gate) * up, and with KEPT, h [rows, 2 OUT] gets gate and up.
// Blocks are persistent and take one tile after another; the next one's first steps are loaded during the last ones of this.
#define WIDTH (SWIGLU ? TN / 2 : TN) // columns of y in a tile
#define TILES_ACROSS ((OUT + WIDTH - 1) / WIDTH)
#define STEPS ((K + STEP - 1) / STEP)

struct Tile {
    u32 expert, first, end, column; // rows first.. of those before `end`
};
__device__ __forceinline__ bool find_tile(const int *offsets, u32 number, Tile &t) {
    Found f;
    if (!find(offsets, number / TILES_ACROSS, [](u32 rows) { return (rows + TM - 1) / TM; }, f)) return false;
    t = {f.expert, f.first + f.number * TM, f.end, number % TILES_ACROSS * WIDTH};
    return true;
}

struct Source {
    const T *x, *w;
    const int *offsets, *order;
    // The tile that is being loaded, step by step: this thread's rows of x (and which of them exist), and its address in w.
    const T *a[TM / PASS], *b;
    u32 live, column, k;
    // The tile after it, whose row indices are read early.
    Tile next;
    u32 number;
    bool more;
    int slots[TM / PASS];

    __device__ __forceinline__ void start(const T *of_x, const T *of_w, const int *of_offsets, const int *of_order) {
        x = of_x, w = of_w, offsets = of_offsets, order = of_order, k = K, number = blockIdx.x;
        look_ahead();
    }
    __device__ __forceinline__ void look_ahead() {
        more = find_tile(offsets, number, next);
        number += gridDim.x;
        if (GATHER && more)
#pragma unroll
            for (int i = 0; i < TM / PASS; i++) slots[i] = next.first + own_row(i) < next.end ? order[next.first + own_row(i)] : 0;
    }
    __device__ __forceinline__ void begin() {
        live = 0;
#pragma unroll
        for (int i = 0; i < TM / PASS; i++) {
            u32 row = next.first + own_row(i);
            bool in = row < next.end;
            a[i] = x + (u64)(in ? GATHER ? slots[i] / TOP : row : 0) * K + own_piece();
            live |= (u32)in << i;
        }
        // With SwiGLU, groups of eight gate rows and eight up rows alternate, so that a thread has accumulators of both.
        u32 r = own_row(0), up = SWIGLU ? r / 8 % 2 : 0;
        column = next.column + (TRANSPOSED ? SWIGLU ? r / 16 * 8 + r % 8 : r : own_piece());
        b = w + (u64)next.expert * K * (SWIGLU ? 2 * OUT : OUT);
        b += TRANSPOSED ? (u64)(column + up * OUT) * K + own_piece() : (u64)r * OUT + column;
        k = 0;
        look_ahead();
    }
    __device__ __forceinline__ bool copy(char *stage) {
        if (k >= K) {
            if (!more) return false;
            begin();
        }
        bool inside = K % STEP == 0 || k + own_piece() < K;
#pragma unroll
        for (int i = 0; i < TM / PASS; i++) copy16(own_place(stage, i), a[i] + k, inside && live >> i & 1);
#pragma unroll
        for (int i = 0; i < TN / PASS; i++) {
            if (TRANSPOSED) {
                u32 n = i * (SWIGLU ? PASS / 2 : PASS);
                copy16(own_place(stage + A_BYTES, i), b + (u64)n * K + k, inside && (OUT % WIDTH == 0 || column + n < OUT));
            } else {
                u32 r = i % (64 / PASS) * PASS, n = i / (64 / PASS) * 64;
                bool in = (K % STEP == 0 || k + own_row(0) + r < K) && (OUT % WIDTH == 0 || column + n < OUT);
                copy16(own_place(stage + A_BYTES, i), b + (u64)(k + r) * OUT + n, in);
            }
        }
        k += STEP;
        return true;
    }
};

// 32 columns of a row, of which a lane has f[0..8].
__device__ __forceinline__ void store(T *to, bool live, const float (&f)[8]) {
    u32 p[4] = {pack<T>(f[0], f[1]), pack<T>(f[2], f[3]), pack<T>(f[4], f[5]), pack<T>(f[6], f[7])};
    transpose(p);
    if (live) *(uint4 *)to = make_uint4(p[0], p[1], p[2], p[3]);
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(BLOCK, 1) grouped_product(const T *x, const T *w, const int *offsets, const int *order,
#if SWIGLU
                                                                         const float *weights,
#endif
                                                                         T *y
#if KEPT
                                                                         , T *h
#endif
) {
    Source source;
    Ring<Source> ring(source);
    if (ring.copying()) source.start(x, w, offsets, order);
    if (ring.copied()) return;
    Tile t;
    for (u32 number = blockIdx.x; find_tile(offsets, number, t); number += gridDim.x) {
        // Of a warp's rows a lane has every eighth.
        const auto row_of = [&](int i) { return t.first + warp_row() + 8 * i + threadIdx.x % 32 / 4; };
        Sums c = {};
#if SWIGLU
        int slot[2 * DOWN];
        float weight[2 * DOWN];
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) slot[i] = row_of(i) < t.end ? order[row_of(i)] : 0;
        ring.add(c, 1);
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) weight[i] = weights[slot[i]];
        ring.add(c, STEPS - 1);
#else
        ring.add(c, STEPS);
#endif
        ring.finish(c);
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) {
            u32 row = row_of(i);
            bool in = row < t.end;
#pragma unroll
            for (int j = 0; j < ACROSS / (SWIGLU ? 8 : 4); j++) {
                u32 column = t.column + warp_column() / (SWIGLU ? 2 : 1) + j * 32 + threadIdx.x % 4 * 8;
                bool live = in && column < OUT;
                float f[8];
#if SWIGLU
                float gate[8], up[8];
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    gate[e] = c[i / 2][8 * j + e / 2 * 2][i % 2 * 2 + e % 2];
                    up[e] = c[i / 2][8 * j + e / 2 * 2 + 1][i % 2 * 2 + e % 2];
                    f[e] = weight[i] * (silu(gate[e]) * up[e]);
                }
#if KEPT
                store(h + (u64)row * (2 * OUT) + column, live, gate);
                store(h + (u64)row * (2 * OUT) + OUT + column, live, up);
#endif
#else
#pragma unroll
                for (int e = 0; e < 8; e++) f[e] = c[i / 2][4 * j + e / 2][i % 2 * 2 + e % 2];
#endif
                store(y + (u64)row * OUT + column, live, f);
            }
        }
    }
}
