// part [OUTER, WIDTH] into columns AT.. of y [OUTER, ROW]; one thread a pack.
template <bool PACKED> __device__ __forceinline__ void copy(const T *part, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)OUTER * (WIDTH / VEC)) return;
    u64 row = i / (WIDTH / VEC), column = i % (WIDTH / VEC) * VEC;
    write(y + row * ROW + AT + column, read<PACKED>(part + i * VEC));
}

extern "C" __global__ void concat(const T *part, T *y) {
    if (packed(part)) copy<true>(part, y);
    else copy<false>(part, y);
}
