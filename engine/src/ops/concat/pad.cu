// x [OUTER, WIDTH] behind AT zeros in each row of y [OUTER, ROW], zeros after it; one thread a pack of y.
template <bool PACKED> __device__ __forceinline__ void copy(const T *x, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)OUTER * (ROW / VEC)) return;
    u64 row = i / (ROW / VEC), column = i % (ROW / VEC) * VEC;
    Pack<T> v = {}; // zero in every type
    if (column - AT < (u64)WIDTH) v = read<PACKED>(x + row * WIDTH + (column - AT));
    write(y + i * VEC, v);
}

extern "C" __global__ void pad(const T *x, T *y) {
    if (packed(x)) copy<true>(x, y);
    else copy<false>(x, y);
}
