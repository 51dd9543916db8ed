// Rows [ROWS, D] of x; with v = (x - mean) s, s = rstd and g = dy w: dx = s (g - mean(g) - v mean(g v)), with ADD plus more.
// A block takes the rows GROUPS * (block, block + grid, ..), and leaves its sums of dy v and of dy in its part of partial [grid, 2, D].
template <bool PACKED>
__device__ __forceinline__ void
grad_rows(const T *x, const float *rstd, const float *means, const G *dy, const W *w, const M *more, T *dx, float *partial, float *shared) {
    float dw[KEEP ? PACKS : 1][VEC] = {}, db[KEEP ? PACKS : 1][VEC] = {};
    partial += (u64)blockIdx.x * (2 * D);
    if (!KEEP) {
        for (int i = threadIdx.x; i < 2 * D; i += blockDim.x) partial[i] = 0.0f;
        __syncthreads();
    }
    for (u64 first = (u64)blockIdx.x * GROUPS; first < (u64)ROWS; first += (u64)gridDim.x * GROUPS) {
        u64 row = first + row_group();
        bool real = row < (u64)ROWS;
        if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
        Row<PACKED, T> from(x + row * D, D);
        Row<PACKED, G> d(dy + row * D, D);
        Row<PACKED, M> extra(ADD ? more + row * D : more, ADD ? D : 0);
        float s = rstd[row], m = means[row];

        float sum = 0.0f, dot = 0.0f;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            Pack<T> v = from[p];
            Pack<G> a = d[p];
            Pack<W> scale = read<PACKED>(w + row_start(p));
            for (int i = 0; i < VEC; i++) {
                float g = to_float(a.at[i]) * to_float(scale.at[i]);
                sum += g;
                dot += g * ((to_float(v.at[i]) - m) * s);
            }
        }
        float mean = row_sum(sum) / D, along = row_sum(dot) / D;

        if (!real) continue;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            int at = row_start(p);
            if (at >= D) continue;
            Pack<T> v = from[p], out;
            Pack<G> a = d[p];
            Pack<W> scale = read<PACKED>(w + at);
            Pack<M> plus;
            if (ADD) plus = extra[p];
            for (int i = 0; i < VEC; i++) {
                float g = to_float(a.at[i]), normed = (to_float(v.at[i]) - m) * s;
                float result = (g * to_float(scale.at[i]) - mean - normed * along) * s;
                from_float(ADD ? result + to_float(plus.at[i]) : result, out.at[i]);
                if (KEEP) {
                    dw[KEEP ? p : 0][i] += g * normed;
                    db[KEEP ? p : 0][i] += g;
                } else { // long rows: one a block, so this column is this thread's alone
                    partial[at + i] += g * normed;
                    partial[D + at + i] += g;
                }
            }
            write(dx + row * D + at, out);
        }
    }
    if (KEEP) {
        leave(dw, [](int p) { return row_start(p); }, partial, shared);
        leave(db, [](int p) { return row_start(p); }, partial + D, shared);
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS, RESIDENT)
affine_norm_grad(const T *x, const float *rstd, const float *means, const G *dy, const W *w, const M *more, T *dx, float *partial) {
    __shared__ float shared[LANES <= 32 ? WARPS * D : 1];
    if (packed(x) && packed(dy) && packed(w) && packed(more)) grad_rows<true>(x, rstd, means, dy, w, more, dx, partial, shared);
    else grad_rows<false>(x, rstd, means, dy, w, more, dx, partial, shared);
}
