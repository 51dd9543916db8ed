// The first COLUMNS of (x - mean) / sqrt(variance + EPS), rows [ROWS, D] of x.
template <bool PACKED> __device__ __forceinline__ void columns(const T *x, float *y) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    Row<PACKED, T> v(x + row * D, D);

    float mean = 0.0f, square = 0.0f;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++) mean += to_float(a.at[i]);
    }
    mean = row_sum(mean) / D;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++) square += (to_float(a.at[i]) - mean) * (to_float(a.at[i]) - mean);
    }
    float r = 1.0f / sqrtf(row_sum(square) / D + EPS);

    if (!real) return;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= COLUMNS) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++)
            if (row_start(p) + i < COLUMNS) y[row * COLUMNS + row_start(p) + i] = (to_float(a.at[i]) - mean) * r;
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) norm_columns(const T *x, float *y) {
    if (packed(x)) columns<true>(x, y);
    else columns<false>(x, y);
}
