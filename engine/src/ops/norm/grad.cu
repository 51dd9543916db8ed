// Rows [ROWS, D] of x (sum.cuh); s = rstd, g = dy, with WEIGHT times w [D].
// LAYER, where x is the output: dx = s (g - mean(g) - x mean(g x)); otherwise dx = s (g - x s^2 mean(g x)), with ADD plus more. With NORMED,
// the norm's result x s w is recomputed in y.
// A block takes the rows GROUPS * (block, block + grid, ..), and leaves its sums of dy x s and, where b is one row for all, of dx in
// its part of partial [grid, SUMS, D].
template <bool PACKED>
__device__ __forceinline__ void
grad_rows(const T *x, const B *b, const float *rstd, const G *dy, const W *w, const M *more, T *dx, T *y, float *partial, float *shared) {
    const bool held = SUMS > 0 && KEEP; // sums stay in registers
    float dw[held ? PACKS : 1][VEC] = {}, db[held && SUMS > 1 ? PACKS : 1][VEC] = {};
    partial += (u64)blockIdx.x * (SUMS * D);
    if (SUMS > 0 && !KEEP) {
        for (int i = threadIdx.x; i < SUMS * D; i += blockDim.x) partial[i] = 0.0f;
        __syncthreads();
    }

    for (u64 first = (u64)blockIdx.x * GROUPS; first < (u64)ROWS; first += (u64)gridDim.x * GROUPS) {
        u64 row = first + row_group();
        bool real = row < (u64)ROWS;
        if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
        Summed<PACKED> from(x, b, row);
        Row<PACKED, G> d(dy + row * D, D);
        Row<PACKED, M> m(ADD ? more + row * D : more, ADD ? D : 0);
        float s = rstd[row];

        float sum = 0.0f, dot = 0.0f;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            float v[VEC];
            from.get(p, v);
            Pack<G> a = d[p];
            Pack<W> scale;
            if (WEIGHT) scale = read<PACKED>(w + row_start(p));
            for (int i = 0; i < VEC; i++) {
                float g = WEIGHT ? to_float(a.at[i]) * to_float(scale.at[i]) : to_float(a.at[i]);
                sum += g;
                dot += g * v[i];
            }
        }
        float mean = LAYER ? row_sum(sum) / D : 0.0f;
        float along = row_sum(dot) * (LAYER ? 1.0f : s * s) / D;

        if (!real) continue;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            int at = row_start(p);
            if (at >= D) continue;
            float v[VEC];
            from.get(p, v);
            Pack<G> a = d[p];
            Pack<W> scale;
            if (WEIGHT) scale = read<PACKED>(w + at);
            Pack<M> extra;
            if (ADD) extra = m[p];
            Pack<T> out, normed;
            for (int i = 0; i < VEC; i++) {
                float g = to_float(a.at[i]);
                float to_weight = g * (v[i] * s);
                if (WEIGHT) g *= to_float(scale.at[i]);
                float result = (g - mean - v[i] * along) * s;
                if (held) dw[held ? p : 0][i] += to_weight;
                if (held && SUMS > 1) db[held && SUMS > 1 ? p : 0][i] += result;
                // Long rows: one a block, so this column is this thread's alone.
                if (SUMS > 0 && !KEEP) partial[at + i] += to_weight;
                if (SUMS > 1 && !KEEP) partial[D + at + i] += result;
                from_float(ADD ? result + to_float(extra.at[i]) : result, out.at[i]);
                if (NORMED) from_float(WEIGHT ? v[i] * s * to_float(scale.at[i]) : v[i] * s, normed.at[i]);
            }
            write(dx + row * D + at, out);
            if (NORMED) write(y + row * D + at, normed);
        }
    }

    if (held) leave(dw, [](int p) { return row_start(p); }, partial, shared);
    if (held && SUMS > 1) leave(db, [](int p) { return row_start(p); }, partial + D, shared);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS, RESIDENT)
norm_grad(const T *x, const B *b, const float *rstd, const G *dy, const W *w, const M *more, T *dx, T *y, float *partial) {
    __shared__ float shared[SUMS && LANES <= 32 ? WARPS * D : 1];
    if (packed(x) && packed(b) && packed(dy) && packed(w) && packed(more)) grad_rows<true>(x, b, rstd, dy, w, more, dx, y, partial, shared);
    else grad_rows<false>(x, b, rstd, dy, w, more, dx, y, partial, shared);
}
