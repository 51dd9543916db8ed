// The gradient for small heads in one pass over the scores: each score is computed once, and its exponential with it.
// p = exp(SCALE q k^T - lse); dv = p^T dy; ds = p (dy v^T - along); dq = SCALE ds k; dk = SCALE ds^T q; along = row sum of dy y.
// SCALE_2 = SCALE log2(e).
//
// A block owns every SPLIT-th tile of 16 queries of one (batch, query head): their q, dy and sums of dq lie in shared memory. A warp
// owns a tile of 16 M_K keys, accumulates their dk and dv in registers, and walks over the queries. Warps add to a tile's dq in a fixed order,
// each waiting for its turn, so that results are deterministic; a warp waits at most for its neighbour's last tile.
#define QUERY_TILES (((TIME + 15) / 16 + SPLIT - 1) / SPLIT) // of a block
#define PARTS (GROUP * SPLIT)                                // of dk and dv
#define WARP_KEYS (16 * M_K)
#define KEY_TILES ((KEYS + WARP_KEYS - 1) / WARP_KEYS)

struct __align__(8) Two { float of[2]; };
struct __align__(16) Four { float of[4]; };
struct __align__(16) Eight { T of[8]; };

// 16 queries.
struct __align__(16) Tile {
    Four dq[D / 8][32]; // the sums, as the threads of a warp hold them
    T q[16 * D], dy[16 * D];
    Four along[8]; // -along of two queries, twice: the initial accumulators of dy v^T
    Two lse[8];    // of two queries, times log2(e)
    int turn;      // how many warps have added to dq
};

// 16 M_K rows of sums, from row `first` on, to [KEYS, D].
__device__ __forceinline__ void store_part(float *to, int first, float sum[M_K][D / 8][4], float factor, int lane) {
#pragma unroll
    for (int m = 0; m < M_K; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first + 16 * m + 8 * half + lane / 4;
            if (row < KEYS)
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    *(Two *)(to + row * D + 8 * n + lane % 4 * 2) = Two{{factor * sum[m][n][2 * half], factor * sum[m][n][2 * half + 1]}};
        }
}

// dk and dv are [batch, kv, PARTS, keys, D] in f32 where there is more than one part.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_backward(const T *q, const T *k, const T *v, const T *y, const float *lse, const T *dy, T *dq, void *dk, void *dv) {
    extern __shared__ __align__(16) float shared[];
    Tile *tiles = (Tile *)shared;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.x % SPLIT;
    u64 bh = blockIdx.x / SPLIT, b = bh / HEADS, h = bh % HEADS;
    u64 q_at = b * TIME * Q_ROW + h * D, k_at = b * KEYS * K_ROW + h / GROUP * D, v_at = b * KEYS * V_ROW + h / GROUP * D;
    u64 y_at = (b * TIME * HEADS + h) * D;

    // y is staged in the memory of the accumulators, which the same thread clears afterwards.
    const int chunks = 2 * QUERY_TILES * D;
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks; i += 32 * WARPS) {
        int chunk = i % (D / 8), r = i / (D / 8) % 16, t = (i / (2 * D) * SPLIT + part) * 16 + r;
        bool live = t < TIME;
        u64 row = live ? t : 0, at = y_at + row * HEADS * D + chunk * 8;
        Tile &tile = tiles[i / (2 * D)];
        copy16(tile.q + place(r, chunk), q + q_at + row * Q_ROW + chunk * 8, live);
        copy16(tile.dy + place(r, chunk), dy + at, live);
        copy16(&tile.dq[chunk][r], y + at, live);
        if (chunk == 0) copy4(&tile.lse[r / 2].of[r % 2], lse + bh * TIME + row, live);
    }
    copies_commit();
    copies_wait<0>();
    for (int i = threadIdx.x; i < chunks; i += 32 * WARPS) { // whole warps
        int chunk = i % (D / 8), r = i / (D / 8) % 16;
        Tile &tile = tiles[i / (2 * D)];
        Eight out = *(const Eight *)&tile.dq[chunk][r], g = *(const Eight *)(tile.dy + place(r, chunk));
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) along -= to_float(out.of[j]) * to_float(g.of[j]);
        for (int j = D / 16; j > 0; j >>= 1) along += __shfl_xor_sync(0xffffffffu, along, j);
        tile.dq[chunk][r] = tile.dq[chunk][r + 16] = Four{};
        if (chunk == 0) {
            const float log2_e = 1.44269504f;
            tile.along[r / 2].of[r % 2] = tile.along[r / 2].of[r % 2 + 2] = along;
            tile.lse[r / 2].of[r % 2] *= log2_e;
            if (r == 0) tile.turn = 0;
        }
    }
    __syncthreads();

    // Queries are rows of operand b in the scores, and columns of b in dk and dv.
    int by_row[STEPS], by_column[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        by_row[i] = place(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2);
        by_column[i] = place(lane % 16, 2 * i + lane / 16);
        kept(by_row[i]), kept(by_column[i]);
    }
    kept(lane);
    // Causal: the first keys are seen by the most queries, so a warp with much work in one round gets little in the next.
    for (int round = 0; round * WARPS < KEY_TILES; round++) {
        int mine = round * WARPS + (round % 2 ? WARPS - 1 - warp : warp), k0 = mine * WARP_KEYS;
        if (k0 >= KEYS) continue;
        u32 ka[M_K][STEPS][4], kb[M_K][STEPS][4], va[M_K][STEPS][4];
#pragma unroll
        for (int m = 0; m < M_K; m++)
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                fetch_a(ka[m][i], k + k_at, K_ROW, k0 + 16 * m, KEYS, i, lane);
                fetch_a(va[m][i], v + v_at, V_ROW, k0 + 16 * m, KEYS, i, lane);
#pragma unroll
                for (int j = 0; j < 4; j++) kb[m][i][j] = transposed(ka[m][i][j]);
            }
        float sum_k[M_K][D / 8][4] = {}, sum_v[M_K][D / 8][4] = {};
        // The order of additions to a tile: round by round; in even rounds from the last keys that the tile sees, whose warp starts there; in odd
        // rounds from the first keys, whose warp finished the previous round first.
        int last = round % 2 ? 0 : (round + 1) * WARPS < KEY_TILES ? (round + 1) * WARPS : KEY_TILES;
        int before = round % 2 ? mine : round * WARPS - 1 - mine;
        kept(k0), kept(last), kept(before);
        int first = CAUSAL && k0 > OFFSET ? ((k0 - OFFSET) / 16 + SPLIT - 1 - part) / SPLIT : 0;
        Tile *tile = tiles + first;
#pragma unroll 1
        for (int t0 = (first * SPLIT + part) * 16; t0 < TIME; t0 += 16 * SPLIT, tile++) {
            // Scores are [keys, queries].
            float s[M_K][2][4] = {}, dp[M_K][2][4];
            Four along[2] = {tile->along[lane % 4], tile->along[lane % 4 + 4]};
            Two base[2] = {tile->lse[lane % 4], tile->lse[lane % 4 + 4]};
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                u32 a[4], g[4];
                matrices(a, tile->q + by_row[i]);
                matrices(g, tile->dy + by_row[i]);
#pragma unroll
                for (int m = 0; m < M_K; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        mma<T>(s[m][n], ka[m][i], a[2 * n], a[2 * n + 1]);
                        mma_onto<T>(dp[m][n], i == 0 ? along[n].of : dp[m][n], va[m][i], g[2 * n], g[2 * n + 1]);
                    }
            }
#pragma unroll
            for (int m = 0; m < M_K; m++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) s[m][n][j] = power_of_two(s[m][n][j] * SCALE_2 - base[n].of[j % 2]);
            if (k0 + WARP_KEYS > KEYS || (CAUSAL && k0 + WARP_KEYS - 1 > t0 + OFFSET)) {
#pragma unroll
                for (int m = 0; m < M_K; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            int key = k0 + 16 * m + j / 2 * 8 + lane / 4, t = t0 + 8 * n + lane % 4 * 2 + j % 2;
                            if (key >= KEYS || (CAUSAL && key > t + OFFSET)) s[m][n][j] = 0.0f;
                        }
            }
            u32 w[M_K][4], u[M_K][4];
#pragma unroll
            for (int m = 0; m < M_K; m++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float *p = s[m][n] + 2 * half, *d = dp[m][n] + 2 * half;
                        w[m][2 * n + half] = pack<T>(p[0], p[1]);
                        u[m][2 * n + half] = pack<T>(p[0] * d[0], p[1] * d[1]);
                    }
            float out[D / 8][4] = {};
#pragma unroll
            for (int m = 0; m < M_K; m++) {
                u32 a[4] = {transposed(u[m][0]), transposed(u[m][2]), transposed(u[m][1]), transposed(u[m][3])};
#pragma unroll
                for (int i = 0; i < STEPS; i++)
                    mma<T>(out[2 * i], a, kb[m][i][0], kb[m][i][1]), mma<T>(out[2 * i + 1], a, kb[m][i][2], kb[m][i][3]);
            }
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                u32 a[4], g[4];
                matrices_t(a, tile->q + by_column[i]);
                matrices_t(g, tile->dy + by_column[i]);
#pragma unroll
                for (int m = 0; m < M_K; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        mma<T>(sum_k[m][2 * i + n], u[m], a[2 * n], a[2 * n + 1]);
                        mma<T>(sum_v[m][2 * i + n], w[m], g[2 * n], g[2 * n + 1]);
                    }
            }
            int reach = CAUSAL ? (u32)(t0 + 15 + OFFSET) / WARP_KEYS + 1 : last;
            int turn = before + (reach < last ? reach : last);
            wait_turn(&tile->turn, turn);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                Four sum = tile->dq[n][lane];
#pragma unroll
                for (int j = 0; j < 4; j++) sum.of[j] += out[n][j];
                tile->dq[n][lane] = sum;
            }
            pass_turn(&tile->turn, turn, lane);
        }
        if (PARTS == 1) {
            store<M_K>((T *)dk + b * KEYS * DK_ROW + h / GROUP * D, DK_ROW, k0, KEYS, sum_k, SCALE, lane);
            store<M_K>((T *)dv + b * KEYS * DK_ROW + h / GROUP * D, DK_ROW, k0, KEYS, sum_v, 1.0f, lane);
        } else {
            store_part((float *)dk + (u64)blockIdx.x * KEYS * D, k0, sum_k, SCALE, lane);
            store_part((float *)dv + (u64)blockIdx.x * KEYS * D, k0, sum_v, 1.0f, lane);
        }
    }
    __syncthreads();
    for (int i = warp; i < QUERY_TILES * (D / 8); i += WARPS) {
        Four sum = tiles[i / (D / 8)].dq[i % (D / 8)][lane];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = (i / (D / 8) * SPLIT + part) * 16 + 8 * half + lane / 4;
            T *to = dq + b * TIME * DQ_ROW + h * D + t * DQ_ROW + i % (D / 8) * 8 + lane % 4 * 2;
            if (t < TIME) *(u32 *)to = pack<T>(SCALE * sum.of[2 * half], SCALE * sum.of[2 * half + 1]);
        }
    }
}

// dk, dv [batch, keys, kv, D]: the sums of their parts; 8 elements a thread.
extern "C" __global__ void __launch_bounds__(256) attention_parts(const float *k_parts, const float *v_parts, T *dk, T *dv) {
    const u64 chunks = (u64)BATCH * KV * KEYS * (D / 8);
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= 2 * chunks) return;
    const float *parts = i < chunks ? k_parts : v_parts;
    T *to = i < chunks ? dk : dv;
    i = i < chunks ? i : i - chunks;
    u64 chunk = i % (D / 8), key = i / (D / 8) % KEYS, kv = i / (D / 8) / KEYS % KV, b = i / (D / 8) / KEYS / KV;
    parts += ((b * KV + kv) * PARTS * KEYS + key) * D + chunk * 8;
    float sum[8] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            Four x = *(const Four *)(parts + (u64)part * KEYS * D + 4 * c);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[4 * c + j] += x.of[j];
        }
    Eight out;
#pragma unroll
    for (int j = 0; j < 8; j++) from_float(sum[j], out.of[j]);
    *(Eight *)(to + (b * KEYS + key) * DK_ROW + kv * D + chunk * 8) = out;
}
