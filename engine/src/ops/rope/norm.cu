// y = rotated(x rstd w), rstd = 1 / sqrt(mean(x^2) + EPS); w: none (WEIGHT 0), one number (1), or [D] (2).
template <bool PACKED>
__device__ __forceinline__ void norm_rope_rows(const T *x, const C *cos, const C *sin, const W *w, T *y, float *rstd) {
    Unit unit((u64)blockIdx.x * GROUPS + row_group());
    Pair<T> v[ITEMS][PACKS];
    #pragma unroll
    for (int k = 0; k < ITEMS; k++)
        #pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (there(p)) v[k][p] = read_pair<PACKED>(x + unit.row(k) * D, p);
    Pack<C> c[PACKS], s[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!there(p)) continue;
        c[p] = read<PACKED>(cos + unit.angle(p));
        s[p] = read<PACKED>(sin + unit.angle(p));
    }
    float scalar = WEIGHT == 1 ? to_float(w[0]) : 1.0f;

    float r[ITEMS];
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        r[k] = 0.0f;
        #pragma unroll
        for (int p = 0; p < PACKS; p++)
            for (int i = 0; i < 2 * VEC && there(p); i++) r[k] += get(v[k][p], i) * get(v[k][p], i);
    }
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) r[k] = rsqrtf(row_sum(r[k]) * (1.0f / D) + EPS);
    if (!unit.real) return;

    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!there(p)) continue;
        Pair<W> scale;
        if (WEIGHT == 2) scale = read_pair<PACKED>(w, p);
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            Pair<T> out;
            for (int i = 0; i < VEC; i++) {
                float a = get(v[k][p], one(i)), b = get(v[k][p], other(i)), ci = to_float(c[p].at[i]), si = to_float(s[p].at[i]);
                if (WEIGHT == 2) a *= get(scale, one(i)), b *= get(scale, other(i));
                float size = r[k] * scalar;
                put((a * ci - b * si) * size, out, one(i));
                put((a * si + b * ci) * size, out, other(i));
            }
            write(y + unit.row(k) * D + column(p, 0), out.at[0]);
            write(y + unit.row(k) * D + column(p, 1), out.at[1]);
        }
    }
    if (row_lane() > 0) return;
    for (int k = 0; k < ITEMS; k++) rstd[unit.row(k)] = r[k];
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS, RESIDENT)
norm_rope(const T *x, const C *cos, const C *sin, const W *w, T *y, float *rstd) {
    if (packed(x) && packed(cos) && packed(sin) && packed(w)) norm_rope_rows<true>(x, cos, sin, w, y, rstd);
    else norm_rope_rows<false>(x, cos, sin, w, y, rstd);
}
