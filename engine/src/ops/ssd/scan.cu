// y, and with KEEP the state before every chunk; one block for each (batch, head, segment of PER chunks), the state in registers.
extern "C" __global__ void __launch_bounds__(THREADS)
ssd_scan(const T *x, const float *dt, const float *decay, const T *b, const T *c, const float *d, const float *starts, T *y, T *states) {
    extern __shared__ __align__(16) float shared[];
    T *xs = (T *)shared, *bs = xs + CHUNK * P_PITCH, *cs = bs + CHUNK * N_PITCH, *hs = cs + CHUNK * N_PITCH;
    float *numbers = (float *)(hs + 16 * P_TILES * N_PITCH);
    Decays of = {numbers, numbers + CHUNK, numbers + 2 * CHUNK, numbers + 3 * CHUNK};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * warp;
    float *scratch = numbers + DECAYS + warp * (SCRATCH);
    int segment = blockIdx.x % SEGMENTS, h = blockIdx.x / SEGMENTS % HEADS;
    u64 batch = blockIdx.x / SEGMENTS / HEADS, scan = batch * HEADS + h;
    const u64 x_step = X_ROW, b_step = B_ROW, c_step = C_ROW;
    x += batch * TIME * x_step + h * P, b += batch * TIME * b_step + h / SHARED_BY * N, c += batch * TIME * c_step + h / SHARED_BY * N;
    y += (batch * TIME * HEADS + h) * P, dt += batch * TIME * HEADS + h, decay += batch * TIME * HEADS + h, states += scan * CHUNKS * (u64)(P * N);
    State state = {};
    if (SEGMENTS > 1) read_start(state, starts + (scan * SEGMENTS + segment) * STATE, warp, lane);
    int last = (segment + 1) * PER < CHUNKS ? (segment + 1) * PER : CHUNKS;
    for (int k = segment * PER; k < last; k++) {
        int t0 = k * CHUNK;
        load<P, P_PITCH, X_PACKED>(xs, x, x_step, t0);
        load<N, N_PITCH, B_PACKED>(bs, b, b_step, t0);
        load<N, N_PITCH, C_PACKED>(cs, c, c_step, t0);
        copies_commit();
        write_state(hs, state, warp, lane);
        copies_wait<0>();
        decays_of(of, dt, decay, t0, true);
        for (int i = threadIdx.x; KEEP && i < P * N; i += THREADS) states[k * (u64)(P * N) + i] = hs[i / N * N_PITCH + i % N];

        float sum[P_TILES][2][4] = {};
        Left reads[N_TILES];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) reads[n] = left_rows(cs, N_PITCH, m, 16 * n);
        // From before the chunk: C h.
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int p = 0; p < P_TILES; p++) by_rows(sum[p], reads[n], hs, N_PITCH, 16 * p, 16 * n, lane);
        float here[2] = {of.sum[m + lane / 4], of.sum[m + lane / 4 + 8]};
#pragma unroll
        for (int p = 0; p < P_TILES; p++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum[p][j / 4][j % 4] *= of.from_start[m + row_of(j % 4, lane)];
        // From inside it: (C B^T, decayed) x.
#pragma unroll 1
        for (int t = 0; t <= m; t += 16) {
            float score[2][4] = {};
#pragma unroll
            for (int n = 0; n < N_TILES; n++) by_rows(score, reads[n], bs, N_PITCH, t, 16 * n, lane);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int from = t + j / 4 * 8 + column_of(j % 4, lane);
                float &s = score[j / 4][j % 4];
                s = t < m || from <= m + row_of(j % 4, lane) ? s * two_to(here[j % 4 / 2] - of.sum[from]) * of.dt[from] : 0.0f;
            }
            Left left = left_sums(score, scratch, lane);
#pragma unroll
            for (int p = 0; p < P_TILES; p++) by_columns(sum[p], left, xs, P_PITCH, t, 16 * p, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = m + lane / 4 + 8 * half;
            if (t0 + row >= TIME) continue;
            T *to = y + (u64)place(t0 + row) * (HEADS * P);
#pragma unroll
            for (int p = 0; p < 2 * P_TILES; p++) {
                int column = 8 * p + lane % 4 * 2;
                const T *value = xs + row * P_PITCH + column;
                float low = sum[p / 2][p % 2][2 * half] + d[h] * to_float(value[0]), high = sum[p / 2][p % 2][2 * half + 1] + d[h] * to_float(value[1]);
                if (P % 2 == 0 && column < P) from_floats(low, high, to + column);
                if (P % 2 != 0 && column < P) from_float(low, to[column]);
                if (P % 2 != 0 && column + 1 < P) from_float(high, to[column + 1]);
            }
        }
        if (k + 1 < last) advance(state, of.from_start[CHUNK - 1], xs, bs, of.to_end, warp, lane);
        __syncthreads();
    }
}
