// One block for each (batch, head), which has SIDE queries and as many keys, 16 a warp: first dq by its queries, then dk and dv by its keys.
// p = exp(SCALE q k^T - lse); dv = p^T dy; ds = p (dy v^T - along); dq = SCALE ds k; dk = SCALE ds^T q; along is the row sum of dy y.
struct __align__(8) Pair { float lse, along; };
struct __align__(16) Eight { T of[8]; };

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
attention_backward(const T *q, const T *k, const T *v, const T *y, const float *lse, const T *dy, T *dq, T *dk, T *dv) {
    extern __shared__ __align__(16) float shared[];
    T *queries = (T *)shared, *dys = queries + SIDE * PITCH, *keys = dys + SIDE * PITCH, *values = keys + SIDE * PITCH;
    Pair *pairs = (Pair *)(values + SIDE * PITCH);
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const u64 step = HEADS * D, b = blockIdx.x / HEADS, h = blockIdx.x % HEADS, at = (b * TIME * HEADS + h) * D;
    load<SIDE>(queries, q + b * TIME * Q_ROW + h * D, Q_ROW, 0, TIME);
    load<SIDE>(dys, dy + at, step, 0, TIME);
    load<SIDE>(keys, k + b * TIME * K_ROW + h * D, K_ROW, 0, TIME);
    load<SIDE>(values, v + b * TIME * V_ROW + h * D, V_ROW, 0, TIME);
    copies_commit();
    // D / 8 threads a row; what is behind the last has no lse, and its probability is 0.
    const int lanes = D / 8;
    float sum[16 / (32 / lanes)];
#pragma unroll
    for (int i = 0; i < 16 / (32 / lanes); i++) {
        int t = first + i * (32 / lanes) + lane / lanes;
        sum[i] = 0.0f;
        if (t >= TIME) continue;
        Eight a = *(const Eight *)(y + at + t * step + lane % lanes * 8), g = *(const Eight *)(dy + at + t * step + lane % lanes * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[i] += to_float(a.of[j]) * to_float(g.of[j]);
    }
#pragma unroll
    for (int i = 0; i < 16 / (32 / lanes); i++) {
        for (int j = lanes / 2; j > 0; j >>= 1) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], j);
        int t = first + i * (32 / lanes) + lane / lanes;
        const float log2_e = 1.44269504f;
        if (lane % lanes == 0) pairs[t] = Pair{t < TIME ? lse[blockIdx.x * (u64)TIME + t] * log2_e : infinity(), sum[i]};
    }
    copies_wait<0>();
    __syncthreads();
    if (first >= TIME) return;

    u32 own[1][STEPS][4], other[1][STEPS][4];
    const auto take = [&](const T *rows, const T *others) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) load_a(own[0][i], rows + first * PITCH, i, lane), load_a(other[0][i], others + first * PITCH, i, lane);
    };
    take(queries, dys);
    Pair row[2] = {pairs[first + lane / 4], pairs[first + 8 + lane / 4]};
    float of_q[1][D / 8][4] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < (CAUSAL ? first + 16 : TIME); k0 += 32) {
        float s[1][4][4] = {}, dp[1][4][4] = {};
        by_rows<1, 4, true>(s, own, queries, keys + k0 * PITCH, lane);
        by_rows<1, 4, true>(dp, other, dys, values + k0 * PITCH, lane);
        u32 w[1][2][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float ds[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    ds[j] = power_of_two(s[0][n][2 * half + j] * SCALE_2 - row[half].lse) * (dp[0][n][2 * half + j] - row[half].along);
                    int key = k0 + 8 * n + lane % 4 * 2 + j, t = first + 8 * half + lane / 4;
                    if (key >= TIME || (CAUSAL && key > t)) ds[j] = 0.0f;
                }
                w[0][n / 2][n % 2 * 2 + half] = pack<T>(ds[0], ds[1]);
            }
        by_columns<1, 2>(of_q, w, keys + k0 * PITCH, lane);
    }
    store<1>(dq + b * TIME * DQ_ROW + h * D, DQ_ROW, first, TIME, of_q, SCALE, lane);

    take(keys, values);
    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
#pragma unroll 1
    for (int t0 = CAUSAL ? first / 32 * 32 : 0; t0 < TIME; t0 += 32) {
        float s[1][4][4] = {}, dp[1][4][4] = {};
        by_rows<1, 4, true>(s, own, keys, queries + t0 * PITCH, lane);
        by_rows<1, 4, true>(dp, other, values, dys + t0 * PITCH, lane);
        u32 w[1][2][4], u[1][2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const Pair *columns = pairs + t0 + 8 * n + lane % 4 * 2;
            Pair column[2] = {columns[0], columns[1]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float p[2], ds[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    p[j] = power_of_two(s[0][n][2 * half + j] * SCALE_2 - column[j].lse);
                    int t = t0 + 8 * n + lane % 4 * 2 + j, key = first + 8 * half + lane / 4;
                    if (CAUSAL && key > t) p[j] = 0.0f;
                    ds[j] = p[j] * (dp[0][n][2 * half + j] - column[j].along);
                }
                w[0][n / 2][n % 2 * 2 + half] = pack<T>(p[0], p[1]);
                u[0][n / 2][n % 2 * 2 + half] = pack<T>(ds[0], ds[1]);
            }
        }
        by_columns<1, 2>(of_v, w, dys + t0 * PITCH, lane);
        by_columns<1, 2>(of_k, u, queries + t0 * PITCH, lane);
    }
    store<1>(dk + b * TIME * DK_ROW + h * D, DK_ROW, first, TIME, of_k, SCALE, lane);
    store<1>(dv + b * TIME * DK_ROW + h * D, DK_ROW, first, TIME, of_v, 1.0f, lane);
}
