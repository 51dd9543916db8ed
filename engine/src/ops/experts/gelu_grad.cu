// With y = w gelu(h) of each row of h [N, D]: dh = w dy gelu'(h), and of the row's slot dw = the sum of dy gelu(h). For the rows of EXPERTS experts from
// offsets[0] on; dh of the others is not written, and their dw is 0.
template <bool PACKED>
__device__ __forceinline__ void back(const T *h, const T *dy, const int *order, const int *offsets, const float *weights, T *dh, float *dw) {
    int i = blockIdx.x * GROUPS + row_group();
    bool real = i < N; // threads without a row take part in the shuffles
    float dot = 0.0f;
    int slot = real ? order[i] : 0;
    if (real && i >= offsets[0] && offsets[EXPERTS] > i) {
        float w = weights[slot];
        h += (u64)i * D;
        dy += (u64)i * D;
        dh += (u64)i * D;
        for (int first = 0; first < PACKS; first += UNROLL) {
            Pack<T> v[UNROLL], d[UNROLL];
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                if (row_start(first + p) >= D) continue;
                v[p] = read<PACKED>(h + row_start(first + p));
                d[p] = read<PACKED>(dy + row_start(first + p));
            }
            #pragma unroll
            for (int p = 0; p < UNROLL; p++) {
                if (row_start(first + p) >= D) continue;
                for (int e = 0; e < VEC; e++) {
                    float x = to_float(v[p].at[e]), g = to_float(d[p].at[e]);
                    float half = 0.5f * (1.0f + erff(x * 0.70710678f)), bell = expf(-0.5f * x * x) * 0.39894228f;
                    dot += g * x * half;
                    from_float(w * g * (half + x * bell), v[p].at[e]);
                }
                write(dh + row_start(first + p), v[p]);
            }
        }
    }
    dot = row_sum(dot);
    if (real && row_lane() == 0) dw[slot] = dot;
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
expert_gelu_grad(const T *h, const T *dy, const int *order, const int *offsets, const float *weights, T *dh, float *dw) {
    if (packed(h) && packed(dy)) back<true>(h, dy, order, offsets, weights, dh, dw);
    else back<false>(h, dy, order, offsets, weights, dh, dw);
}
