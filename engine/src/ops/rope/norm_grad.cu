// g = dy rotated back, s = rstd: dx = s (g w - x s^2 mean(g w x)). A block takes the units GROUPS * (block, block + grid, ..), and with SUM leaves
// its sum of g x s in its row of partial: [grid, D] with a weight for each element (WEIGHT 2), [grid] with one number (1).
template <bool PACKED>
__device__ __forceinline__ void norm_rope_back(
    const T *x, const C *cos, const C *sin, const float *rstd, const G *dy, const W *w, T *dx, float *partial, float *shared
) {
    const bool each = SUM && WEIGHT == 2;
    float dw[each ? 2 * PACKS : 1][VEC] = {}, total = 0.0f;
    float scalar = WEIGHT == 1 ? to_float(w[0]) : 1.0f;
    for (u64 start = (u64)blockIdx.x * GROUPS; start < UNITS; start += (u64)gridDim.x * GROUPS) {
        Unit unit(start + row_group());
        Pair<T> v[ITEMS][PACKS];
        Pair<G> d[ITEMS][PACKS];
        float s[ITEMS];
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            s[k] = rstd[unit.row(k)];
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (!there(p)) continue;
                v[k][p] = read_pair<PACKED>(x + unit.row(k) * D, p);
                d[k][p] = read_pair<PACKED>(dy + unit.row(k) * D, p);
            }
        }
        float g[ITEMS][PACKS][2 * VEC], dot[ITEMS] = {};
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!there(p)) continue;
            Pack<C> cosines = read<PACKED>(cos + unit.angle(p)), sines = read<PACKED>(sin + unit.angle(p));
            Pair<W> scale;
            if (WEIGHT == 2) scale = read_pair<PACKED>(w, p);
            #pragma unroll
            for (int k = 0; k < ITEMS; k++) {
                for (int i = 0; i < VEC; i++) {
                    float a = get(d[k][p], one(i)), b = get(d[k][p], other(i)), c = to_float(cosines.at[i]), n = to_float(sines.at[i]);
                    g[k][p][one(i)] = a * c + b * n;
                    g[k][p][other(i)] = b * c - a * n;
                }
                for (int i = 0; i < 2 * VEC; i++) {
                    float value = get(v[k][p], i), &own = g[k][p][i];
                    if (each && unit.real) dw[each ? 2 * p + i / VEC : 0][i % VEC] += own * (value * s[k]);
                    if (WEIGHT == 2) own *= get(scale, i);
                    dot[k] += own * value;
                }
            }
        }
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) dot[k] = row_sum(dot[k]);
        if (!unit.real) continue;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            if (row_lane() == 0) total += dot[k] * s[k];
            float along = dot[k] * s[k] * s[k] * (1.0f / D), size = s[k] * scalar;
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (!there(p)) continue;
                Pair<T> out;
                for (int i = 0; i < 2 * VEC; i++) put((g[k][p][i] - get(v[k][p], i) * along) * size, out, i);
                write(dx + unit.row(k) * D + column(p, 0), out.at[0]);
                write(dx + unit.row(k) * D + column(p, 1), out.at[1]);
            }
        }
    }
    if (SUM && WEIGHT == 1) {
        total = block_sum(total);
        if (threadIdx.x == 0) partial[blockIdx.x] = total;
    }
    if (each) leave(dw, [](int p) { return column(p / 2, p % 2); }, partial + (u64)blockIdx.x * D, shared);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS, RESIDENT)
norm_rope_grad(const T *x, const C *cos, const C *sin, const float *rstd, const G *dy, const W *w, T *dx, float *partial) {
    __shared__ float shared[SUM && WEIGHT == 2 ? WARPS * D : 1];
    if (packed(x) && packed(cos) && packed(sin) && packed(dy) && packed(w)) norm_rope_back<true>(x, cos, sin, rstd, dy, w, dx, partial, shared);
    else norm_rope_back<false>(x, cos, sin, rstd, dy, w, dx, partial, shared);
}
