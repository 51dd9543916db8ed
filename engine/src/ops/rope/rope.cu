// x [places, HEADS, D]; cos, sin [TABLE, D / 2]; one thread a pair.
extern "C" __global__ void rope(const T *x, const C *cos, const C *sin, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)PAIRS) return;
    const int half = D / 2;
    int j = i % half;
    u64 row = i / half; // place * HEADS + head
    u64 table = (row / HEADS) % TABLE * half + j;
    float c = to_float(cos[table]), s = SIGN * to_float(sin[table]);
    u64 a = row * D + (ADJACENT ? 2 * j : j), b = a + (ADJACENT ? 1 : half);
    float xa = to_float(x[a]), xb = to_float(x[b]);
    from_float(xa * c - xb * s, y[a]);
    from_float(xa * s + xb * c, y[b]);
}
