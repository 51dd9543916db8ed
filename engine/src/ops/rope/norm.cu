// y = turned(x rstd w), rstd = 1 / sqrt(mean(x^2) + EPS); w: none (WEIGHT 0), one number (1), or [D] (2). A thread has ITEMS rows.
template <bool PACKED>
__device__ __forceinline__ void norm_rope_rows(const T *x, const C *cos, const C *sin, const W *w, T *y, float *rstd) {
    AT first = (AT)blockIdx.x * (GROUPS * ITEMS) + row_group();
    Pair<T> v[ITEMS][PACKS];
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        AT row = first + k * GROUPS;
        if (row >= (AT)ROWS) row = ROWS - 1; // its sum is needed by nobody, but its threads by the shuffles
        #pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (row_start(p) < D) v[k][p] = read_pair<PACKED>(x + (u64)row * D, row_start(p));
    }
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        float square = 0.0f;
        #pragma unroll
        for (int p = 0; p < PACKS; p++)
            for (int i = 0; i < VEC && row_start(p) < D; i++) {
                float own = to_float(v[k][p].own.at[i]);
                square += own * own;
            }
        float r = rsqrtf(row_sum(square) * (1.0f / D) + EPS);
        AT row = first + k * GROUPS;
        if (row >= (AT)ROWS) continue;
        if (row_lane() == 0) rstd[row] = r;
        if (WEIGHT == 1) r *= to_float(w[0]);
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int at = row_start(p);
            if (at >= D) continue;
            Angles a = angles<PACKED>(cos, sin, row, at);
            Pair<W> scale;
            if (WEIGHT == 2) scale = read_pair<PACKED>(w, at);
            Pack<T> out;
            for (int i = 0; i < VEC; i++) {
                float own = to_float(v[k][p].own.at[i]), other = to_float(v[k][p].other.at[i]);
                if (WEIGHT == 2) {
                    own *= to_float(scale.own.at[i]);
                    other *= to_float(scale.other.at[i]);
                }
                from_float((own * a.cos[i] + other * a.sin[i]) * r, out.at[i]);
            }
            write(y + (u64)row * D + at, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
norm_rope(const T *x, const C *cos, const C *sin, const W *w, T *y, float *rstd) {
    if (packed(x) && packed(cos) && packed(sin) && packed(w)) norm_rope_rows<true>(x, cos, sin, w, y, rstd);
    else norm_rope_rows<false>(x, cos, sin, w, y, rstd);
}
