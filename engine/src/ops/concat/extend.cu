// Rows of y, PITCH long: for each of PARTS, as many as it has, K columns of its weights, zeros, its columns from FIRST on, zeros. One thread a pack.
extern "C" __global__ void extend(INPUTS, T *y) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u32)ROWS * (PITCH / VEC)) return;
    u32 row = i / (PITCH / VEC), column = i % (PITCH / VEC) * VEC;
    const T *const weights[] = {WEIGHTS}, *const added[] = {ADDED};
    const u64 weight_rows[] = {WEIGHT_ROWS}, added_rows[] = {ADDED_ROWS};
    const u32 heights[] = {HEIGHTS}, firsts[] = {FIRSTS}, widths[] = {WIDTHS};
    const T *from = 0;
    u32 top = 0;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (row >= top) {
            from = 0;
            if (column < K) from = weights[p] + (row - top) * weight_rows[p] + column;
            else if (column - firsts[p] < widths[p]) from = added[p] + (row - top) * added_rows[p] + (column - firsts[p]);
        }
        top += heights[p];
    }
    Pack<T> v = {}; // zero in every type
    if (from) v = read<true>(from);
    write(y + (u64)i * VEC, v);
}
