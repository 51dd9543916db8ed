// Gradients; one block for each (batch, group, part of its heads, segment of PER chunks): head after head, and its chunks from the last to the first with
// the gradient with respect to the state in registers. Heads of a block add to the same f32 dB and dC, [PARTS, batch, time, GROUPS, N].
//
// With P_ij = C_i B_j decay(i, j) and S_ij = dy_i x_j, of positions j <= i: q_j = sum of P_ij dy_i + decay(end, j) ahead B_j, dx = dt q + d dy, where `ahead`
// [P, N] is the gradient with respect to the state after the chunk. The gradient of a decay is made of sums of E_ij = P_ij S_ij dt_j; see back.cu.
#define HELD (SHARED_BY / PARTS)

// A warp's 16 rows of sums, added to those of earlier heads.
__device__ __forceinline__ void add_rows(float *to, const float sum[N_TILES][2][4], bool first, int t0, int m, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = t0 + m + lane / 4 + 8 * half;
        if (t >= TIME) continue;
        float *row = to + (u64)place(t) * (GROUPS * N);
#pragma unroll
        for (int j = 0; j < 4 * N_TILES; j++) {
            int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
            float v = sum[j / 4][j / 2 % 2][2 * half + j % 2];
            if (column < N) row[column] = first ? v : row[column] + v;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
ssd_grad(const T *x, const float *dt, const float *decay, const T *b, const T *c, const float *d, const T *states, const T *dy, const float *starts, T *dx,
         float *ddt, float *ddecay, float *dd, float *db, float *dc) {
    extern __shared__ __align__(16) float shared[];
    T *xs = (T *)shared, *dys = xs + CHUNK * P_PITCH, *bs = dys + CHUNK * P_PITCH, *cs = bs + CHUNK * N_PITCH;
    T *hs = cs + CHUNK * N_PITCH, *gs = hs + 16 * P_TILES * N_PITCH; // the state before the chunk, and the gradient with respect to that after it
    float *numbers = (float *)(gs + 16 * P_TILES * N_PITCH);
    Decays of = {numbers, numbers + CHUNK, numbers + 2 * CHUNK, numbers + 3 * CHUNK};
    float *past = numbers + DECAYS, *by_step = past + CHUNK, *left_behind = by_step + CHUNK, *skipped = left_behind + CHUNK;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * warp;
    float *rows = skipped + CHUNK; // of E, added over j by each warp: [WARPS, CHUNK]
    float *scratch = rows + WARPS * CHUNK + warp * (SCRATCH);
    int segment = blockIdx.x % SEGMENTS, part = blockIdx.x / SEGMENTS % PARTS, group = blockIdx.x / SEGMENTS / PARTS % GROUPS;
    u64 batch = blockIdx.x / SEGMENTS / PARTS / GROUPS;
    const u64 x_step = X_ROW, b_step = B_ROW, c_step = C_ROW, y_step = HEADS * P;
    b += batch * TIME * b_step + group * N, c += batch * TIME * c_step + group * N;
    u64 shared_rows = ((part * (u64)BATCH + batch) * TIME * GROUPS + group) * N;
    db += shared_rows, dc += shared_rows;
    for (int i = threadIdx.x; i < 2 * 16 * P_TILES * N_PITCH; i += THREADS) hs[i] = T{};
    int last = (segment + 1) * PER < CHUNKS ? (segment + 1) * PER : CHUNKS;
#pragma unroll 1
    for (int held = 0; held < HELD; held++) {
        int h = group * SHARED_BY + part * HELD + held;
        u64 scan = batch * HEADS + h, first_row = batch * TIME;
        const float *steps = dt + first_row * HEADS + h, *decays = decay + first_row * HEADS + h;
        const T *values = x + first_row * x_step + h * P, *incoming = dy + first_row * y_step + h * P;
        float skip = d[h];
        State ahead = {};
        if (SEGMENTS > 1) read_start(ahead, starts + (scan * SEGMENTS + segment) * STATE, warp, lane);
#pragma unroll 1
        for (int k = last - 1; k >= segment * PER; k--) {
            int t0 = k * CHUNK;
            __syncthreads();
            load<P, P_PITCH, X_PACKED>(xs, values, x_step, t0);
            load<P, P_PITCH, DY_PACKED>(dys, incoming, y_step, t0);
            load<N, N_PITCH, B_PACKED>(bs, b, b_step, t0);
            load<N, N_PITCH, C_PACKED>(cs, c, c_step, t0);
            copies_commit();
            const T *start = states + (scan * CHUNKS + k) * (u64)(P * N);
            for (int i = threadIdx.x; i < P * N; i += THREADS) hs[i / N * N_PITCH + i % N] = start[i];
            write_state(gs, ahead, warp, lane);
            copies_wait<0>();
            decays_of(of, steps, decays, t0, false);
            float here[2] = {of.sum[m + lane / 4], of.sum[m + lane / 4 + 8]}, own_dt[2] = {of.dt[m + lane / 4], of.dt[m + lane / 4 + 8]};

            {
                // dC_i = sum of S_ij decay(i, j) dt_j B_j + decay(i, start) dy_i h.
                float sum[N_TILES][2][4] = {};
#pragma unroll
                for (int p = 0; p < P_TILES; p++) {
                    Left left = left_rows(dys, P_PITCH, m, 16 * p);
#pragma unroll
                    for (int n = 0; n < N_TILES; n++) by_columns(sum[n], left, hs, N_PITCH, 16 * p, 16 * n, lane);
                }
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int j = 0; j < 8; j++) sum[n][j / 4][j % 4] *= of.from_start[m + row_of(j % 4, lane)];
                // What y has from the state, times dy.
                float along[2] = {};
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        along[j % 4 / 2] += sum[n][j / 4][j % 4] * to_float(cs[(m + row_of(j % 4, lane)) * N_PITCH + 16 * n + j / 4 * 8 + column_of(j % 4, lane)]);
                along[0] = row_sum(along[0]), along[1] = row_sum(along[1]);
                if (lane % 4 == 0) past[m + lane / 4] = along[0], past[m + lane / 4 + 8] = along[1];
#pragma unroll 1
                for (int t = 0; t <= m; t += 16) {
                    float score[2][4] = {};
#pragma unroll
                    for (int p = 0; p < P_TILES; p++) by_rows(score, left_rows(dys, P_PITCH, m, 16 * p), xs, P_PITCH, t, 16 * p, lane);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        int from = t + j / 4 * 8 + column_of(j % 4, lane);
                        float &s = score[j / 4][j % 4];
                        s = t < m || from <= m + row_of(j % 4, lane) ? s * two_to(here[j % 4 / 2] - of.sum[from]) * of.dt[from] : 0.0f;
                    }
                    Left left = left_sums(score, scratch, lane);
#pragma unroll
                    for (int n = 0; n < N_TILES; n++) by_columns(sum[n], left, bs, N_PITCH, t, 16 * n, lane);
                }
                add_rows(dc, sum, held == 0, t0, m, lane);
            }

            // q_j, and dB_j = sum of S_ij decay(i, j) dt_j C_i + decay(end, j) dt_j x_j ahead.
            float q[P_TILES][2][4] = {}, sum[N_TILES][2][4] = {};
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                Left left = left_rows(bs, N_PITCH, m, 16 * n);
#pragma unroll
                for (int p = 0; p < P_TILES; p++) by_rows(q[p], left, gs, N_PITCH, 16 * p, 16 * n, lane);
            }
#pragma unroll
            for (int p = 0; p < P_TILES; p++) {
                Left left = left_rows(xs, P_PITCH, m, 16 * p);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) by_columns(sum[n], left, gs, N_PITCH, 16 * p, 16 * n, lane);
            }
            float end[2] = {of.to_end[m + lane / 4], of.to_end[m + lane / 4 + 8]}, leaves[2] = {}, all[2] = {}, skips[2] = {}, column_sum[2] = {};
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[n][j / 4][j % 4] *= end[j % 4 / 2] * own_dt[j % 4 / 2];
#pragma unroll
            for (int p = 0; p < P_TILES; p++)
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    q[p][j / 4][j % 4] *= end[j % 4 / 2];
                    leaves[j % 4 / 2] += q[p][j / 4][j % 4] * to_float(xs[(m + row_of(j % 4, lane)) * P_PITCH + 16 * p + j / 4 * 8 + column_of(j % 4, lane)]);
                }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float left = own_dt[half] * row_sum(leaves[half]);
                if (lane % 4 == 0) left_behind[m + lane / 4 + 8 * half] = left;
            }
#pragma unroll 1
            for (int t = m; t < CHUNK; t += 16) {
                float score[2][4] = {}, both[2][4] = {}, grown[2][2] = {};
                bool diagonal = t == m && lane / 8 == lane % 4, odd = diagonal && (lane & 4), even = diagonal && !(lane & 4);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) by_rows(score, left_rows(bs, N_PITCH, m, 16 * n), cs, N_PITCH, t, 16 * n, lane);
#pragma unroll
                for (int p = 0; p < P_TILES; p++) by_rows(both, left_rows(xs, P_PITCH, m, 16 * p), dys, P_PITCH, t, 16 * p, lane);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    int to = t + j / 4 * 8 + column_of(j % 4, lane);
                    float f = t > m || to >= m + row_of(j % 4, lane) ? two_to(of.sum[to] - here[j % 4 / 2]) : 0.0f;
                    both[j / 4][j % 4] *= f * own_dt[j % 4 / 2];
                    // E, without its diagonal.
                    float own = j / 4 == j % 4 / 2 && (j % 2 ? odd : even) ? 0.0f : score[j / 4][j % 4];
                    column_sum[j % 4 / 2] += own * both[j / 4][j % 4], grown[j / 4][j % 2] += own * both[j / 4][j % 4];
                    score[j / 4][j % 4] *= f;
                }
                write_columns(rows + warp * CHUNK + t, grown, lane);
                Left left = left_sums(score, scratch, lane);
#pragma unroll
                for (int p = 0; p < P_TILES; p++) by_columns(q[p], left, dys, P_PITCH, t, 16 * p, lane);
                left = left_sums(both, scratch, lane);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) by_columns(sum[n], left, cs, N_PITCH, t, 16 * n, lane);
            }
            add_rows(db, sum, held == 0, t0, m, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = m + lane / 4 + 8 * half;
                T *to = dx + (first_row + (u64)(t0 + row < TIME ? place(t0 + row) : 0)) * y_step + h * P;
#pragma unroll
                for (int j = 0; j < 4 * P_TILES; j++) {
                    int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
                    float value = to_float(xs[row * P_PITCH + column]), g = to_float(dys[row * P_PITCH + column]), own = q[j / 4][j / 2 % 2][2 * half + j % 2];
                    all[half] += own * value, skips[half] += g * value;
                    q[j / 4][j / 2 % 2][2 * half + j % 2] = own_dt[half] * own + skip * g;
                }
                if (t0 + row < TIME)
#pragma unroll
                    for (int p = 0; p < 2 * P_TILES; p++) {
                        int column = 8 * p + lane % 4 * 2;
                        const float *own = q[p / 2][p % 2] + 2 * half;
                        if (P % 2 == 0 && column < P) from_floats(own[0], own[1], to + column);
                        if (P % 2 != 0 && column < P) from_float(own[0], to[column]);
                        if (P % 2 != 0 && column + 1 < P) from_float(own[1], to[column + 1]);
                    }
                all[half] = row_sum(all[half]), skips[half] = row_sum(skips[half]), column_sum[half] = row_sum(column_sum[half]);
                if (lane % 4 == 0) past[row] -= column_sum[half], by_step[row] = all[half], skipped[row] = skips[half];
            }
            float keep = of.from_start[CHUNK - 1], product = 0.0f;
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                int unit = warp * OWN + n;
                if (!EVEN && unit >= UNITS) continue;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    product += ahead[n][j / 4][j % 4] *
                               to_float(hs[(unit / N_TILES * 16 + row_of(j % 4, lane)) * N_PITCH + unit % N_TILES * 16 + j / 4 * 8 + column_of(j % 4, lane)]);
            }
            product = block_sum(product); // and a barrier: the numbers of all rows are there
            if (warp == 0) {
                float earlier = 0.0f, later = keep * product, sum_dd = 0.0f;
                // What positions before this one leave behind.
                for (int i0 = 0; i0 < CHUNK; i0 += 32) {
                    int i = i0 + lane;
                    float v = i < CHUNK ? left_behind[i] : 0.0f;
#pragma unroll
                    for (int by = 1; by < 32; by *= 2) {
                        float other = __shfl_up_sync(0xffffffffu, v, by);
                        if (lane >= by) v += other;
                    }
                    float before = __shfl_up_sync(0xffffffffu, v, 1);
                    if (i < CHUNK) left_behind[i] = earlier + (lane > 0 ? before : 0.0f), sum_dd += skipped[i];
                    earlier += __shfl_sync(0xffffffffu, v, 31);
                }
                // Rows, columns and what came from the state: from this position to the last.
                for (int i0 = (CHUNK - 1) / 32 * 32; i0 >= 0; i0 -= 32) {
                    int i = i0 + lane;
                    float v = i < CHUNK ? past[i] : 0.0f;
                    for (int w = 0; i < CHUNK && w <= i / 16; w++) v += rows[w * CHUNK + i];
#pragma unroll
                    for (int by = 1; by < 32; by *= 2) {
                        float other = __shfl_down_sync(0xffffffffu, v, by);
                        if (lane + by < 32) v += other;
                    }
                    v += later;
                    if (i < CHUNK && t0 + i < TIME) {
                        u64 at = (first_row + (u64)place(t0 + i)) * HEADS + h;
                        ddt[at] = by_step[i], ddecay[at] = v + left_behind[i];
                    }
                    later = __shfl_sync(0xffffffffu, v, 0);
                }
                sum_dd = warp_sum(sum_dd);
                if (lane == 0) dd[(batch * CHUNKS + k) * HEADS + h] = sum_dd;
            }
            if (k > segment * PER) advance(ahead, keep, dys, cs, of.from_start, warp, lane);
        }
    }
}

// The sums of all parts, rounded.
extern "C" __global__ void ssd_sum(const float *db, const float *dc, T *to_b, T *to_c) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)COUNT) return;
    float b = 0.0f, c = 0.0f;
    for (int part = 0; part < PARTS; part++) b += db[part * (u64)COUNT + i], c += dc[part * (u64)COUNT + i];
    from_float(b, to_b[i]), from_float(c, to_c[i]);
}
