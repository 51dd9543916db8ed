// p = exp(SCALE q k^T - lse); dv = p^T dy; ds = p (dy v^T - along); dq = SCALE ds k; dk = SCALE ds^T q.

// along [batch, heads, time] = row sum of dy y; one warp a row.
extern "C" __global__ void __launch_bounds__(256) attention_along(const TY *y, const TG *dy, float *along) {
    u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32; // (b * TIME + t) * HEADS + h
    if (row >= (u64)BATCH * TIME * HEADS) return;
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < D; i += 32) sum += to_float(y[row * D + i]) * to_float(dy[row * D + i]);
    sum = warp_sum(sum);
    u64 h = row % HEADS, t = row / HEADS % TIME, b = row / HEADS / TIME;
    if (threadIdx.x % 32 == 0) along[(b * HEADS + h) * TIME + t] = sum;
}

// One block for each (batch, head, tile of queries).
extern "C" __global__ void __launch_bounds__(256)
attention_dq(const TQ *q, const TK *k, const TK *v, const float *lse, const TG *dy, UNTIL const float *along, TQ *dq) {
    extern __shared__ float shared[];
    float *queries = shared, *dys = queries + TILE * PITCH, *keys = dys + TILE * PITCH, *values = keys + TILE * PITCH;
    float *weights = values + TILE * PITCH;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int t0 = (QUERY_TILES - 1 - (int)(blockIdx.x % QUERY_TILES)) * TILE;
    u64 bh = blockIdx.x / QUERY_TILES, b = bh / HEADS, h = bh % HEADS;
    const u64 y_step = (u64)HEADS * D;
    u64 q_at = b * TIME * Q_ROW + h * D, k_at = b * KEYS * K_ROW + h / GROUP * D, v_at = b * KEYS * V_ROW + h / GROUP * D;
    u64 y_at = (b * TIME * HEADS + h) * D;
    const int *limits = MASKED ? until + b * KEYS : until;

    float out[R][WIDE] = {}, row_lse[R], row_along[R];
    for (int a = 0; a < R; a++) {
        int t = t0 + ty + 16 * a;
        row_lse[a] = t < TIME ? lse[bh * TIME + t] : 0.0f;
        row_along[a] = t < TIME ? along[bh * TIME + t] : 0.0f;
    }
    load(queries, q + q_at, Q_ROW, t0, TIME);
    load(dys, dy + y_at, y_step, t0, TIME);
    int last = seen(t0 + TILE - 1);
    for (int k0 = 0; k0 < last; k0 += TILE) {
        __syncthreads();
        load(keys, k + k_at, K_ROW, k0, KEYS);
        load(values, v + v_at, V_ROW, k0, KEYS);
        __syncthreads();
        float s[R][R], dp[R][R];
        dots(s, queries, keys, ty, tx);
        dots(dp, dys, values, ty, tx);
#pragma unroll
        for (int a = 0; a < R; a++) {
            int t = t0 + ty + 16 * a, live = seen(t) - k0;
#pragma unroll
            for (int c = 0; c < R; c++) {
                bool shown = tx + 16 * c < live && (!MASKED || t <= limits[k0 + tx + 16 * c]);
                float ds = shown ? expf(SCALE * s[a][c] - row_lse[a]) * (dp[a][c] - row_along[a]) : 0.0f;
                weights[(ty + 16 * a) * SQUARE + tx + 16 * c] = ds;
            }
        }
        __syncthreads();
        add_product(out, weights, keys, ty, tx);
    }
    store(dq + b * TIME * DQ_ROW + h * D, DQ_ROW, t0, TIME, out, SCALE, ty, tx);
}

// One block for each (batch, key head, tile of keys): all query heads that read it, and all tiles of queries that see it.
extern "C" __global__ void __launch_bounds__(256)
attention_dkdv(const TQ *q, const TK *k, const TK *v, const float *lse, const TG *dy, UNTIL const float *along, TK *dk, TK *dv) {
    extern __shared__ float shared[];
    float *queries = shared, *dys = queries + TILE * PITCH, *keys = dys + TILE * PITCH, *values = keys + TILE * PITCH;
    float *p_t = values + TILE * PITCH, *ds_t = p_t + TILE * SQUARE; // [keys, queries]
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int k0 = (int)(blockIdx.x % KEY_TILES) * TILE;
    u64 b = blockIdx.x / KEY_TILES / KV, kv = blockIdx.x / KEY_TILES % KV;
    const u64 y_step = (u64)HEADS * D;
    u64 k_at = b * KEYS * K_ROW + kv * D, v_at = b * KEYS * V_ROW + kv * D, to = b * KEYS * DK_ROW + kv * D;

    float sum_k[R][WIDE] = {}, sum_v[R][WIDE] = {};
    int limit[R]; // the last query that sees a key
#pragma unroll
    for (int a = 0; a < R; a++) limit[a] = MASKED && k0 + ty + 16 * a < KEYS ? until[b * KEYS + k0 + ty + 16 * a] : TIME;
    load(keys, k + k_at, K_ROW, k0, KEYS);
    load(values, v + v_at, V_ROW, k0, KEYS);
    // The first query that sees key k0.
    int first = CAUSAL && k0 > KEYS - TIME ? (k0 - (KEYS - TIME)) / TILE * TILE : 0;
    for (u64 h = kv * GROUP; h < (kv + 1) * GROUP; h++) {
        u64 q_at = b * TIME * Q_ROW + h * D, y_at = (b * TIME * HEADS + h) * D;
        const float *h_lse = lse + (b * HEADS + h) * TIME, *h_along = along + (b * HEADS + h) * TIME;
        for (int t0 = first; t0 < TIME; t0 += TILE) {
            __syncthreads();
            load(queries, q + q_at, Q_ROW, t0, TIME);
            load(dys, dy + y_at, y_step, t0, TIME);
            __syncthreads();
            float s[R][R], dp[R][R];
            dots(s, keys, queries, ty, tx);
            dots(dp, values, dys, ty, tx);
#pragma unroll
            for (int c = 0; c < R; c++) {
                int t = t0 + tx + 16 * c, live = t < TIME ? seen(t) - k0 : 0;
                float col_lse = t < TIME ? h_lse[t] : 0.0f, col_along = t < TIME ? h_along[t] : 0.0f;
#pragma unroll
                for (int a = 0; a < R; a++) {
                    bool shown = ty + 16 * a < live && t <= limit[a];
                    float p = shown ? expf(SCALE * s[a][c] - col_lse) : 0.0f;
                    p_t[(ty + 16 * a) * SQUARE + tx + 16 * c] = p;
                    ds_t[(ty + 16 * a) * SQUARE + tx + 16 * c] = shown ? p * (dp[a][c] - col_along) : 0.0f;
                }
            }
            __syncthreads();
            add_product(sum_v, p_t, dys, ty, tx);
            add_product(sum_k, ds_t, queries, ty, tx);
        }
    }
    store(dk + to, DK_ROW, k0, KEYS, sum_k, SCALE, ty, tx);
    store(dv + to, DK_ROW, k0, KEYS, sum_v, 1.0f, ty, tx);
}
