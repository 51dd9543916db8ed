// WIDTH columns of y [OUTER, ROW] from AT on: WIDTHS columns of each of PARTS inputs, whose rows lie STRIDES apart, and zeros; one thread a pack.
extern "C" __global__ void concat(INPUTS, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)OUTER * (WIDTH / VEC)) return;
    u64 row = i / (WIDTH / VEC), column = i % (WIDTH / VEC) * VEC;
    const T *const starts[] = {STARTS};
    const u64 widths[] = {WIDTHS}, strides[] = {STRIDES};
    const T *from;
    u64 first = 0;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (column >= first) from = starts[p] + row * strides[p] + (column - first);
        first += widths[p];
    }
    Pack<T> v = {}; // zero in every type
    if (column < first) v = read<true>(from);
    write(y + row * ROW + AT + column, v);
}
