// Rows [ROWS, D] of x (sum.cuh). LAYER: y = (x - mean) / sqrt(variance + EPS); otherwise y = x / sqrt(mean(x^2) + EPS), with WEIGHT
// times w [D], its rows PITCH apart. With SUM x itself is an output.
template <bool PACKED> __device__ __forceinline__ void norm_rows(const T *x, const B *b, const W *w, T *y, float *rstd, T *sum) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    Summed<PACKED> from(x, b, row);

    float kept[KEEP ? PACKS : 1][VEC], mean = 0.0f, square = 0.0f;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        float *v = kept[KEEP ? p : 0];
        from.get(p, v);
        for (int i = 0; i < VEC; i++) {
            mean += v[i];
            square += v[i] * v[i];
        }
    }
    if (LAYER) {
        mean = row_sum(mean) / D;
        square = 0.0f;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            float *v = kept[KEEP ? p : 0];
            if (!KEEP) from.get(p, v);
            for (int i = 0; i < VEC; i++) square += (v[i] - mean) * (v[i] - mean);
        }
    } else {
        mean = 0.0f;
    }
    float r = 1.0f / sqrtf(row_sum(square) / D + EPS);

    if (!real) return;
    if (row_lane() == 0) rstd[row] = r;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        u64 at = row * D + row_start(p);
        float *v = kept[KEEP ? p : 0];
        if (!KEEP) from.get(p, v);
        Pack<T> out;
        if (SUM) {
            for (int i = 0; i < VEC; i++) from_float(v[i], out.at[i]);
            write(sum + at, out);
        }
        Pack<W> scale;
        if (WEIGHT) scale = read<PACKED>(w + row_start(p));
        for (int i = 0; i < VEC; i++) {
            float c = (v[i] - mean) * r;
            from_float(WEIGHT ? c * to_float(scale.at[i]) : c, out.at[i]);
        }
        write(y + row * PITCH + row_start(p), out);
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) normalise(const T *x, const B *b, const W *w, T *y, float *rstd, T *sum) {
    if (packed(x) && packed(b) && packed(w)) norm_rows<true>(x, b, w, y, rstd, sum);
    else norm_rows<false>(x, b, w, y, rstd, sum);
}
