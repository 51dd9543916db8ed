// y [N, D] = w gelu(h), w being the weight of the row's slot: for the rows of EXPERTS experts from offsets[0] on; the others are not written.
template <bool PACKED>
__device__ __forceinline__ void forward(const T *h, const int *order, const int *offsets, const float *weights, T *y) {
    int i = blockIdx.x * GROUPS + row_group();
    if (i >= N || i < offsets[0] || offsets[EXPERTS] <= i) return;
    float w = weights[order[i]];
    h += (u64)i * D;
    y += (u64)i * D;
    for (int first = 0; first < PACKS; first += UNROLL) {
        Pack<T> v[UNROLL];
        #pragma unroll
        for (int p = 0; p < UNROLL; p++)
            if (row_start(first + p) < D) v[p] = read<PACKED>(h + row_start(first + p));
        #pragma unroll
        for (int p = 0; p < UNROLL; p++) {
            if (row_start(first + p) >= D) continue;
            for (int e = 0; e < VEC; e++) {
                float x = to_float(v[p].at[e]);
                from_float(w * (0.5f * x * (1.0f + erff(x * 0.70710678f))), v[p].at[e]);
            }
            write(y + row_start(first + p), v[p]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS)
expert_gelu(const T *h, const int *order, const int *offsets, const float *weights, T *y) {
    if (packed(h)) forward<true>(h, order, offsets, weights, y);
    else forward<false>(h, order, offsets, weights, y);
}
