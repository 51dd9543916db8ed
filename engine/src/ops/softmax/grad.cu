// dx = y (dy - sum of y dy), rows [ROWS, D].
template <bool PACKED> __device__ __forceinline__ void grad_rows(const T *y, const G *dy, T *dx) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    Row<PACKED, T> a(y + row * D, D);
    Row<PACKED, G> b(dy + row * D, D);

    float sum = 0.0f;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> v = a[p];
        Pack<G> g = b[p];
        for (int i = 0; i < VEC; i++) sum += to_float(v.at[i]) * to_float(g.at[i]);
    }
    sum = row_sum(sum);

    if (!real) return;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> v = a[p];
        Pack<G> g = b[p];
        for (int i = 0; i < VEC; i++) from_float(to_float(v.at[i]) * (to_float(g.at[i]) - sum), v.at[i]);
        write(dx + row * D + row_start(p), v);
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) softmax_grad(const T *y, const G *dy, T *dx) {
    if (packed(y) && packed(dy)) grad_rows<true>(y, dy, dx);
    else grad_rows<false>(y, dy, dx);
}
