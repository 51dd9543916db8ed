// Rows [ROWS, D]. LAYER: y = (x - mean) / sqrt(variance + EPS); otherwise y = x / sqrt(mean(x^2) + EPS), with WEIGHT times w [D].
template <bool PACKED> __device__ __forceinline__ void norm_rows(const T *x, const W *w, T *y, float *rstd) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // its sums are needed by nobody, but its threads by the shuffles
    Row<PACKED, T> v(x + row * D, D);

    float mean = 0.0f;
    if (LAYER) {
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            Pack<T> a = v[p];
            for (int i = 0; i < VEC; i++) mean += to_float(a.at[i]);
        }
        mean = row_sum(mean) / D;
    }
    float square = 0.0f;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++) {
            float c = to_float(a.at[i]) - mean;
            square += c * c;
        }
    }
    float r = 1.0f / sqrtf(row_sum(square) / D + EPS);

    if (!real) return;
    if (row_lane() == 0) rstd[row] = r;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> a = v[p];
        Pack<W> scale;
        if (WEIGHT) scale = read<PACKED>(w + row_start(p));
        for (int i = 0; i < VEC; i++) {
            float c = (to_float(a.at[i]) - mean) * r;
            from_float(WEIGHT ? c * to_float(scale.at[i]) : c, a.at[i]);
        }
        write(y + row * D + row_start(p), a);
    }
}

#if WEIGHT
extern "C" __global__ void __launch_bounds__(LANES * GROUPS) normalise(const T *x, const W *w, T *y, float *rstd) {
#else
extern "C" __global__ void __launch_bounds__(LANES * GROUPS) normalise(const T *x, T *y, float *rstd) {
    const W *w = x;
#endif
    if (packed(x) && packed(w)) norm_rows<true>(x, w, y, rstd);
    else norm_rows<false>(x, w, y, rstd);
}
