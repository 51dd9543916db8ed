// x: places that lie STRIDE elements apart, each [HEADS, D]; y [places, HEADS, D]; cos, sin [TABLE, D / 2]. A thread rotates VEC pairs.
#define HALF (D / 2)

template <bool PACKED> __device__ __forceinline__ void rotate(const T *x, const C *cos, const C *sin, T *y) {
    AT i = (AT)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (AT)THREADS) return;
    int pair = i % (HALF / VEC) * VEC;
    AT row = i / (HALF / VEC), place = row / HEADS;
    int first = ADJACENT ? 2 * pair : pair, second = ADJACENT ? first + VEC : first + HALF;
    x += (u64)place * STRIDE + row % HEADS * D;
    y += (u64)row * D;
    cos += (u64)(place % TABLE) * HALF + pair;
    sin += (u64)(place % TABLE) * HALF + pair;
    Pack<T> from[2] = {read<PACKED>(x + first), read<PACKED>(x + second)}, to[2];
    Pack<C> c = read<PACKED>(cos), s = read<PACKED>(sin);
    #pragma unroll
    for (int k = 0; k < VEC; k++) {
        // Where the two of a pair are among these.
        const int a = ADJACENT ? 2 * k : k, b = ADJACENT ? a + 1 : k + VEC;
        float xa = to_float(from[a / VEC].at[a % VEC]), xb = to_float(from[b / VEC].at[b % VEC]);
        float ck = to_float(c.at[k]), sk = SIGN * to_float(s.at[k]);
        from_float(xa * ck - xb * sk, to[a / VEC].at[a % VEC]);
        from_float(xa * sk + xb * ck, to[b / VEC].at[b % VEC]);
    }
    write(y + first, to[0]);
    write(y + second, to[1]);
}

extern "C" __global__ void rope(const T *x, const C *cos, const C *sin, T *y) {
    if (packed(x) && packed(cos) && packed(sin)) rotate<true>(x, cos, sin, y);
    else rotate<false>(x, cos, sin, y);
}
