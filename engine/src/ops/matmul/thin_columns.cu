// part [p, M, N] = x [M, K] w [K, N] over the p-th CHUNK of K, where the columns of x lie without gaps. A block is WIDE packs of M;
// its other threads take one k each, and add up in the end.
#define TALL (256 / WIDE)
#define PITCH (WIDE + 32 / VEC) // no two threads of a warp on one bank, writing or reading

// BATCH columns of x, TALL apart; past `stop` they are ignored. Loads are unconditional, so that they overlap.
template <bool ENDS> __device__ __forceinline__ void add(const T *x, const T *w, u64 k, u64 stop, float (&acc)[N][VEC]) {
    float v[BATCH][VEC], b[BATCH][N];
    #pragma unroll
    for (int i = 0; i < BATCH; i++) {
        u64 at = k + i * TALL;
        bool in = !ENDS || at < stop;
        if (!in) at = k;
        Pack<T> e = read<true>(x + at * X_COLUMN);
        for (int j = 0; j < VEC; j++) v[i][j] = in ? to_float(e.at[j]) : 0.0f;
        for (int c = 0; c < N; c++) b[i][c] = in ? to_float(w[at * W_ROW + (u64)c * W_COLUMN]) : 0.0f;
    }
    #pragma unroll
    for (int i = 0; i < BATCH; i++)
        for (int j = 0; j < VEC; j++)
            for (int c = 0; c < N; c++) acc[c][j] += v[i][j] * b[i][c];
}

extern "C" __global__ void thin_columns(const T *x, const T *w, OUT *part) {
    __shared__ float sums[TALL * VEC * PITCH];
    int tx = threadIdx.x % WIDE, ty = threadIdx.x / WIDE;
    int first = blockIdx.x % TILES * (WIDE * VEC), mine = first + tx * VEC;
    u64 p = blockIdx.x / TILES, start = p * CHUNK, stop = start + CHUNK < K ? start + CHUNK : K;
    float acc[N][VEC] = {};

    if (mine < M) {
        u64 k = start + ty;
        for (; k + (BATCH - 1) * TALL < stop; k += BATCH * TALL) add<false>(x + mine, w, k, stop, acc);
        if (k < stop) add<true>(x + mine, w, k, stop, acc);
    }

    #pragma unroll
    for (int c = 0; c < N; c++) {
        __syncthreads();
        for (int j = 0; j < VEC; j++) sums[(ty * VEC + j) * PITCH + tx] = acc[c][j];
        __syncthreads();
        for (int i = threadIdx.x; i < WIDE * VEC; i += 256) {
            if (first + i >= M) break;
            float sum = 0.0f;
            for (int t = 0; t < TALL; t++) sum += sums[(t * VEC + i % VEC) * PITCH + i / VEC];
            from_float(sum, part[p * M * N + (u64)(first + i) * Y_ROW + (u64)c * Y_COLUMN]);
        }
    }
}
