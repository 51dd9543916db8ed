// One block for each (batch, head, tile of queries), with an online softmax.
extern "C" __global__ void __launch_bounds__(256) attention_forward(const TQ *q, const TK *k, const TK *v, UNTIL TQ *y, float *lse) {
    extern __shared__ float shared[];
    float *queries = shared, *others = queries + TILE * PITCH, *weights = others + TILE * PITCH;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    // Causal: the last tile has the most to do, so it starts first.
    int t0 = (QUERY_TILES - 1 - (int)(blockIdx.x % QUERY_TILES)) * TILE;
    u64 bh = blockIdx.x / QUERY_TILES, b = bh / HEADS, h = bh % HEADS;
    const u64 q_step = Q_ROW, k_step = K_ROW, v_step = V_ROW;
    q += b * TIME * q_step + h * D, k += b * KEYS * k_step + h / GROUP * D, v += b * KEYS * v_step + h / GROUP * D;
    y += (b * TIME * HEADS + h) * D;
    const int *limits = MASKED ? until + b * KEYS : until;

    float out[R][WIDE] = {}, top[R], total[R];
    for (int a = 0; a < R; a++) top[a] = -infinity(), total[a] = 0.0f;
    load(queries, q, q_step, t0, TIME);
    int last = seen(t0 + TILE - 1);
    for (int k0 = 0; k0 < last; k0 += TILE) {
        __syncthreads();
        load(others, k, k_step, k0, KEYS);
        __syncthreads();
        float s[R][R];
        dots(s, queries, others, ty, tx);
        __syncthreads();
        load(others, v, v_step, k0, KEYS);
#pragma unroll
        for (int a = 0; a < R; a++) {
            int t = t0 + ty + 16 * a, live = seen(t) - k0;
            float high = top[a];
#pragma unroll
            for (int c = 0; c < R; c++) {
                bool shown = tx + 16 * c < live && (!MASKED || t <= limits[k0 + tx + 16 * c]);
                s[a][c] = shown ? SCALE * s[a][c] : -infinity();
                high = larger(high, s[a][c]);
            }
            for (int i = 8; i > 0; i >>= 1) high = larger(high, __shfl_xor_sync(0xffffffffu, high, i)); // 16 threads a row
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < R; c++) {
                float p = s[a][c] == -infinity() ? 0.0f : expf(s[a][c] - high);
                weights[(ty + 16 * a) * SQUARE + tx + 16 * c] = p;
                sum += p;
            }
            for (int i = 8; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
            // Without a mask every row sees key 0, so `high` is a score from the first tile on.
            float shrink = MASKED && high == -infinity() ? 1.0f : expf(top[a] - high);
            top[a] = high;
            total[a] = total[a] * shrink + sum;
#pragma unroll
            for (int c = 0; c < WIDE; c++) out[a][c] *= shrink;
        }
        __syncthreads();
        add_product(out, weights, others, ty, tx);
    }
#pragma unroll
    for (int a = 0; a < R; a++) {
        int t = t0 + ty + 16 * a;
        float inverse = MASKED && total[a] == 0.0f ? 0.0f : 1.0f / total[a];
#pragma unroll
        for (int c = 0; c < WIDE; c++) out[a][c] *= inverse;
        if (tx == 0 && t < TIME) lse[bh * TIME + t] = top[a] + logf(total[a]);
    }
    store(y, (u64)HEADS * D, t0, TIME, out, 1.0f, ty, tx);
}
