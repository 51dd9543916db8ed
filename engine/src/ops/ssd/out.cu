// y, from the state before every chunk; one block for each (batch, chunk, group, part of its heads). A warp has 16 positions.
#define STAGE ((CHUNK * P + P * N) * sizeof(T) + 2 * CHUNK * sizeof(float))

extern "C" __global__ void __launch_bounds__(THREADS, 2)
ssd_out(const T *x, const T *b, const T *c, const float *d, const float *numbers, const T *states, T *y) {
    extern __shared__ __align__(16) float shared[];
    T *cs = (T *)shared, *bs = (T *)((char *)(cs + CHUNK * N) + STAGE); // B lies where the second stage is later
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * warp;
    int part = blockIdx.x % PARTS, group = blockIdx.x / PARTS % GROUPS, chunk = blockIdx.x / PARTS / GROUPS % CHUNKS, t0 = chunk * CHUNK;
    u64 batch = blockIdx.x / PARTS / GROUPS / CHUNKS;
    int first = group * SHARED_BY + part * HELD;
    x += batch * TIME * (u64)X_ROW, y += batch * TIME * (u64)(HEADS * P);
    fetch_rows<N, C_PACKED>(cs, c + batch * TIME * (u64)C_ROW + group * N, C_ROW, t0);
    fetch_rows<N, B_PACKED>(bs, b + batch * TIME * (u64)B_ROW + group * N, B_ROW, t0);
    copies_commit();
    auto fetch = [&](int held) {
        T *tiles = (T *)((char *)(cs + CHUNK * N) + held % 2 * STAGE);
        int h = first + held;
        fetch_rows<P, X_PACKED>(tiles, x + h * P, X_ROW, t0);
        fetch_state(tiles + CHUNK * P, states + ((batch * HEADS + h) * CHUNKS + chunk) * (u64)(P * N));
        fetch_numbers<2 * CHUNK>((float *)(tiles + CHUNK * P + P * N), numbers + ((batch * CHUNKS + chunk) * HEADS + h) * NUMBERS);
        copies_commit();
    };
    fetch(0);
    copies_wait<1>();
    __syncthreads();
    // C B^T, of positions before the warp's own 16 and of these.
    u32 scores[CHUNK / 16 - 1][4], own[4];
    {
        u32 reads[N / 16][4];
#pragma unroll
        for (int n = 0; n < N / 16; n++) left_rows<N>(reads[n], cs, m, 16 * n);
#pragma unroll
        for (int t = 0; t < CHUNK / 16; t++) {
            if (t > warp) continue;
            float sum[2][4] = {};
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                u32 v[4];
                rows_of<N>(v, bs, 16 * t, 16 * n);
                product(sum, reads[n], v);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 both = pack<T>(sum[j / 2][j % 2 * 2], sum[j / 2][j % 2 * 2 + 1]);
                if (t == warp) own[j] = both;
                else if (t < CHUNK / 16 - 1) scores[t < CHUNK / 16 - 1 ? t : 0][j] = both;
            }
        }
    }
#pragma unroll 1
    for (int held = 0; held < HELD; held++) {
        copies_wait<0>();
        __syncthreads();
        if (held + 1 < HELD) fetch(held + 1);
        const T *xs = (const T *)((char *)(cs + CHUNK * N) + held % 2 * STAGE), *hs = xs + CHUNK * P;
        const float *dt = (const float *)(hs + P * N), *sums = dt + CHUNK;
        float sum[P / 8][4] = {};
        // From before the chunk: C h.
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            u32 a[4];
            left_rows<N>(a, cs, m, 16 * n);
#pragma unroll
            for (int p = 0; p < P / 16; p++) {
                u32 v[4];
                rows_of<N>(v, hs, 16 * p, 16 * n);
                product(sum + 2 * p, a, v);
            }
        }
        // Decays from j to i are products: from j to the position before the warp's own, and on to i. The second factor comes last.
        float before = warp > 0 ? sums[m - 1] : 0.0f, from_start = power_of_two(before);
#pragma unroll
        for (int i = 0; i < P / 2; i++) sum[i / 4][i % 4] *= from_start;
#pragma unroll
        for (int t = 0; t < CHUNK / 16 - 1; t++) {
            if (t >= warp) break;
            u32 a[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int j = 16 * t + 8 * n + lane % 4 * 2;
                float2 s = *(const float2 *)(sums + j), step = *(const float2 *)(dt + j);
                float low = power_of_two(before - s.x) * step.x, high = power_of_two(before - s.y) * step.y;
                a[2 * n] = times(scores[t][2 * n], low, high), a[2 * n + 1] = times(scores[t][2 * n + 1], low, high);
            }
#pragma unroll
            for (int p = 0; p < P / 16; p++) {
                u32 v[4];
                columns_of<P>(v, xs, 16 * t, 16 * p);
                product(sum + 2 * p, a, v);
            }
        }
        float here[2] = {sums[m + lane / 4], sums[m + lane / 4 + 8]}, on[2] = {power_of_two(here[0] - before), power_of_two(here[1] - before)};
#pragma unroll
        for (int i = 0; i < P / 2; i++) sum[i / 4][i % 4] *= on[i % 4 / 2];
        u32 a[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int j = 8 * (k / 2) + lane % 4 * 2, row = lane / 4 + k % 2 * 8;
            float low = j <= row ? power_of_two(here[k % 2] - sums[m + j]) * dt[m + j] : 0.0f;
            float high = j + 1 <= row ? power_of_two(here[k % 2] - sums[m + j + 1]) * dt[m + j + 1] : 0.0f;
            a[k] = times(own[k], low, high);
        }
#pragma unroll
        for (int p = 0; p < P / 16; p++) {
            u32 v[4];
            columns_of<P>(v, xs, m, 16 * p);
            product(sum + 2 * p, a, v);
        }
        int h = first + held;
        float skip = d[h];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = m + lane / 4 + 8 * half, t = t0 + row;
#pragma unroll
            for (int p = 0; p < P / 8; p++) {
                u32 value = pair_at<P>(xs, row, 8 * p + lane % 4 * 2);
                sum[p][2 * half] += skip * low_of(value), sum[p][2 * half + 1] += skip * high_of(value);
            }
            T *to = y + (u64)(t < TIME ? place(t) : 0) * (HEADS * P) + h * P;
#pragma unroll
            for (int p = 0; p < P / 32; p++) write_32(to + 32 * p, sum + 4 * p, half, t < TIME);
        }
    }
}
