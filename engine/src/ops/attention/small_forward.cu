// PARTS blocks for each (batch, query head), each with all keys and values in shared memory. A warp processes 16 M_Q queries at a time and walks over
// the keys, 32 at a time, independently of other warps.
// SCALE_2 = |scale| log2(e): exp(scale s) = 2^(SCALE_2 s), s with the sign of scale.
#define BM (16 * M_Q)
#define QUERY_TILES ((TIME + BM - 1) / BM)
#define KEY_ROWS ((KEYS + 31) / 32 * 32)

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_forward(const T *q, const T *k, const T *v, T *y, float *lse) {
    extern __shared__ __align__(16) float shared[];
    T *keys = (T *)shared, *values = keys + KEY_ROWS * D;
    int lane = threadIdx.x % 32;
    u64 bh = blockIdx.x / PARTS, b = bh / HEADS, h = bh % HEADS;
    const u64 q_step = Q_ROW, k_step = K_ROW, v_step = V_ROW;
    q += b * TIME * q_step + h * D, k += b * KEYS * k_step + h / GROUP * D, v += b * KEYS * v_step + h / GROUP * D;
    y += (b * TIME * HEADS + h) * D;

#pragma unroll 4
    for (int i = threadIdx.x; i < KEY_ROWS * (D / 8); i += 32 * WARPS) {
        int row = i / (D / 8), chunk = i % (D / 8);
        int from = row < KEYS ? row : 0;
        copy16(keys + place(row, chunk), k + from * k_step + chunk * 8, row < KEYS);
        copy16(values + place(row, chunk), v + from * v_step + chunk * 8, row < KEYS);
    }
    copies_commit();
    copies_wait<0>();
    __syncthreads();

    // Keys are rows of operand b in the scores, and columns of b in the result.
    int by_row[STEPS], by_column[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        by_row[i] = place(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2);
        by_column[i] = place(lane % 16, 2 * i + lane / 16);
        kept(by_row[i]), kept(by_column[i]);
    }
    // Causal: the last queries see the most keys, so a warp with much work in one round gets little in the next.
    const int walkers = WARPS * PARTS, walker = threadIdx.x / 32 * PARTS + blockIdx.x % PARTS;
    for (int round = 0; round * walkers < QUERY_TILES; round++) {
        int t0 = (round * walkers + (round % 2 ? walkers - 1 - walker : walker)) * BM;
        if (t0 >= TIME) continue;
        u32 a[M_Q][STEPS][4];
#pragma unroll
        for (int m = 0; m < M_Q; m++)
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                fetch_a(a[m][i], q, q_step, t0 + 16 * m, TIME, i, lane);
#pragma unroll
                for (int j = 0; j < 4; j++) a[m][i][j] ^= NEGATIVE ? 0x80008000u : 0u;
            }
        // `base` is the exponent that a row's sums are relative to; it is raised only when the maximum exceeds it by 8.
        float out[M_Q][D / 8][4] = {}, base[M_Q][2], total[M_Q][2] = {};
#pragma unroll
        for (int m = 0; m < M_Q; m++) base[m][0] = base[m][1] = -infinity();
        int last = CAUSAL && t0 + BM + OFFSET < KEYS ? t0 + BM + OFFSET : KEYS;
        const T *k_row = keys, *v_row = values;
#pragma unroll 1
        for (int k0 = 0; k0 < last; k0 += 32, k_row += 32 * D, v_row += 32 * D) {
            float s[M_Q][4][4] = {};
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 r[4];
                    matrices(r, k_row + 8 * n * D + by_row[i]);
#pragma unroll
                    for (int m = 0; m < M_Q; m++) mma<T>(s[m][n], a[m][i], r[0], r[1]), mma<T>(s[m][n + 1], a[m][i], r[2], r[3]);
                }
            if (k0 + 32 > KEYS || (CAUSAL && k0 + 31 > t0 + OFFSET)) {
#pragma unroll
                for (int m = 0; m < M_Q; m++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            int key = k0 + 8 * n + lane % 4 * 2 + j % 2, t = t0 + 16 * m + j / 2 * 8 + lane / 4;
                            if (key >= KEYS || (CAUSAL && key > t + OFFSET)) s[m][n][j] = -infinity();
                        }
            }
            float high[M_Q][2];
            bool risen = false;
#pragma unroll
            for (int m = 0; m < M_Q; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x = s[m][0][2 * half];
#pragma unroll
                    for (int n = 0; n < 4; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    high[m][half] = x * SCALE_2;
                    risen |= high[m][half] - base[m][half] > 8.0f; // up to 2^8 the sums lose no precision
                }
            // Every row sees key 0, so from here on a base is a score.
            if (__any_sync(0xffffffffu, risen)) {
#pragma unroll
                for (int m = 0; m < M_Q; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float x = fmaxf(high[m][half], __shfl_xor_sync(0xffffffffu, high[m][half], 1)); // four threads a row
                        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                        x = fmaxf(x, base[m][half]);
                        float shrink = power_of_two(base[m][half] - x);
                        base[m][half] = x;
                        total[m][half] *= shrink;
#pragma unroll
                        for (int n = 0; n < D / 8; n++) out[m][n][2 * half] *= shrink, out[m][n][2 * half + 1] *= shrink;
                    }
            }
            u32 w[M_Q][2][4];
#pragma unroll
            for (int m = 0; m < M_Q; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float p0 = power_of_two(s[m][n][2 * half] * SCALE_2 - base[m][half]);
                        float p1 = power_of_two(s[m][n][2 * half + 1] * SCALE_2 - base[m][half]);
                        total[m][half] += p0 + p1; // of this thread's columns
                        w[m][n / 2][n % 2 * 2 + half] = pack<T>(p0, p1);
                    }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < STEPS; i++) {
                    u32 r[4];
                    matrices_t(r, v_row + 16 * n * D + by_column[i]);
#pragma unroll
                    for (int m = 0; m < M_Q; m++) mma<T>(out[m][2 * i], w[m][n], r[0], r[1]), mma<T>(out[m][2 * i + 1], w[m][n], r[2], r[3]);
                }
        }
#pragma unroll
        for (int m = 0; m < M_Q; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = total[m][half];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                float inverse = 1.0f / sum;
#pragma unroll
                for (int n = 0; n < D / 8; n++) out[m][n][2 * half] *= inverse, out[m][n][2 * half + 1] *= inverse;
                int t = t0 + 16 * m + 8 * half + lane / 4;
                const float ln_2 = 0.693147181f;
                if (lane % 4 == 0 && t < TIME) lse[bh * TIME + t] = base[m][half] * ln_2 + logf(sum);
            }
        store<M_Q>(y, (u64)HEADS * D, t0, TIME, out, 1.0f, lane);
    }
}
