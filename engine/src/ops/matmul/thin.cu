// y [M, N] = x [M, K] w [K, N]. LANES threads own ROWS rows: each element of x is read once, w once for all of the rows.
extern "C" __global__ void thin(const T *x, const T *w, OUT *y) {
    int lane = threadIdx.x % LANES;
    u64 first = ((u64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES) * ROWS;
    float sum[VALUES] = {}; // of row r and column c at r * N + c; a power of two of them

    #pragma unroll 4
    for (int p = 0; p < (K + LANES * VEC - 1) / (LANES * VEC); p++) {
        int k = (p * LANES + lane) * VEC;
        if (K % (LANES * VEC) && k >= K) break;
        Pack<T> v[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            u64 row = first + r < M ? first + r : M - 1; // past the end: not written
            v[r] = read<true>(x + row * X_ROW + k);
        }
        T b[VEC * N]; // w [k + j, c] at j * N + c
        #pragma unroll
        for (int c = 0; c < N; c++) {
            Pack<T> e;
            if (W_PACKS == 2) e = read<true>(w + (u64)k * N + c * VEC);
            else if (W_PACKS == 1) e = read<true>(w + k + (u64)c * W_COLUMN);
            else for (int j = 0; j < VEC; j++) e.at[j] = w[(u64)(k + j) * W_ROW + (u64)c * W_COLUMN];
            for (int j = 0; j < VEC; j++) b[W_PACKS == 2 ? c * VEC + j : j * N + c] = e.at[j];
        }
        #pragma unroll
        for (int j = 0; j < VEC; j++)
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < N; c++) sum[r * N + c] += to_float(v[r].at[j]) * to_float(b[j * N + c]);
    }

    // Each step halves the values that a thread has, and doubles the threads whose sums are in them. In the end value i is with
    // thread i * LANES / VALUES.
    #pragma unroll
    for (int mask = LANES / 2, half = VALUES / 2; mask > 0; mask /= 2, half /= 2) {
        bool upper = lane & mask;
        if (half == 0) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], mask);
        for (int i = 0; i < half; i++) {
            float mine = upper ? sum[i + half] : sum[i], other = upper ? sum[i] : sum[i + half];
            sum[i] = mine + __shfl_xor_sync(0xffffffffu, other, mask);
        }
    }
    int value = lane / (LANES / VALUES);
    u64 row = first + value / N;
    if (lane % (LANES / VALUES) == 0 && value < ROWS * N && row < M) from_float(sum[0], y[row * Y_ROW + value % N * Y_COLUMN]);
}
