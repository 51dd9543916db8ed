// One block for each (batch, head): all queries, 16 a warp, and all keys at once, SIDE of both. SCALE_2 and NEGATIVE as in tensor_forward.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_forward(const T *q, const T *k, const T *v, T *y, float *lse) {
    extern __shared__ __align__(16) float shared[];
    T *queries = (T *)shared, *keys = queries + SIDE * PITCH, *values = keys + SIDE * PITCH;
    int lane = threadIdx.x % 32, t_warp = threadIdx.x / 32 * 16;
    u64 b = blockIdx.x / HEADS, h = blockIdx.x % HEADS;
    load<SIDE>(queries, q + b * TIME * Q_ROW + h * D, Q_ROW, 0, TIME);
    load<SIDE>(keys, k + b * KEYS * K_ROW + h / GROUP * D, K_ROW, 0, KEYS);
    copies_commit();
    load<SIDE>(values, v + b * KEYS * V_ROW + h / GROUP * D, V_ROW, 0, KEYS);
    copies_commit();
    copies_wait<1>();
    __syncthreads();
    u32 a[1][STEPS][4], w[1][SIDE / 16][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        load_a(a[0][i], queries + t_warp * PITCH, i, lane);
#pragma unroll
        for (int j = 0; j < 4; j++) a[0][i][j] ^= NEGATIVE ? 0x80008000u : 0u;
    }
    float s[1][SIDE / 8][4] = {}, inverse[2];
    by_rows<1, SIDE / 8, true>(s, a, queries, keys, lane);
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = 8 * n + lane % 4 * 2 + j % 2, t = t_warp + j / 2 * 8 + lane / 4;
            if ((8 * n + 8 > KEYS && key >= KEYS) || (CAUSAL && key > t)) s[0][n][j] = -infinity();
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float high = -infinity(), sum = 0.0f; // every row sees key 0
#pragma unroll
        for (int n = 0; n < SIDE / 8; n++) high = fmaxf(high, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1)); // four threads a row
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
#pragma unroll
        for (int n = 0; n < SIDE / 8; n++) {
            float p0 = power_of_two((s[0][n][2 * half] - high) * SCALE_2), p1 = power_of_two((s[0][n][2 * half + 1] - high) * SCALE_2);
            sum += p0 + p1;
            w[0][n / 2][n % 2 * 2 + half] = pack<T>(p0, p1);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[half] = 1.0f / sum;
        int t = t_warp + 8 * half + lane / 4;
        const float ln_2 = 0.693147181f;
        if (lane % 4 == 0 && t < TIME) lse[blockIdx.x * (u64)TIME + t] = high * SCALE_2 * ln_2 + logf(sum);
    }
    copies_wait<0>();
    __syncthreads();
    float out[1][D / 8][4] = {};
    by_columns<1, SIDE / 16>(out, w, values, lane);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) out[0][n][j] *= inverse[j / 2];
    store<1>(y + (b * TIME * HEADS + h) * D, (u64)HEADS * D, t_warp, TIME, out, 1.0f, lane);
}
