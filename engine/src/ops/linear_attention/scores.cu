// Gradients of the scores, one sequence per block, head by head: dr, the gradient with respect to the norm's input; both = dr v^T + v dr^T, which is
// symmetric; and dv = sum over heads of s dr. TILES warps compute `both`, a row of tiles each, and 3 TILES warps dv, in registers.
// `both` is [batch, HEADS, TILES, TILES, 32]: 16 x 16 tiles as the threads of a warp hold them, as operand a of an mma.
#define PAIRED (TILES / 2 + 1)              // tiles of a row, from the diagonal on and around: the others are mirror images
#define PER ((D_TILES + 2) / 3)             // tiles of columns of dv for each warp
#define EIGHTS ((D / 8 + 7) / 8)            // groups of 8 elements of a row for each of its 8 threads
#define STAGE (TIME * (2 * D_ROW + PITCH))  // elements: y, dy and s of a head

__device__ __forceinline__ void fetch(T *stage, const T *y, const T *dy, const T *s, u64 b, u64 head) {
    int row = threadIdx.x / 8;
    const u64 line = ((head * BATCH + b) * TIME + row) * D;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        int eight = threadIdx.x % 8 + 8 * i;
        if (row >= TIME || eight >= D / 8) continue;
        if (NORM) copy16(stage + place(row, eight, D_ROW), y + line + eight * 8, true);
        copy16(stage + TIME * D_ROW + place(row, eight, D_ROW), dy + line + eight * 8, true);
    }
    s += (b * HEADS + head) * (TIME * SQUARE);
    for (int i = threadIdx.x; i < TIME * (SQUARE / 8); i += THREADS)
        copy16(stage + 2 * TIME * D_ROW + i / (SQUARE / 8) * PITCH + i % (SQUARE / 8) * 8, s + i * 8, true);
    copies_commit();
}

// dy becomes dr = rstd (dy - mean(dy) - y mean(dy y)); 8 threads a row, and each what it copied.
__device__ __forceinline__ void behind_norm(T *stage, float rstd) {
    int row = threadIdx.x / 8;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        int eight = threadIdx.x % 8 + 8 * i;
        if (row >= TIME || eight >= D / 8) continue;
        Eight out = *(const Eight *)(stage + place(row, eight, D_ROW)), g = *(const Eight *)(stage + TIME * D_ROW + place(row, eight, D_ROW));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float x, z, gx, gz;
            halves(out.of[j], x, z), halves(g.of[j], gx, gz);
            sum += gx + gz, dot += gx * x + gz * z;
        }
    }
#pragma unroll
    for (int i = 1; i < 8; i *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i), dot += __shfl_xor_sync(0xffffffffu, dot, i);
    float mean = sum * (1.0f / D), along = dot * (1.0f / D);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        int eight = threadIdx.x % 8 + 8 * i;
        if (row >= TIME || eight >= D / 8) continue;
        Eight out = *(const Eight *)(stage + place(row, eight, D_ROW)), *g = (Eight *)(stage + TIME * D_ROW + place(row, eight, D_ROW));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float x, z, gx, gz;
            halves(out.of[j], x, z), halves(g->of[j], gx, gz);
            g->of[j] = pack<T>((gx - mean - x * along) * rstd, (gz - mean - z * along) * rstd);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
linear_attention_scores(const T *v, const T *y, const float *rstd, const T *s, const T *dy, Eight *both, T *dv) {
    extern __shared__ __align__(16) float shared[];
    T *values = (T *)shared, *stages = values + TIME * D_ROW;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % TILES, part = warp / TILES - 1;
    u64 b = blockIdx.x;

    for (int i = threadIdx.x; i < TIME * (D / 8); i += THREADS)
        copy16(values + place(i / (D / 8), i % (D / 8), D_ROW), v + b * (TIME * D) + i * 8, true);
    // Columns of s that only tiles have.
    for (int i = threadIdx.x; i < STAGES * TIME; i += THREADS)
        for (int j = SQUARE; j < 16 * TILES; j += 8)
            *(Eight *)(stages + i / TIME * STAGE + 2 * TIME * D_ROW + i % TIME * PITCH + j) = Eight{};
    fetch(stages, y, dy, s, b, 0);
    float sum[PER][2][4] = {};
#pragma unroll 1
    for (int head = 0; head < HEADS; head++) {
        T *stage = stages + head % STAGES * STAGE, *dr = stage + TIME * D_ROW, *scores = dr + TIME * D_ROW;
        if (STAGES > 1 && head + 1 < HEADS) fetch(stages + (head + 1) % STAGES * STAGE, y, dy, s, b, head + 1);
        else copies_commit();
        float scale = NORM && threadIdx.x / 8 < TIME ? rstd[(head * (u64)BATCH + b) * TIME + threadIdx.x / 8] : 0.0f;
        copies_wait<1>();
        if (NORM) behind_norm(stage, scale);
        __syncthreads();
        if (part < 0) {
            float square[PAIRED][2][4] = {};
#pragma unroll 2
            for (int k = 0; k < D_TILES; k++) {
                u32 a[PAIRED][4], w[PAIRED][4];
#pragma unroll
                for (int j = 0; j < PAIRED; j++) {
                    int at = place(row_of((tile + j) % TILES, lane), 2 * k + lane / 16, D_ROW);
                    matrices(a[j], dr + at), matrices(w[j], values + at);
                }
                // Rows as a are also, two and two, columns of b.
#pragma unroll
                for (int j = 0; j < PAIRED; j++) {
                    mma<T>(square[j][0], a[0], w[j][0], w[j][2]), mma<T>(square[j][1], a[0], w[j][1], w[j][3]);
                    mma<T>(square[j][0], w[0], a[j][0], a[j][2]), mma<T>(square[j][1], w[0], a[j][1], a[j][3]);
                }
            }
            Eight *to = both + (b * HEADS + head) * (TILES * TILES * 32) + lane;
#pragma unroll
            for (int j = 0; j < PAIRED; j++) {
                int other = (tile + j) % TILES;
                Eight a, m;
                rounded(a.of, square[j], tile, other, lane);
                mirrored(m.of, a.of);
                to[(tile * TILES + other) * 32] = a;
                if (j > 0 && 2 * j != TILES) to[(other * TILES + tile) * 32] = m; // half way around, the other row computes it too
            }
        } else {
#pragma unroll 1
            for (int k = 0; k < TILES; k++) {
                u32 left[4];
                matrices(left, scores + row_of(tile, lane) * PITCH + 16 * k + lane / 16 * 8);
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    if (D_TILES % 3 != 0 && part * PER + i >= D_TILES) continue;
                    u32 right[4];
                    matrices_t(right, dr + place(row_of(k, lane), 2 * (part * PER + i) + lane / 16, D_ROW));
                    mma<T>(sum[i][0], left, right[0], right[1]), mma<T>(sum[i][1], left, right[2], right[3]);
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && head + 1 < HEADS) fetch(stages, y, dy, s, b, head + 1);
    }
    if (part < 0) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = 16 * tile + 8 * half + lane / 4;
        if (row >= TIME) continue;
#pragma unroll
        for (int i = 0; i < PER; i++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                T *to = dv + (b * TIME + row) * D + 16 * (part * PER + i) + 8 * n + lane % 4 * 2;
                if (D_TILES % 3 == 0 || part * PER + i < D_TILES) *(u32 *)to = pack<T>(sum[i][n][2 * half], sum[i][n][2 * half + 1]);
            }
    }
}
