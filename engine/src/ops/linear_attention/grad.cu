// dxs, from `both` (scores.cu): dq = both q, turned back, with ADD plus more, with RELU 0 where xs is not positive. A block takes HELD heads
// of one batch element and every PARTS-th chunk, a warp 16 rows of a head. A chunk of q gives way to its dq.
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
        T *chunk = memory + stage * STAGE, *own = chunk + held * HEAD;
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
                *at = turned(x, by[k]);
            }
        }
        __syncthreads();
        float sum[CHUNK / 8][4] = {};
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++) {
                u32 right[4];
                matrices_t(right, own + (place(row_of(k, lane), lane / 16, CHUNK) ^ 16 * i)); // 16 columns on, bits 4 and 5 of a place change
                mma<T>(sum[2 * i], left[k].of, right[0], right[1]), mma<T>(sum[2 * i + 1], left[k].of, right[2], right[3]);
            }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = 16 * tile + 8 * half + lane / 4;
            if (row >= TIME) continue;
#pragma unroll
            for (int i = 0; i < CHUNK / 8; i++)
                *(u32 *)(own + place(row, i, CHUNK) + lane % 4 * 2) = pack<T>(sum[i][2 * half], sum[i][2 * half + 1]);
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
                    low = p * by[k].cos.of[j] + q * by[k].sin.of[j] + x, high = q * by[k].cos.of[j] - p * by[k].sin.of[j] + z;
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
