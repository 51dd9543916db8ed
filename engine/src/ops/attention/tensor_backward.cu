#define BQ (64 * M_Q)
#define BK (64 * M_K)
#define QUERY_TILES ((TIME + BQ - 1) / BQ)
#define KEY_TILES ((KEYS + BK - 1) / BK)

// One block for each (batch, head, tile of BQ queries); 64 keys at a time, 32 of them in registers.
extern "C" __global__ void __launch_bounds__(128)
attention_dq(const T *q, const T *k, const T *v, const T *dy, UNTIL const Pair *stats, T *dq) {
    extern __shared__ __align__(16) float shared[];
    T *tiles = (T *)shared; // two stages of 64 keys and 64 values; the queries and dy come first
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t0 = (QUERY_TILES - 1 - (int)(blockIdx.x % QUERY_TILES)) * BQ, t_warp = t0 + warp * 16 * M_Q;
    u64 bh = blockIdx.x / QUERY_TILES, b = bh / HEADS, h = bh % HEADS;
    const u64 y_step = (u64)HEADS * D;
    u64 q_at = b * TIME * Q_ROW + h * D, k_at = b * KEYS * K_ROW + h / GROUP * D, v_at = b * KEYS * V_ROW + h / GROUP * D;
    u64 y_at = (b * TIME * HEADS + h) * D;
    const int *limits = MASKED ? until + b * KEYS : until;
    int last = CAUSAL && t0 + BQ + OFFSET < KEYS ? t0 + BQ + OFFSET : KEYS;
    Seen now = seen_from(limits, 0, last, t0, lane);

    load<BQ>(tiles, q + q_at, Q_ROW, t0, TIME);
    load<BQ>(tiles + BQ * PITCH, dy + y_at, y_step, t0, TIME);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    u32 qa[M_Q][STEPS][4], ga[M_Q][STEPS][4];
    Pair row[M_Q][2];
#pragma unroll
    for (int m = 0; m < M_Q; m++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const T *rows = tiles + (warp * M_Q + m) * 16 * PITCH;
            load_a(qa[m][i], rows, i, lane);
            load_a(ga[m][i], rows + BQ * PITCH, i, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = t_warp + 16 * m + 8 * half + lane / 4;
            row[m][half] = t < TIME ? stats[bh * TIME + t] : Pair{0.0f, 0.0f};
        }
    }
    __syncthreads();
    load<64>(tiles, k + k_at, K_ROW, now.first, KEYS);
    load<64>(tiles + 64 * PITCH, v + v_at, V_ROW, now.first, KEYS);
    copies_commit();

    float out[M_Q][D / 8][4] = {};
    for (int stage = 0; now.first < last; stage ^= 1) {
        int k0 = now.first, least = now.least;
        now = seen_from(limits, k0 + 64, last, t0, lane);
        copies_wait<0>();
        __syncthreads(); // this stage has arrived, and no warp reads the other any more
        if (now.first < last) {
            T *next = tiles + (stage ^ 1) * 128 * PITCH;
            load<64>(next, k + k_at, K_ROW, now.first, KEYS);
            load<64>(next + 64 * PITCH, v + v_at, V_ROW, now.first, KEYS);
            copies_commit();
        }
#pragma unroll 1
        for (int part = 0; part < 64; part += 32) {
            int first = k0 + part;
            if (t_warp >= TIME || first >= KEYS || (CAUSAL && first > t_warp + 16 * M_Q - 1 + OFFSET)) break;
            const T *keys = tiles + (stage * 128 + part) * PITCH, *values = keys + 64 * PITCH;
            float s[M_Q][4][4] = {}, dp[M_Q][4][4] = {};
            by_rows<M_Q, 4, true>(s, qa, tiles, keys, lane);
            by_rows<M_Q, 4, true>(dp, ga, tiles, values, lane);
            bool masked = first + 32 > KEYS || (CAUSAL && first + 31 > t_warp + OFFSET) || (MASKED && t_warp + 16 * M_Q - 1 > least);
            u32 w[M_Q][2][4];
#pragma unroll
            for (int m = 0; m < M_Q; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float ds[2];
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            Pair r = row[m][half];
                            ds[j] = power_of_two(s[m][n][2 * half + j] * SCALE_2 - r.lse) * (dp[m][n][2 * half + j] - r.along);
                            int key = first + 8 * n + lane % 4 * 2 + j, t = t_warp + 16 * m + 8 * half + lane / 4;
                            if (masked && (key >= KEYS || (CAUSAL && key > t + OFFSET) || (MASKED && t > limits[key]))) ds[j] = 0.0f;
                        }
                        w[m][n / 2][n % 2 * 2 + half] = pack<T>(ds[0], ds[1]);
                    }
            by_columns<M_Q, 2>(out, w, keys, lane);
        }
    }
    store<M_Q>(dq + b * TIME * DQ_ROW + h * D, DQ_ROW, t_warp, TIME, out, SCALE, lane);
}

// One block for each (batch, key head, tile of BK keys): all query heads that read it, and STAGE queries at a time, 32 of them in
// registers. Scores are [keys, queries]. Queries beyond TIME are zeros and so add nothing.
extern "C" __global__ void __launch_bounds__(128)
attention_dkdv(const T *q, const T *k, const T *v, const T *dy, UNTIL const Pair *stats, T *dk, T *dv) {
    extern __shared__ __align__(16) float shared[];
    T *keys = (T *)shared, *values = keys + BK * PITCH, *stages = values + BK * PITCH; // two stages of queries and dy
    Pair *pairs = (Pair *)(stages + 4 * STAGE * PITCH);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int k0 = (int)(blockIdx.x % KEY_TILES) * BK, k_warp = k0 + warp * 16 * M_K;
    u64 b = blockIdx.x / KEY_TILES / KV, kv = blockIdx.x / KEY_TILES % KV;
    const u64 y_step = (u64)HEADS * D;
    u64 k_at = b * KEYS * K_ROW + kv * D, v_at = b * KEYS * V_ROW + kv * D, to = b * KEYS * DK_ROW + kv * D;
    // From the first query that sees key k0 to the last that sees any of the keys.
    int first = CAUSAL && k0 > OFFSET ? (k0 - OFFSET) / STAGE * STAGE : 0, end = TIME;
    int limit[M_K][2]; // the last query that sees a key
    Reach own = {TIME, TIME};
    if (MASKED) {
        const int *limits = until + b * KEYS;
        int most = reach<BK>(limits, k0, lane).most;
        end = most < first ? first : most < TIME ? most + 1 : TIME;
        own = Reach{TIME, -1};
#pragma unroll
        for (int m = 0; m < M_K; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int key = k_warp + 16 * m + 8 * half + lane / 4, x = limit[m][half] = key < KEYS ? limits[key] : -1;
                own.least = x < own.least ? x : own.least, own.most = x > own.most ? x : own.most;
            }
        own = Reach{__reduce_min_sync(0xffffffffu, own.least), __reduce_max_sync(0xffffffffu, own.most)};
    }
    int per_head = (end - first + STAGE - 1) / STAGE;

    auto fetch = [&](int i) {
        u64 h = kv * GROUP + i / per_head;
        int t0 = first + i % per_head * STAGE;
        u64 q_at = b * TIME * Q_ROW + h * D, y_at = (b * TIME * HEADS + h) * D;
        T *to = stages + i % 2 * 2 * STAGE * PITCH;
        load<STAGE>(to, q + q_at, Q_ROW, t0, TIME);
        load<STAGE>(to + STAGE * PITCH, dy + y_at, y_step, t0, TIME);
        if (threadIdx.x < STAGE) {
            int t = t0 + threadIdx.x;
            copy8(pairs + i % 2 * STAGE + threadIdx.x, stats + (b * HEADS + h) * TIME + (t < TIME ? t : 0), t < TIME);
        }
        copies_commit();
    };
    load<BK>(keys, k + k_at, K_ROW, k0, KEYS);
    load<BK>(values, v + v_at, V_ROW, k0, KEYS);
    if (per_head > 0) fetch(0);

    const bool kept = D <= 64;
    const T *k_rows = keys + warp * 16 * M_K * PITCH, *v_rows = values + warp * 16 * M_K * PITCH;
    u32 ka[M_K][kept ? STEPS : 1][4], va[M_K][kept ? STEPS : 1][4];
    float sum_k[M_K][D / 8][4] = {}, sum_v[M_K][D / 8][4] = {};
    for (int i = 0; i < GROUP * per_head; i++) {
        copies_wait<0>();
        __syncthreads(); // this stage has arrived, and no warp reads the other any more
        if (i + 1 < GROUP * per_head) fetch(i + 1);
        if (kept && i == 0) {
#pragma unroll
            for (int m = 0; m < M_K; m++)
#pragma unroll
                for (int j = 0; j < (kept ? STEPS : 0); j++) {
                    load_a(ka[m][j], k_rows + 16 * m * PITCH, j, lane);
                    load_a(va[m][j], v_rows + 16 * m * PITCH, j, lane);
                }
        }
        int t0 = first + i % per_head * STAGE;
#pragma unroll 1
        for (int part = 0; part < STAGE; part += 32) {
            int t_part = t0 + part;
            if (k_warp >= KEYS || t_part >= TIME || (CAUSAL && k_warp > t_part + 31 + OFFSET) || (MASKED && t_part > own.most)) continue;
            const T *queries = stages + (i % 2 * 2 * STAGE + part) * PITCH, *dys = queries + STAGE * PITCH;
            const Pair *columns = pairs + i % 2 * STAGE + part + lane % 4 * 2;
            float s[M_K][4][4] = {}, dp[M_K][4][4] = {};
            by_rows<M_K, 4, kept>(s, ka, k_rows, queries, lane);
            by_rows<M_K, 4, kept>(dp, va, v_rows, dys, lane);
            bool masked = (CAUSAL && k_warp + 16 * M_K - 1 > t_part + OFFSET) || (MASKED && t_part + 31 > own.least);
            u32 w[M_K][2][4], u[M_K][2][4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                Pair column[2] = {columns[8 * n], columns[8 * n + 1]};
#pragma unroll
                for (int m = 0; m < M_K; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float p[2], ds[2];
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            p[j] = power_of_two(s[m][n][2 * half + j] * SCALE_2 - column[j].lse);
                            int t = t_part + 8 * n + lane % 4 * 2 + j, key = k_warp + 16 * m + 8 * half + lane / 4;
                            if (masked && ((CAUSAL && key > t + OFFSET) || (MASKED && t > limit[m][half]))) p[j] = 0.0f;
                            ds[j] = p[j] * (dp[m][n][2 * half + j] - column[j].along);
                        }
                        w[m][n / 2][n % 2 * 2 + half] = pack<T>(p[0], p[1]);
                        u[m][n / 2][n % 2 * 2 + half] = pack<T>(ds[0], ds[1]);
                    }
            }
            by_columns<M_K, 2>(sum_v, w, dys, lane);
            by_columns<M_K, 2>(sum_k, u, queries, lane);
        }
    }
    store<M_K>(dk + to, DK_ROW, k_warp, KEYS, sum_k, SCALE, lane);
    store<M_K>(dv + to, DK_ROW, k_warp, KEYS, sum_v, 1.0f, lane);
}
