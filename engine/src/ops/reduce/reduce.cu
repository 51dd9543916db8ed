// Sums or maxima over the middle of [OUTER, N, INNER], in PARTS parts of CHUNK elements each: [OUTER, PARTS, INNER].
__device__ __forceinline__ float start() { return MAX ? -infinity() : 0.0f; }
__device__ __forceinline__ float join(float a, float b) { return MAX ? larger(a, b) : a + b; }

#if INNER == 1
// LANES threads a part of a row.
template <bool PACKED> __device__ __forceinline__ void reduce_rows(const T *x, OUT *y) {
    u64 item = (u64)blockIdx.x * GROUPS + row_group();
    bool real = item < (u64)OUTER * PARTS;
    u64 begin = 0, end = 0;
    if (real) {
        begin = item % PARTS * CHUNK < (u64)N ? item % PARTS * CHUNK : (u64)N;
        end = begin + CHUNK < (u64)N ? begin + CHUNK : (u64)N;
        x += item / PARTS * N;
    }
    u64 whole = begin + (end - begin) / VEC * VEC;
    float acc[VEC];
    for (int i = 0; i < VEC; i++) acc[i] = start();
    #pragma unroll 4
    for (u64 at = begin + row_lane() * VEC; at < whole; at += LANES * VEC) {
        Pack<T> v = read<PACKED>(x + at);
        for (int i = 0; i < VEC; i++) acc[i] = join(acc[i], to_float(v.at[i]));
    }
    float all = acc[0];
    for (int i = 1; i < VEC; i++) all = join(all, acc[i]);
    for (u64 at = whole + row_lane(); at < end; at += LANES) all = join(all, to_float(x[at]));
    all = MAX ? row_max(all) : row_sum(all);
    if (real && row_lane() == 0) from_float(all, y[item]);
}

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const T *x, OUT *y) {
    if (packed(x)) reduce_rows<true>(x, y);
    else reduce_rows<false>(x, y);
}
#else
// A block is [TZ outer, TY rows, TX packs of columns]; TILES blocks cover the columns.
template <bool PACKED> __device__ __forceinline__ void reduce_columns(const T *x, OUT *y, float *shared) {
    int tx = threadIdx.x % TX, ty = threadIdx.x / TX % TY;
    u64 block = blockIdx.x;
    int tile = block % TILES, part = block / TILES % PARTS;
    u64 outer = block / TILES / PARTS * TZ + threadIdx.x / (TX * TY);
    int column = (tile * TX + tx) * VEC;
    bool real = column < INNER && outer < (u64)OUTER;
    u64 begin = (u64)part * CHUNK, end = begin + CHUNK < (u64)N ? begin + CHUNK : (u64)N;
    float acc[VEC];
    for (int i = 0; i < VEC; i++) acc[i] = start();
    if (real) {
        const T *from = x + outer * N * INNER + column;
        #pragma unroll 4
        for (u64 row = begin + ty; row < end; row += TY) {
            Pack<T> v = read<PACKED>(from + row * INNER);
            for (int i = 0; i < VEC; i++) acc[i] = join(acc[i], to_float(v.at[i]));
        }
    }
    // The TY rows of a column, as a tree.
    if (TY > 1) {
        for (int i = 0; i < VEC; i++) shared[i * THREADS + threadIdx.x] = acc[i];
        for (int half = TY / 2; half > 0; half /= 2) {
            __syncthreads();
            if (ty < half)
                for (int i = 0; i < VEC; i++) {
                    float *a = shared + i * THREADS + threadIdx.x;
                    *a = join(*a, a[half * TX]);
                }
        }
        for (int i = 0; i < VEC; i++) acc[i] = shared[i * THREADS + threadIdx.x]; // row 0 wrote what it reads
    }
    if (!real || ty > 0) return;
    for (int i = 0; i < VEC; i++) from_float(acc[i], y[(outer * PARTS + part) * INNER + column + i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const T *x, OUT *y) {
    __shared__ float shared[THREADS * VEC];
    if (packed(x)) reduce_columns<true>(x, y, shared);
    else reduce_columns<false>(x, y, shared);
}
#endif
