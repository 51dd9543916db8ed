// Tensor cores. parts[slice] [GROUPS * OG, CG, WIDTH] = the sum over one slice's tiles of dy[t, o] x[t - (WIDTH - 1) + j, c].
// A block has OT outputs and CT channels of each of GB groups, and every SLICES-th tile of TILE time steps, which arrive STAGES - 1
// tiles ahead. A warp has 16 MO outputs, 16 channels and all taps, and every SPLIT-th 16 time steps of a tile.
#define D_PITCH (GB * OT + 8) // eight rows, 16 bytes each, lie in different banks
#define X_PITCH (GB * CT + 8)
#define X_ROWS (TILE + WIDTH - 1)
#define STAGE (TILE * D_PITCH + X_ROWS * X_PITCH)
#define ACROSS (CT / 16)          // warps next to each other in channels,
#define DOWN (OT / (16 * MO))     // in outputs,
#define UNITS (GB * DOWN * ACROSS) // and altogether, for the same time steps

// to [ROWS, N + 8] = rows t0.. of from [TIME, STRIDE]; zeros outside the sequence.
template <int ROWS, int N, int STRIDE> __device__ __forceinline__ void load(T *to, const T *from, int t0) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (N / 8); i += BLOCK) {
        int r = i / (N / 8), c = i % (N / 8) * 8, t = t0 + r;
        bool live = t >= 0 && t < TIME;
        copy16(to + r * (N + 8) + c, from + (u64)(live ? t : 0) * STRIDE + c, live);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) conv_tensor_weight(const T *x, const T *dy, float *parts) {
    extern __shared__ __align__(16) float shared[];
    T *stages = (T *)shared; // [STAGES] of dy [TILE, D_PITCH] and x [X_ROWS, X_PITCH]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 place = blockIdx.x % PLACES, slice = blockIdx.x / PLACES;
    u32 c0 = place % (CG / CT) * CT, o0 = place / (CG / CT) % (OG / OT) * OT, g0 = place / (CG / CT * (OG / OT)) * GB;
    int unit = warp % UNITS, split = warp / UNITS;
    int g = unit / (DOWN * ACROSS), o = unit / ACROSS % DOWN * 16 * MO, c = unit % ACROSS * 16;

    auto fetch = [&](u32 tile, int stage) {
        if (tile < BATCH * TILES) {
            T *to = stages + stage * STAGE;
            int t0 = (int)(tile % TILES) * TILE;
            u64 row = (u64)(tile / TILES) * TIME;
            load<TILE, GB * OT, GROUPS * OG>(to, dy + row * GROUPS * OG + g0 * OG + o0, t0);
            load<X_ROWS, GB * CT, GROUPS * CG>(to + TILE * D_PITCH, x + row * GROUPS * CG + g0 * CG + c0, t0 - (WIDTH - 1));
        }
        copies_commit(); // also of nothing, so that the groups count tiles
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch(slice + i * SLICES, i);

    float sum[WIDTH][MO][2][4] = {};
    int stage = 0, next = STAGES - 1;
    for (u32 tile = slice; tile < BATCH * TILES; tile += SLICES) {
        copies_wait<STAGES - 2>();
        __syncthreads(); // this tile is there, and nobody reads the one before it
        fetch(tile + (STAGES - 1) * SLICES, next);
        const T *d = stages + stage * STAGE + g * OT + o, *rows = stages + stage * STAGE + TILE * D_PITCH + g * CT + c;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
#pragma unroll
        for (int step = 0; step < TILE; step += 16 * SPLIT) {
            int t = step + 16 * split;
            u32 a[MO][4];
#pragma unroll
            for (int m = 0; m < MO; m++) matrices_t(a[m], d + (t + lane % 8 + lane / 16 * 8) * D_PITCH + 16 * m + lane / 8 % 2 * 8);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                u32 b[4];
                matrices_t(b, rows + (t + k + lane % 16) * X_PITCH + lane / 16 * 8);
#pragma unroll
                for (int m = 0; m < MO; m++) mma<T>(sum[k][m][0], a[m], b[0], b[1]), mma<T>(sum[k][m][1], a[m], b[2], b[3]);
            }
        }
    }

    if (SPLIT > 1) { // the first warps add up what the others have
        const int SUMS = WIDTH * MO * 8;
        float *own = &sum[0][0][0][0], *others = shared + threadIdx.x % (32 * UNITS); // [SPLIT - 1, SUMS, 32 * UNITS]
        copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (split) others[((split - 1) * SUMS + i) * 32 * UNITS] = own[i];
        __syncthreads();
        if (split) return;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
#pragma unroll
            for (int j = 0; j < SPLIT - 1; j++) own[i] += others[(j * SUMS + i) * 32 * UNITS];
    }
    float *part = parts + (u64)slice * GROUPS * OG * CG * WIDTH;
#pragma unroll
    for (int m = 0; m < MO; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int j = i % 2, half = i / 2; // 8 channels, 8 outputs
            u32 row = (g0 + g) * OG + o0 + o + 16 * m + 8 * half + lane / 4, column = c0 + c + 8 * j + lane % 4 * 2;
            float2 *to = (float2 *)(part + ((u64)row * CG + column) * WIDTH); // two channels, all taps
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                auto at = [&](int i) { return sum[i % WIDTH][m][j][2 * half + i / WIDTH]; };
                to[k] = make_float2(at(2 * k), at(2 * k + 1));
            }
        }
}
