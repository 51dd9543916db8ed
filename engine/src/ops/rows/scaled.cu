// y [ROWS, D] += scale [N] source [N, D] by row; a thread has ITEMS packs. No row is named twice, so no two threads meet.
template <bool PACKED> __device__ __forceinline__ void add(const int *index, const T *source, const S *scale, T *y) {
    // All loads first: none waits for another.
    Pack<T> v[ITEMS], old[ITEMS];
    float s[ITEMS];
    T *to[ITEMS];
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        AT at = ((AT)blockIdx.x * ITEMS + k) * THREADS + threadIdx.x, i = at / (D / VEC);
        to[k] = nullptr;
        if (at >= (AT)N * (D / VEC)) continue;
        v[k] = read<PACKED>(source + (u64)at * VEC);
        s[k] = to_float(scale[i]);
        int row = index[i];
        if ((u32)row < (u32)ROWS) to[k] = y + (u64)row * D + at % (D / VEC) * VEC;
    }
    #pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (to[k]) old[k] = read<true>(to[k]);
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (!to[k]) continue;
        for (int e = 0; e < VEC; e++) from_float(to_float(old[k].at[e]) + s[k] * to_float(v[k].at[e]), v[k].at[e]);
        write(to[k], v[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter_scaled(const int *index, const T *source, const S *scale, T *y) {
    if (packed(source)) add<true>(index, source, scale, y);
    else add<false>(index, source, scale, y);
}
