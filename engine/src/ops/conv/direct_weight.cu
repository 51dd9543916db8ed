// Small groups. parts[slice] [GROUPS * OG, CG, WIDTH] = the sum over one slice's tiles of dy[t, o] x[t - (WIDTH - 1) + j, c].
// A block has one group and one slice: every SLICES-th tile of TILE time steps. A thread has 4 outputs o, one channel c and
// all taps, for the SPLIT-th part of each tile.
template <typename E> struct alignas(4 * sizeof(E)) Four { E v[4]; };

// to [rows, PAD] = rows t0.. of from [TIME, GROUPS * N], columns of group g; zeros before the sequence.
template <typename E, int N, int PAD> __device__ __forceinline__ void load(float *to, const E *from, int t0, int rows, u32 g) {
    const int STEP = N % 4 == 0 ? 4 : 1;
    bool whole = STEP == 4 && (u64)from % sizeof(Four<E>) == 0;
    for (int i = threadIdx.x; i < rows * (N / STEP); i += BLOCK) {
        int n = i % (N / STEP) * STEP, r = i / (N / STEP), t = t0 + r;
        const E *at = from + (long long)t * (GROUPS * N) + g * N + n;
        float v[4] = {};
        if (t >= 0) {
            Four<E> raw;
            if (whole) raw = *(const Four<E> *)at;
            else for (int e = 0; e < STEP; e++) raw.v[e] = at[e];
#pragma unroll
            for (int e = 0; e < STEP; e++) v[e] = to_float(raw.v[e]);
        }
        if (STEP == 4) *(float4 *)(to + r * PAD + n) = make_float4(v[0], v[1], v[2], v[3]);
        else to[r * PAD + n] = v[0];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) conv_direct_weight(const T *x, const D *dy, float *parts) {
    extern __shared__ float4 memory[];
    float *ds = (float *)memory;          // [TILE, OPAD]; OPAD is OG rounded up to 4, what is beyond OG is never stored
    float *xs = ds + TILE * OPAD;         // [TILE + WIDTH - 1, CG]
    const int UNITS = OPAD / 4 * CG, STEPS = (TILE + SPLIT - 1) / SPLIT;
    u32 g = blockIdx.x % GROUPS, slice = blockIdx.x / GROUPS;
    int unit = threadIdx.x % UNITS, split = threadIdx.x / UNITS;
    int c = unit % CG, o = unit / CG * 4;
    float sum[4][WIDTH] = {};
    for (u64 tile = slice; tile < (u64)BATCH * TILES; tile += SLICES) {
        u64 b = tile / TILES;
        int t0 = (int)(tile % TILES) * TILE, n = TIME - t0 < TILE ? TIME - t0 : TILE;
        __syncthreads();
        load<D, OG, OPAD>(ds, dy + b * TIME * GROUPS * OG, t0, n, g);
        load<T, CG, CG>(xs, x + b * TIME * GROUPS * CG, t0 - (WIDTH - 1), n + WIDTH - 1, g);
        __syncthreads();
        int first = split * STEPS, last = first + STEPS < n ? first + STEPS : n;
        if (split >= SPLIT || first >= last) continue;
        float v[WIDTH]; // the channel at the taps of one time step
#pragma unroll
        for (int j = 1; j < WIDTH; j++) v[j] = xs[(first + j - 1) * CG + c];
#pragma unroll 4
        for (int t = first; t < last; t++) {
#pragma unroll
            for (int j = 1; j < WIDTH; j++) v[j - 1] = v[j];
            v[WIDTH - 1] = xs[(t + WIDTH - 1) * CG + c];
            float4 d = *(const float4 *)(ds + t * OPAD + o);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                sum[0][j] += d.x * v[j];
                sum[1][j] += d.y * v[j];
                sum[2][j] += d.z * v[j];
                sum[3][j] += d.w * v[j];
            }
        }
    }
    __syncthreads();
    float *sums = (float *)memory; // [SPLIT, 4, WIDTH, UNITS]
    if (split < SPLIT) {
#pragma unroll
        for (int i = 0; i < 4 * WIDTH; i++) sums[(split * 4 * WIDTH + i) * UNITS + unit] = sum[i / WIDTH][i % WIDTH];
    }
    __syncthreads();
    const int ELEMENTS = OG * CG * WIDTH;
    for (int i = threadIdx.x; i < ELEMENTS; i += BLOCK) {
        int j = i % WIDTH, c = i / WIDTH % CG, o = i / (WIDTH * CG);
        float total = 0.0f;
        for (int s = 0; s < SPLIT; s++) total += sums[((s * 4 + o % 4) * WIDTH + j) * UNITS + o / 4 * CG + c];
        parts[((u64)slice * GROUPS + g) * ELEMENTS + i] = total;
    }
}
