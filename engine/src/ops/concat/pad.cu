// x [OUTER, WIDTH], rows STRIDE apart, behind AT zeros in each row of y [OUTER, ROW], zeros after it; one thread a pack of y.
extern "C" __global__ void pad(const T *x, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)OUTER * (ROW / VEC)) return;
    u64 row = i / (ROW / VEC), column = i % (ROW / VEC) * VEC;
    Pack<T> v = {}; // zero in every type
    if (column - AT < (u64)WIDTH) v = read<true>(x + row * STRIDE + (column - AT));
    write(y + i * VEC, v);
}
