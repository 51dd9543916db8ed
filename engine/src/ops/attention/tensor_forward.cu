// One block for each (batch, head, tile of BM queries). SCALE_2 = |scale| log2(e): exp(scale s) = 2^(SCALE_2 s), s with the sign of scale.
#define BM (64 * M_Q)
#define QUERY_TILES ((TIME + BM - 1) / BM)

// How many keys are taken at once.
template <int N> struct Keys { static const int OF_8 = N; };

extern "C" __global__ void __launch_bounds__(128) attention_forward(const T *q, const T *k, const T *v, UNTIL T *y, float *lse) {
    extern __shared__ __align__(16) float shared[];
    T *tiles = (T *)shared; // two stages of 64 keys and 64 values; the queries pass through the second
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Causal: the last tile has the most to do, so it starts first.
    int t0 = (QUERY_TILES - 1 - (int)(blockIdx.x % QUERY_TILES)) * BM, t_warp = t0 + warp * 16 * M_Q;
    u64 bh = blockIdx.x / QUERY_TILES, b = bh / HEADS, h = bh % HEADS;
    const u64 q_step = Q_ROW, k_step = K_ROW, v_step = V_ROW;
    q += b * TIME * q_step + h * D, k += b * KEYS * k_step + h / GROUP * D, v += b * KEYS * v_step + h / GROUP * D;
    y += (b * TIME * HEADS + h) * D;
    const int *limits = MASKED ? until + b * KEYS : until;
    int last = CAUSAL && t0 + BM + OFFSET < KEYS ? t0 + BM + OFFSET : KEYS;
    Seen now = seen_from(limits, 0, last, t0, lane);

    load<BM>(tiles + 128 * PITCH, q, q_step, t0, TIME);
    copies_commit();
    load<64>(tiles, k, k_step, now.first, KEYS);
    load<64>(tiles + 64 * PITCH, v, v_step, now.first, KEYS);
    copies_commit();
    copies_wait<1>();
    __syncthreads();
    u32 a[M_Q][STEPS][4];
#pragma unroll
    for (int m = 0; m < M_Q; m++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            load_a(a[m][i], tiles + (128 + (warp * M_Q + m) * 16) * PITCH, i, lane);
#pragma unroll
            for (int j = 0; j < 4; j++) a[m][i][j] ^= NEGATIVE ? 0x80008000u : 0u;
        }

    float out[M_Q][D / 8][4] = {}, top[M_Q][2], total[M_Q][2] = {};
#pragma unroll
    for (int m = 0; m < M_Q; m++) top[m][0] = top[m][1] = -infinity();
    for (int stage = 0; now.first < last; stage ^= 1) {
        const T *keys = tiles + stage * 128 * PITCH, *values = keys + 64 * PITCH;
        int k0 = now.first, least = now.least;
        now = seen_from(limits, k0 + 64, last, t0, lane);
        copies_wait<0>();
        __syncthreads(); // this stage has arrived, and no warp reads the other any more
        if (now.first < last) {
            T *next = tiles + (stage ^ 1) * 128 * PITCH;
            load<64>(next, k, k_step, now.first, KEYS);
            load<64>(next + 64 * PITCH, v, v_step, now.first, KEYS);
            copies_commit();
        }
        if (t_warp >= TIME || (CAUSAL && k0 > t_warp + 16 * M_Q - 1 + OFFSET)) continue;
        const auto add = [&](auto keys_at_once) {
            const int N = decltype(keys_at_once)::OF_8;
            float s[M_Q][N][4] = {};
            by_rows<M_Q, N, true>(s, a, tiles, keys, lane);
            if (k0 + 8 * N > KEYS || (CAUSAL && k0 + 8 * N - 1 > t_warp + OFFSET) || (MASKED && t_warp + 16 * M_Q - 1 > least)) {
#pragma unroll
                for (int m = 0; m < M_Q; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            int key = k0 + 8 * n + lane % 4 * 2 + j % 2, t = t_warp + 16 * m + j / 2 * 8 + lane / 4;
                            if (key >= KEYS || (CAUSAL && key > t + OFFSET) || (MASKED && t > limits[key])) s[m][n][j] = -infinity();
                        }
            }
            u32 w[M_Q][N / 2][4];
#pragma unroll
            for (int m = 0; m < M_Q; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float high = top[m][half];
#pragma unroll
                    for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1)); // four threads a row
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                    // Without a mask every row sees key 0, so `high` is a score from the first tile on.
                    float score = MASKED && high == -infinity() ? 0.0f : high;
                    float shrink = power_of_two((top[m][half] - score) * SCALE_2), base = score * SCALE_2, sum = 0.0f;
                    top[m][half] = high;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        float p0 = power_of_two(s[m][n][2 * half] * SCALE_2 - base), p1 = power_of_two(s[m][n][2 * half + 1] * SCALE_2 - base);
                        sum += p0 + p1;
                        w[m][n / 2][n % 2 * 2 + half] = pack<T>(p0, p1);
                    }
                    total[m][half] = total[m][half] * shrink + sum; // of this thread's columns
#pragma unroll
                    for (int n = 0; n < D / 8; n++) out[m][n][2 * half] *= shrink, out[m][n][2 * half + 1] *= shrink;
                }
            by_columns<M_Q, N / 2>(out, w, values, lane);
        };
        if (last - k0 > 32) add(Keys<8>());
        else add(Keys<4>()); // a short end
    }
#pragma unroll
    for (int m = 0; m < M_Q; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float inverse = MASKED && sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
            for (int n = 0; n < D / 8; n++) out[m][n][2 * half] *= inverse, out[m][n][2 * half + 1] *= inverse;
            int t = t_warp + 16 * m + 8 * half + lane / 4;
            const float ln_2 = 0.693147181f;
            if (lane % 4 == 0 && t < TIME) lse[bh * TIME + t] = top[m][half] * SCALE_2 * ln_2 + logf(sum);
        }
    store<M_Q>(y, (u64)HEADS * D, t_warp, TIME, out, 1.0f, lane);
}
