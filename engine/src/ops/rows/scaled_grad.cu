// With g = dy [ROWS, D] at row index[i]: dscale[i] = g . source[i], and scale[i] g takes the place of source[i].
template <bool PACKED>
__device__ __forceinline__ void back(const G *dy, const int *index, const S *scale, T *source, S *dscale) {
    u64 i = (u64)blockIdx.x * GROUPS + row_group();
    bool real = i < (u64)N; // threads without a row are needed by the shuffles
    float dot = 0.0f;
    if (real) {
        int row = index[i];
        if ((u32)row >= (u32)ROWS) __trap(); // the caller's mistake
        float s = to_float(scale[i]);
        dy += (u64)row * D;
        source += i * D;
        for (int first = 0; first < PACKS; first += UNROLL) {
            // All loads before the first write, which they could not pass.
            Pack<T> v[UNROLL];
            Pack<G> g[UNROLL];
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                int at = row_start(first + p);
                if (at >= D) continue;
                v[p] = read<true>(source + at);
                g[p] = read<PACKED>(dy + at);
            }
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                int at = row_start(first + p);
                if (at >= D) continue;
                for (int e = 0; e < VEC; e++) {
                    float d = to_float(g[p].at[e]);
                    dot += d * to_float(v[p].at[e]);
                    from_float(s * d, v[p].at[e]);
                }
                write(source + at, v[p]);
            }
        }
    }
    dot = row_sum(dot);
    if (real && row_lane() == 0) from_float(dot, dscale[i]);
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
scatter_scaled_grad(const G *dy, const int *index, const S *scale, T *source, S *dscale) {
    if (packed(dy)) back<true>(dy, index, scale, source, dscale);
    else back<false>(dy, index, scale, source, dscale);
}
