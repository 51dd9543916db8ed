// y = softmax of the rows of x [ROWS, D]. CAUSAL: row i of each SQUARE rows has D - SQUARE + i + 1 columns, the others become 0.
template <bool PACKED> __device__ __forceinline__ void softmax_rows(const T *x, T *y) {
    u64 row = (u64)blockIdx.x * GROUPS + row_group();
    bool real = row < (u64)ROWS;
    if (!real) row = ROWS - 1; // no such row: its results are not used, but its threads take part in the shuffles
    int seen = CAUSAL ? D - SQUARE + 1 + (int)(row % SQUARE) : D;
    Row<PACKED, T> v(x + row * D, seen);

    float m = -infinity();
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= seen) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++)
            if (row_start(p) + i < seen) m = larger(m, to_float(a.at[i]));
    }
    m = row_max(m);

    float sum = 0.0f;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= seen) continue;
        Pack<T> a = v[p];
        for (int i = 0; i < VEC; i++)
            if (row_start(p) + i < seen) sum += expf(to_float(a.at[i]) - m);
    }
    float scale = 1.0f / row_sum(sum);

    if (!real) return;
    #pragma unroll UNROLL
    for (int p = 0; p < PACKS; p++) {
        if (row_start(p) >= D) continue;
        Pack<T> a = {};
        if (row_start(p) < seen) {
            a = v[p];
            for (int i = 0; i < VEC; i++) from_float(row_start(p) + i < seen ? expf(to_float(a.at[i]) - m) * scale : 0.0f, a.at[i]);
        }
        write(y + row * D + row_start(p), a);
    }
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) softmax(const T *x, T *y) {
    if (packed(x)) softmax_rows<true>(x, y);
    else softmax_rows<false>(x, y);
}
