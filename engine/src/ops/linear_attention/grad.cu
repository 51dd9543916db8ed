// dxs, from `both` (scores.cu): dq = both q, rotated back, with ADD plus more, with RELU 0 where xs is not positive. A block processes HELD heads
// of one sequence and every PARTS-th chunk, a warp 16 rows of a head. dq overwrites its chunk of q.
#define STAGE ((ADD ? 2 : 1) * HELD * HEAD) // elements: a chunk of xs and one of more

__device__ __forceinline__ void fetch_both(T *stage, const T *xs, const T *more, int c) {
    if (c < CHUNKS) {
        fetch(stage, xs, c);
        if (ADD) fetch(stage + HELD * HEAD, more, c);
    }
    copies_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
linear_attention_grad(const T *xs, const float *cos, const float *sin, const Eight *both, const T *more, T *dxs) {
    extern __shared__ __align__(16) float shared[];
    T *memory = (T *)shared;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % TILES, held = warp / TILES, part = blockIdx.x % PARTS;
    u64 b = blockIdx.x / PARTS / (HEADS / HELD), head = blockIdx.x / PARTS % (HEADS / HELD) * HELD;
    const u64 first = (b * TIME * HEADS + head) * N;

#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch_both(memory + i * STAGE, xs + first, more + first, part + i * PARTS);
    Eight left[TILES];
#pragma unroll
    for (int k = 0; k < TILES; k++) left[k] = both[(((b * HEADS + head + held) * TILES + tile) * TILES + k) * 32 + lane];
    int stage = 0;
#pragma unroll 1
    for (int c = part; c < CHUNKS; c += PARTS) {
        T *chunk = memory + stage * STAGE;
        int own = stage * STAGE + held * HEAD;
        Angles by[ROUNDS];
        angles(by, cos, sin, c);
        u32 positive[ROUNDS] = {}; // a bit for each element of xs
        copies_wait<STAGES - 1>();
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            int row, eight;
            if (!group(k, row, eight)) continue;
#pragma unroll
            for (int h = 0; h < HELD; h++) {
                Eight *at = (Eight *)(chunk + h * HEAD + place(row, eight, CHUNK)), x = *at;
#pragma unroll
                for (int j = 0; RELU && j < 4; j++) {
                    float low, high;
                    halves(x.of[j], low, high);
                    positive[k] |= (low > 0.0f ? 1u : 0u) << 8 * h + 2 * j | (high > 0.0f ? 2u : 0u) << 8 * h + 2 * j;
                }
                *at = rotated(x, by[k]);
            }
        }
        __syncthreads();
        u32 dq[CHUNK / 8][2];
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i += 2) {
            float sum[2][4] = {};
            Rows rows(own, i / 2, lane);
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                u32 right[4];
                matrices_t(right, rows.of(memory, k));
                mma<T>(sum[0], left[k].of, right[0], right[1]), mma<T>(sum[1], left[k].of, right[2], right[3]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) dq[i + n][0] = pack<T>(sum[n][0], sum[n][1]), dq[i + n][1] = pack<T>(sum[n][2], sum[n][3]);
        }
        __syncthreads();
        int at[CHUNK / 8];
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            at[i] = own + 16 * tile * CHUNK + place(lane / 4, i, CHUNK) + lane % 4 * 2;
            kept(at[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (16 * tile + 8 * half + lane / 4 >= TIME) continue;
#pragma unroll
            for (int i = 0; i < CHUNK / 8; i++) *(u32 *)(memory + at[i] + 8 * half * CHUNK) = dq[i][half];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            int row, eight;
            if (!group(k, row, eight)) continue;
#pragma unroll
            for (int h = 0; h < HELD; h++) {
                const T *at = chunk + h * HEAD + place(row, eight, CHUNK);
                Eight g = *(const Eight *)at, extra = {};
                if (ADD) extra = *(const Eight *)(at + HELD * HEAD);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float p, q, x, z, low, high;
                    halves(g.of[j], p, q), halves(extra.of[j], x, z);
                    low = x + p * by[k].cos.of[j] + q * by[k].sin.of[j], high = z - p * by[k].sin.of[j] + q * by[k].cos.of[j];
                    u32 live = positive[k] >> 8 * h + 2 * j;
                    g.of[j] = pack<T>(!RELU || live & 1 ? low : 0.0f, !RELU || live & 2 ? high : 0.0f);
                }
                int column = c * CHUNK + eight * 8;
                if (N % CHUNK == 0 || column < N) *(Eight *)(dxs + first + (row * (u64)HEADS + h) * N + column) = g;
            }
        }
        // What this thread copies, nobody else reads or writes from here on.
        fetch_both(chunk, xs + first, more + first, c + STAGES * PARTS);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
}
