// Rows [ROWS, D]; s = rstd, g = dy, with WEIGHT times w [D].
// LAYER, where x is the output: dx = s (g - mean(g) - x mean(g x)); otherwise dx = s (g - x s^2 mean(g x)).
// A block takes the rows GROUPS * (block, block + grid, ..), and leaves its sum of dy x s in its row of partial [grid, D].
template <bool PACKED>
__device__ __forceinline__ void grad_rows(const T *x, const float *rstd, const G *dy, const W *w, T *dx, float *partial, float *shared) {
    float dw[WEIGHT && KEEP ? PACKS : 1][VEC] = {};
    partial += (u64)blockIdx.x * D;
    if (WEIGHT && !KEEP)
        for (int i = threadIdx.x; i < D; i += blockDim.x) partial[i] = 0.0f;
    if (WEIGHT && !KEEP) __syncthreads();

    for (u64 first = (u64)blockIdx.x * GROUPS; first < (u64)ROWS; first += (u64)gridDim.x * GROUPS) {
        u64 row = first + row_group();
        bool real = row < (u64)ROWS;
        if (!real) row = ROWS - 1; // its sums are needed by nobody, but its threads by the shuffles
        Row<PACKED, T> v(x + row * D, D);
        Row<PACKED, G> d(dy + row * D, D);
        float s = rstd[row];

        float sum = 0.0f, dot = 0.0f;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            Pack<T> a = v[p];
            Pack<G> b = d[p];
            Pack<W> scale;
            if (WEIGHT) scale = read<PACKED>(w + row_start(p));
            for (int i = 0; i < VEC; i++) {
                float g = WEIGHT ? to_float(b.at[i]) * to_float(scale.at[i]) : to_float(b.at[i]);
                sum += g;
                dot += g * to_float(a.at[i]);
            }
        }
        float mean = LAYER ? row_sum(sum) / D : 0.0f;
        float along = row_sum(dot) * (LAYER ? 1.0f : s * s) / D;

        if (!real) continue;
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (row_start(p) >= D) continue;
            Pack<T> a = v[p];
            Pack<G> b = d[p];
            Pack<W> scale;
            if (WEIGHT) scale = read<PACKED>(w + row_start(p));
            for (int i = 0; i < VEC; i++) {
                float value = to_float(a.at[i]), g = to_float(b.at[i]);
                if (WEIGHT) {
                    float add = g * (value * s);
                    if (KEEP) dw[KEEP ? p : 0][i] += add;
                    else partial[row_start(p) + i] += add; // long rows: one a block, so this column is this thread's alone
                    g *= to_float(scale.at[i]);
                }
                from_float((g - mean - value * along) * s, a.at[i]);
            }
            write(dx + row * D + row_start(p), a);
        }
    }

    if (!WEIGHT || !KEEP) return;
    // The groups of a warp, then the warps one after the other.
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++)
        for (int i = 0; i < VEC; i++)
            for (int other = LANES; other < 32; other <<= 1) dw[KEEP ? p : 0][i] += __shfl_xor_sync(0xffffffffu, dw[KEEP ? p : 0][i], other);
    const int warps = LANES > 32 ? 1 : LANES * GROUPS / 32;
    for (int warp = 0; warp < warps; warp++) {
        bool mine = LANES > 32 || (threadIdx.x / 32 == warp && threadIdx.x % 32 < LANES);
        #pragma unroll UNROLL
        for (int p = 0; p < PACKS; p++) {
            if (!mine || row_start(p) >= D) continue;
            for (int i = 0; i < VEC; i++) {
                int at = row_start(p) + i;
                float all = dw[KEEP ? p : 0][i] + (warp > 0 ? shared[at] : 0.0f);
                if (warp + 1 < warps) shared[at] = all;
                else partial[at] = all;
            }
        }
        if (warps > 1) __syncthreads();
    }
}

#if WEIGHT
extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
norm_grad(const T *x, const float *rstd, const G *dy, const W *w, T *dx, float *partial) {
    __shared__ float shared[LANES > 32 ? 1 : D];
#else
extern "C" __global__ void __launch_bounds__(LANES * GROUPS) norm_grad(const T *x, const float *rstd, const G *dy, T *dx) {
    const W *w = x;
    float *partial = nullptr, *shared = nullptr;
#endif
    if (packed(x) && packed(dy) && packed(w)) grad_rows<true>(x, rstd, dy, w, dx, partial, shared);
    else grad_rows<false>(x, rstd, dy, w, dx, partial, shared);
}
