// Gradients, from the state before every chunk and the gradient with respect to the state after it, `aheads`; one block for each (batch, chunk, group, part of
// its heads), head after head.
//
// With P_ij = C_i B_j decay(i, j) and S_ij = dy_i x_j, of positions j <= i: q_j = sum of P_ij dy_i + decay(end, j) ahead B_j, dx = dt q + d dy. dC and dB are sums over
// heads: of products with states, and of S_ij decay(i, j) dt_j, a matrix [CHUNK, CHUNK] that is multiplied by B and C once for all heads.
//
// A decay at t is a factor of whatever passes it: of E_ij = P_ij S_ij dt_j for j < t <= i, of what y_i has from the state before the chunk for t <= i, of what j < t adds
// to the state after it, and of what is left of the former in the latter. Sums of E over j < t <= i are those of its rows minus its columns from t on. Both are taken
// from the same f32 numbers, without the diagonal, as most of them cancels; C dC and dt x q are the same sums, but are rounded each in its own way.
#define TILES (CHUNK / 16)
#define PAIRS (TILES * (TILES + 1) / 2) // 16 x 16 tiles of positions j <= i
#define HALF (N / 2)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ssd_back(const T *x, const T *b, const T *c, const float *d, const float *numbers, const T *states, const T *aheads, const T *dy, T *dx, float *ddt, float *ddecay,
         float *dd, SUM *db, SUM *dc) {
    extern __shared__ __align__(16) float shared[];
    T *bs = (T *)shared, *cs = bs + CHUNK * N, *xs = cs + CHUNK * N, *dys = xs + 2 * CHUNK * P, *hs = dys + 2 * CHUNK * P, *gs = hs + P * N;
    float *inside = (float *)(gs + P * N);         // sums over heads of S decay dt, as threads hold them: [PAIRS, 2, 32, 4]
    u32 *scores = (u32 *)(inside + PAIRS * 256);   // B C^T as left operands: [PAIRS, 32, 4]
    float *kept = (float *)(scores + PAIRS * 128), *rows = kept + 2 * NUMBERS; // rows: of E, added over j by each warp: [TILES, CHUNK]
    float *along = rows + TILES * CHUNK, *by_step = along + 4 * CHUNK, *columns = by_step + CHUNK, *left_behind = columns + CHUNK, *skipped = left_behind + CHUNK;
    float *between = skipped + CHUNK;              // [2][9]: the product of the two states, by warp; what is left of a state after the chunk
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The first 16 positions meet all 16s, the last ones only themselves: warps 0 and 4, 1 and 5, .. which run on the same quarter of a multiprocessor have 9 together.
    int own = warp < TILES / 2 ? warp : TILES + TILES / 2 - 1 - warp, m = 16 * own, first_pair = own * TILES - own * (own - 1) / 2;
    int m2 = warp / 2 * 32, column = warp % 2 * HALF; // dB and dC: 32 positions and half of N
    int part = blockIdx.x % PARTS, group = blockIdx.x / PARTS % GROUPS, chunk = blockIdx.x / PARTS / GROUPS % CHUNKS, t0 = chunk * CHUNK;
    u64 batch = blockIdx.x / PARTS / GROUPS / CHUNKS, y_step = HEADS * P;
    int first = group * SHARED_BY + part * HELD;
    x += batch * TIME * (u64)X_ROW, dy += batch * TIME * y_step, dx += batch * TIME * y_step;

    fetch_rows<N, B_PACKED>(bs, b + batch * TIME * (u64)B_ROW + group * N, B_ROW, t0);
    fetch_rows<N, C_PACKED>(cs, c + batch * TIME * (u64)C_ROW + group * N, C_ROW, t0);
    copies_commit();
    auto fetch = [&](int held) {
        int h = first + held;
        fetch_rows<P, X_PACKED>(xs + held % 2 * (CHUNK * P), x + h * P, X_ROW, t0);
        fetch_rows<P, DY_PACKED>(dys + held % 2 * (CHUNK * P), dy + h * P, y_step, t0);
        fetch_numbers<NUMBERS>(kept + held % 2 * NUMBERS, numbers + ((batch * CHUNKS + chunk) * HEADS + h) * NUMBERS);
        copies_commit();
    };
    auto fetch_states = [&](int held) {
        u64 from = ((batch * HEADS + first + held) * CHUNKS + chunk) * (u64)(P * N);
        fetch_state(hs, states + from), fetch_state(gs, aheads + from);
        copies_commit();
    };
    fetch(0), fetch_states(0);
    copies_wait<2>();
    __syncthreads();
#pragma unroll 1
    for (int t = own; t < TILES; t++) {
        float sum[2][4] = {};
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            u32 a[4], v[4];
            left_rows<N>(a, bs, m, 16 * n), rows_of<N>(v, cs, 16 * t, 16 * n);
            product(sum, a, v);
        }
        int pair = first_pair + t - own;
        u32 both[4];
#pragma unroll
        for (int j = 0; j < 4; j++) both[j] = pack<T>(sum[j / 2][j % 2 * 2], sum[j / 2][j % 2 * 2 + 1]);
        *(uint4 *)(scores + (pair * 32 + lane) * 4) = make_uint4(both[0], both[1], both[2], both[3]);
        for (int n = 0; n < 2; n++) *(float4 *)(inside + ((pair * 2 + n) * 32 + lane) * 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float sum_b[2][HALF / 8][4] = {}, sum_c[2][HALF / 8][4] = {}, before[2][2] = {};

#pragma unroll 1
    for (int held = 0; held <= HELD; held++) {
        copies_wait<0>();
        __syncthreads();
        int odd = held % 2;
        if (held > 0 && warp == TILES / 2) { // the numbers of the last head's positions
            int h = first + held - 1;
            const float *inter = along + (1 - odd) * 2 * CHUNK, *gone = between + (1 - odd) * 9;
            float v[4], left[4], leaves = 0.0f, skips = 0.0f, product = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int i = 4 * lane + j;
                v[j] = -columns[i];
                for (int t = 0; t <= lane / 4; t++) v[j] += rows[t * CHUNK + i];
                v[j] += inter[i] + inter[CHUNK + i];
                left[j] = leaves, leaves += left_behind[i], skips += skipped[i];
            }
            for (int j = 0; j < 8; j++) product += gone[j];
            // Rows, columns and what came from the state: from the position to the last. What is left behind: of the positions before.
            v[2] += v[3], v[1] += v[2], v[0] += v[1];
            float all = v[0];
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                float after = __shfl_down_sync(0xffffffffu, all, by), before = __shfl_up_sync(0xffffffffu, leaves, by);
                if (lane + by < 32) all += after;
                if (lane >= by) leaves += before;
            }
            float after = __shfl_down_sync(0xffffffffu, all, 1), before = __shfl_up_sync(0xffffffffu, leaves, 1);
            float others = (lane < 31 ? after : 0.0f) + (lane > 0 ? before : 0.0f) + gone[8] * product;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int t = t0 + 4 * lane + j;
                if (t >= TIME) continue;
                u64 to = (batch * TIME + place(t)) * HEADS + h;
                ddt[to] = by_step[4 * lane + j], ddecay[to] = v[j] + left[j] + others;
            }
            skips = warp_sum(skips);
            if (lane == 0) dd[(batch * CHUNKS + chunk) * HEADS + h] = skips;
        }
        if (held == HELD) break;
        if (held + 1 < HELD) fetch(held + 1);
        const T *values = xs + odd * (CHUNK * P), *incoming = dys + odd * (CHUNK * P);
        const float *dt = kept + odd * NUMBERS, *sums = dt + CHUNK, *to_end = sums + CHUNK, *from_start = to_end + CHUNK;
        int h = first + held;

        // dC += decay(i, start) dy_i h.
        float by[2][2];
#pragma unroll
        for (int r = 0; r < 4; r++) by[r / 2][r % 2] = from_start[m2 + 8 * r + lane / 4];
#pragma unroll
        for (int p = 0; p < P / 16; p++) {
            u32 a[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                left_rows<P>(a[r], incoming, m2 + 16 * r, 16 * p);
#pragma unroll
                for (int j = 0; j < 4; j++) a[r][j] = times(a[r][j], by[r][j % 2], by[r][j % 2]);
            }
#pragma unroll
            for (int n = 0; n < HALF / 16; n++) {
                u32 v[4];
                columns_of<N>(v, hs, 16 * p, column + 16 * n);
                product(sum_c[0] + 2 * n, a[0], v), product(sum_c[1] + 2 * n, a[1], v);
            }
        }
        // What y has from the state, times dy: C dC, of all heads up to this one; what it grew by is this head's.
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int row = m2 + 8 * r + lane / 4;
            float dot = 0.0f;
#pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                u32 both = pair_at<N>(cs, row, column + 8 * n + lane % 4 * 2);
                dot += sum_c[r / 2][n][r % 2 * 2] * low_of(both) + sum_c[r / 2][n][r % 2 * 2 + 1] * high_of(both);
            }
            dot = row_sum(dot);
            if (lane % 4 == 0) along[(odd * 2 + warp % 2) * CHUNK + row] = dot - before[r / 2][r % 2];
            before[r / 2][r % 2] = dot;
        }
        float both_states = 0.0f;
#pragma unroll
        for (int i = threadIdx.x; i < P * N / 8; i += THREADS) {
            uint4 one = *(const uint4 *)(hs + 8 * i), other = *(const uint4 *)(gs + 8 * i);
            both_states += low_of(one.x) * low_of(other.x) + high_of(one.x) * high_of(other.x) + low_of(one.y) * low_of(other.y) + high_of(one.y) * high_of(other.y);
            both_states += low_of(one.z) * low_of(other.z) + high_of(one.z) * high_of(other.z) + low_of(one.w) * low_of(other.w) + high_of(one.w) * high_of(other.w);
        }
        both_states = warp_sum(both_states);
        if (lane == 0) between[odd * 9 + warp] = both_states;
        if (threadIdx.x == 0) between[odd * 9 + 8] = from_start[CHUNK - 1];

        // dB += decay(end, j) dt_j x_j ahead.
#pragma unroll
        for (int r = 0; r < 4; r++) by[r / 2][r % 2] = to_end[m2 + 8 * r + lane / 4];
#pragma unroll
        for (int p = 0; p < P / 16; p++) {
            u32 a[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                left_rows<P>(a[r], values, m2 + 16 * r, 16 * p);
#pragma unroll
                for (int j = 0; j < 4; j++) a[r][j] = times(a[r][j], by[r][j % 2], by[r][j % 2]);
            }
#pragma unroll
            for (int n = 0; n < HALF / 16; n++) {
                u32 v[4];
                columns_of<N>(v, gs, 16 * p, column + 16 * n);
                product(sum_b[0] + 2 * n, a[0], v), product(sum_b[1] + 2 * n, a[1], v);
            }
        }
        // q. Decays from j to i are products: from j to the last of the warp's own 16, and on to i. The first factor comes last.
        float q[P / 8][4] = {};
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            u32 a[4];
            left_rows<N>(a, bs, m, 16 * n);
#pragma unroll
            for (int p = 0; p < P / 16; p++) {
                u32 v[4];
                rows_of<N>(v, gs, 16 * p, 16 * n);
                product(q + 2 * p, a, v);
            }
        }
        __syncthreads();
        if (held + 1 < HELD) fetch_states(held + 1);
        float here[2] = {sums[m + lane / 4], sums[m + lane / 4 + 8]}, own_dt[2] = {dt[m + lane / 4], dt[m + lane / 4 + 8]};
        float after = sums[m + 15], end = power_of_two(sums[CHUNK - 1] - after), to_after[2] = {power_of_two(after - here[0]), power_of_two(after - here[1])};
        float leaves[2] = {}, column_sum[2] = {};
#pragma unroll
        for (int p = 0; p < P / 8; p++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 value = pair_at<P>(values, m + lane / 4 + 8 * half, 8 * p + lane % 4 * 2);
                q[p][2 * half] *= end, q[p][2 * half + 1] *= end;
                leaves[half] += q[p][2 * half] * low_of(value) + q[p][2 * half + 1] * high_of(value);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float left = row_sum(leaves[half]) * to_after[half] * own_dt[half];
            if (lane % 4 == 0) left_behind[m + lane / 4 + 8 * half] = left;
        }
        u32 rows_x[P / 16][4];
#pragma unroll
        for (int p = 0; p < P / 16; p++) left_rows<P>(rows_x[p], values, m, 16 * p);
        // Later positions 16 at a time, the own ones last.
#pragma unroll 1
        for (int u = own + 1; u <= TILES; u++) {
            bool mine = u == TILES;
            int t = mine ? own : u, pair = first_pair + t - own;
            float s[2][4] = {}, grown[2][2];
#pragma unroll
            for (int p = 0; p < P / 16; p++) {
                u32 v[4];
                rows_of<P>(v, incoming, 16 * t, 16 * p);
                product(s, rows_x[p], v);
            }
            uint4 four = *(const uint4 *)(scores + (pair * 32 + lane) * 4);
            u32 score[4] = {four.x, four.y, four.z, four.w}, a[4];
            if (mine)
#pragma unroll
                for (int i = 0; i < P / 2; i++) q[i / 4][i % 4] *= to_after[i % 4 / 2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int i = 16 * t + 8 * n + lane % 4 * 2;
                float2 there = *(const float2 *)(sums + i);
                float4 *total = (float4 *)(inside + ((pair * 2 + n) * 32 + lane) * 4), old = *total;
                float factor[4], scale[2] = {own_dt[0], own_dt[1]};
                if (mine) {
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        factor[j] = i + j % 2 >= m + lane / 4 + j / 2 * 8 ? power_of_two((j % 2 ? there.y : there.x) - here[j / 2]) : 0.0f;
                } else {
                    factor[0] = factor[2] = power_of_two(there.x - after), factor[1] = factor[3] = power_of_two(there.y - after);
                    scale[0] *= to_after[0], scale[1] *= to_after[1];
                }
#pragma unroll
                for (int half = 0; half < 2; half++) a[2 * n + half] = times(score[2 * n + half], factor[2 * half], factor[2 * half + 1]);
#pragma unroll
                for (int j = 0; j < 4; j++) s[n][j] *= factor[j] * scale[j / 2];
                *total = make_float4(old.x + s[n][0], old.y + s[n][1], old.z + s[n][2], old.w + s[n][3]);
                // Without the diagonal: half of a pair, of threads that have it.
                if (mine && lane / 8 == lane % 4) score[3 * n] &= lane & 4 ? 0x0000ffffu : 0xffff0000u;
                grown[n][0] = s[n][0] * low_of(score[2 * n]) + s[n][2] * low_of(score[2 * n + 1]);
                grown[n][1] = s[n][1] * high_of(score[2 * n]) + s[n][3] * high_of(score[2 * n + 1]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    column_sum[half] += s[n][2 * half] * low_of(score[2 * n + half]);
                    column_sum[half] += s[n][2 * half + 1] * high_of(score[2 * n + half]);
                }
            }
#pragma unroll
            for (int p = 0; p < P / 16; p++) {
                u32 v[4];
                columns_of<P>(v, incoming, 16 * t, 16 * p);
                product(q + 2 * p, a, v);
            }
            write_columns(rows + own * CHUNK + 16 * t, grown, lane);
        }
        float skip = d[h];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = m + lane / 4 + 8 * half, t = t0 + row;
            float all = 0.0f, skips = 0.0f;
#pragma unroll
            for (int p = 0; p < P / 8; p++) {
                u32 value = pair_at<P>(values, row, 8 * p + lane % 4 * 2), g = pair_at<P>(incoming, row, 8 * p + lane % 4 * 2);
                float &low = q[p][2 * half], &high = q[p][2 * half + 1];
                all += low * low_of(value) + high * high_of(value), skips += low_of(g) * low_of(value) + high_of(g) * high_of(value);
                low = own_dt[half] * low + skip * low_of(g), high = own_dt[half] * high + skip * high_of(g);
            }
            T *to = dx + (u64)(t < TIME ? place(t) : 0) * y_step + h * P;
#pragma unroll
            for (int p = 0; p < P / 32; p++) write_32(to + 32 * p, q + 4 * p, half, t < TIME);
            all = row_sum(all), skips = row_sum(skips);
            float own_column = row_sum(column_sum[half]);
            if (lane % 4 == 0) by_step[row] = all, columns[row] = own_column, skipped[row] = skips;
        }
    }

    // What heads added up to inside the chunk, [j][i], times C and B.
    T *matrix = xs;
#pragma unroll 1
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (t >= own) v = *(const float4 *)(inside + (((first_pair + t - own) * 2 + n) * 32 + lane) * 4);
            *(u32 *)(matrix + at<CHUNK>(m + lane / 4, 2 * t + n) + lane % 4 * 2) = pack<T>(v.x, v.y);
            *(u32 *)(matrix + at<CHUNK>(m + lane / 4 + 8, 2 * t + n) + lane % 4 * 2) = pack<T>(v.z, v.w);
        }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < TILES; t++) {
        u32 a[2][4];
        if (t >= m2 / 16) {
            left_rows<CHUNK>(a[0], matrix, m2, 16 * t), left_rows<CHUNK>(a[1], matrix, m2 + 16, 16 * t);
#pragma unroll
            for (int n = 0; n < HALF / 16; n++) {
                u32 v[4];
                columns_of<N>(v, cs, 16 * t, column + 16 * n);
                product(sum_b[0] + 2 * n, a[0], v), product(sum_b[1] + 2 * n, a[1], v);
            }
        }
        if (t <= m2 / 16 + 1) {
            left_columns<CHUNK>(a[0], matrix, 16 * t, m2), left_columns<CHUNK>(a[1], matrix, 16 * t, m2 + 16);
#pragma unroll
            for (int n = 0; n < HALF / 16; n++) {
                u32 v[4];
                columns_of<N>(v, bs, 16 * t, column + 16 * n);
                product(sum_c[0] + 2 * n, a[0], v), product(sum_c[1] + 2 * n, a[1], v);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int t = t0 + m2 + 8 * r + lane / 4;
        u64 to = ((part * (u64)BATCH + batch) * TIME + (t < TIME ? place(t) : 0)) * (GROUPS * N) + group * N + column;
#if PARTS == 1
#pragma unroll
        for (int n = 0; n < HALF / 32; n++) {
            write_32(db + to + 32 * n, sum_b[r / 2] + 4 * n, r % 2, t < TIME);
            write_32(dc + to + 32 * n, sum_c[r / 2] + 4 * n, r % 2, t < TIME);
        }
#else
        if (t >= TIME) continue;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) {
            int k = 8 * n + lane % 4 * 2;
            *(float2 *)(db + to + k) = make_float2(sum_b[r / 2][n][r % 2 * 2], sum_b[r / 2][n][r % 2 * 2 + 1]);
            *(float2 *)(dc + to + k) = make_float2(sum_c[r / 2][n][r % 2 * 2], sum_c[r / 2][n][r % 2 * 2 + 1]);
        }
#endif
    }
}

#if PARTS > 1
// The sums of all parts, rounded.
extern "C" __global__ void ssd_sum(const float *db, const float *dc, T *to_b, T *to_c) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)COUNT) return;
    float b = 0.0f, c = 0.0f;
    for (int part = 0; part < PARTS; part++) b += db[part * (u64)COUNT + i], c += dc[part * (u64)COUNT + i];
    from_float(b, to_b[i]), from_float(c, to_c[i]);
}
#endif
