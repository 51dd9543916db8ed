// One block rounds PIECE elements of one of COUNT tensors. Tensors start on multiples of 256 bytes and so do pieces.
extern "C" __global__ void cast_all(POINTERS) {
    const u32 starts[] = {STARTS};
    const u64 sizes[] = {SIZES};
    int tensor = 0;
    while (tensor + 1 < COUNT && blockIdx.x >= starts[tensor + 1]) tensor++;
    const X *x = 0;
    Y *y = 0;
    switch (tensor) { PICK }
    const u64 first = (u64)(blockIdx.x - starts[tensor]) * PIECE;
    const u64 end = first + PIECE < sizes[tensor] ? first + PIECE : sizes[tensor];
    u64 i = first + 4 * threadIdx.x;
    for (; i + 4 <= end; i += 4 * blockDim.x) {
        struct alignas(4 * sizeof(X)) In { X at[4]; };
        struct alignas(4 * sizeof(Y)) Out { Y at[4]; };
        const In a = *(const In *)(x + i);
        Out b;
        #pragma unroll
        for (int j = 0; j < 4; j++) from_float(to_float(a.at[j]), b.at[j]);
        *(Out *)(y + i) = b;
    }
    // At most three elements are left, of the thread whose turn it is.
    for (; i < end; i++) from_float(to_float(x[i]), y[i]);
}
