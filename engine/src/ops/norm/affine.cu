// Rows [ROWS, D] of x: y = (x - mean) / sqrt(variance + EPS) * w + b, with w and b [D]. Mean and 1 / sqrt(..) of each row are kept.
template <bool PACKED>
__device__ __forceinline__ void affine_rows(const T *x, const W *w, const W *b, T *y, float *rstd, float *means) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    Row<PACKED, T> from(x + row * D, D);

    float kept[KEEP ? PACKS : 1][VEC], mean = 0.0f, square = 0.0f;
    auto get = [&](int p) {
        float *v = kept[KEEP ? p : 0];
        Pack<T> a = from[p];
        for (int i = 0; i < VEC; i++) v[i] = to_float(a.at[i]);
        return v;
    };
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        float *v = get(p);
        for (int i = 0; i < VEC; i++) mean += v[i];
    }
    mean = row_sum(mean) / D;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        float *v = KEEP ? kept[KEEP ? p : 0] : get(p);
        for (int i = 0; i < VEC; i++) square += (v[i] - mean) * (v[i] - mean);
    }
    float r = 1.0f / sqrtf(row_sum(square) / D + EPS);

    if (!real) return;
    if (row_lane() == 0) rstd[row] = r, means[row] = mean;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        float *v = KEEP ? kept[KEEP ? p : 0] : get(p);
        Pack<W> scale = read<PACKED>(w + row_start(p)), shift = read<PACKED>(b + row_start(p));
        Pack<T> out;
        for (int i = 0; i < VEC; i++) from_float((v[i] - mean) * r * to_float(scale.at[i]) + to_float(shift.at[i]), out.at[i]);
        write(y + row * D + row_start(p), out);
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
affine_norm(const T *x, const W *w, const W *b, T *y, float *rstd, float *means) {
    if (packed(x) && packed(w) && packed(b)) affine_rows<true>(x, w, b, y, rstd, means);
    else affine_rows<false>(x, w, b, y, rstd, means);
}
