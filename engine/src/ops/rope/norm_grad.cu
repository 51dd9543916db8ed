// g = dy turned back, s = rstd: dx = s (g w - x s^2 mean(g w x)). A block takes the rows GROUPS * ITEMS * (block, block + grid, ..), and
// with SUM leaves its sum of g x s in its row of partial: [grid, D] with a weight for each element (WEIGHT 2), [grid] with one number (1).
template <bool PACKED>
__device__ __forceinline__ void norm_rope_back(
    const T *x, const C *cos, const C *sin, const float *rstd, const G *dy, const W *w, T *dx, float *partial, float *shared
) {
    const bool each = SUM && WEIGHT == 2;
    float dw[each ? PACKS : 1][VEC] = {}, total = 0.0f;
    float scalar = WEIGHT == 1 ? to_float(w[0]) : 1.0f;
    for (u64 start = (u64)blockIdx.x * (GROUPS * ITEMS); start < (u64)ROWS; start += (u64)gridDim.x * (GROUPS * ITEMS)) {
        AT first = (AT)start + row_group();
        Pack<T> v[ITEMS][PACKS];
        Pair<G> d[ITEMS][PACKS];
        float s[ITEMS];
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            AT row = first + k * GROUPS;
            if (row >= (AT)ROWS) row = ROWS - 1; // its sum is needed by nobody, but its threads by the shuffles
            s[k] = rstd[row];
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (row_start(p) >= D) continue;
                v[k][p] = read<PACKED>(x + (u64)row * D + row_start(p));
                d[k][p] = read_pair<PACKED>(dy + (u64)row * D, row_start(p));
            }
        }
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            AT row = first + k * GROUPS;
            bool real = row < (AT)ROWS;
            float g[PACKS][VEC], dot = 0.0f;
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (row_start(p) >= D) continue;
                Angles a = angles<PACKED>(cos, sin, row, row_start(p));
                Pack<W> scale;
                if (WEIGHT == 2) scale = read<PACKED>(w + row_start(p));
                for (int i = 0; i < VEC; i++) {
                    float value = to_float(v[k][p].at[i]);
                    g[p][i] = to_float(d[k][p].own.at[i]) * a.cos[i] - to_float(d[k][p].other.at[i]) * a.sin[i];
                    if (each && real) dw[each ? p : 0][i] += g[p][i] * (value * s[k]);
                    if (WEIGHT == 2) g[p][i] *= to_float(scale.at[i]);
                    dot += g[p][i] * value;
                }
            }
            dot = row_sum(dot);
            if (!real) continue;
            if (row_lane() == 0) total += dot * s[k];
            float along = dot * s[k] * s[k] * (1.0f / D), scale = s[k] * scalar;
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (row_start(p) >= D) continue;
                Pack<T> out;
                for (int i = 0; i < VEC; i++) from_float((g[p][i] - to_float(v[k][p].at[i]) * along) * scale, out.at[i]);
                write(dx + (u64)row * D + row_start(p), out);
            }
        }
    }
    if (SUM && WEIGHT == 1) {
        total = block_sum(total);
        if (threadIdx.x == 0) partial[blockIdx.x] = total;
    }
    if (each) leave(dw, partial + (u64)blockIdx.x * D, shared);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS, RESIDENT)
norm_rope_grad(const T *x, const C *cos, const C *sin, const float *rstd, const G *dy, const W *w, T *dx, float *partial) {
    __shared__ float shared[SUM && WEIGHT == 2 ? WARPS * D : 1];
    if (packed(x) && packed(cos) && packed(sin) && packed(dy) && packed(w)) norm_rope_back<true>(x, cos, sin, rstd, dy, w, dx, partial, shared);
    else norm_rope_back<false>(x, cos, sin, rstd, dy, w, dx, partial, shared);
}
