// Of every four adjacent numbers the two of largest magnitude; of equal ones the first. A thread has four.
extern "C" __global__ void sparse_24(const T *x, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= GROUPS) return;
    Pack<T> all = packed(x) ? read<true>(x + 4 * i) : read<false>(x + 4 * i);
    u32 size[4]; // the bits of magnitudes: ordered as they are, NaN last
#pragma unroll
    for (int k = 0; k < 4; k++) size[k] = __float_as_uint(to_float(all.at[k])) & 0x7fffffffu;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int before = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) before += size[j] > size[k] || (size[j] == size[k] && j < k);
        if (before >= 2) from_float(0.0f, all.at[k]);
    }
    write(y + 4 * i, all);
}
