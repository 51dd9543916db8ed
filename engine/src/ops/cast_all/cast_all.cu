// One block rounds PIECE elements of one of COUNT tensors. Tensors start on multiples of 256 bytes and so do pieces.
struct alignas(4 * sizeof(X)) In { X at[4]; };
struct alignas(4 * sizeof(Y)) Out { Y at[4]; };

extern "C" __global__ void __launch_bounds__(256) cast_all(POINTERS) {
    constexpr u32 starts[] = {STARTS};
    constexpr u64 sizes[] = {SIZES};
    const X *x = 0;
    Y *y = 0;
    u64 first = 0, size = 0;
    #pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (blockIdx.x >= starts[k]) {
            switch (k) { PICK }
            first = (u64)(blockIdx.x - starts[k]) * PIECE;
            size = sizes[k];
        }
    // All reads are on their way before the first is used.
    constexpr int EACH = PIECE / 1024;
    In a[EACH];
    #pragma unroll
    for (int r = 0; r < EACH; r++) {
        u64 i = first + r * 1024 + 4 * threadIdx.x;
        if (i + 4 <= size) a[r] = *(const In *)(x + i);
    }
    #pragma unroll
    for (int r = 0; r < EACH; r++) {
        u64 i = first + r * 1024 + 4 * threadIdx.x;
        if (i + 4 <= size) {
            Out b;
            #pragma unroll
            for (int j = 0; j < 4; j++) from_float(to_float(a[r].at[j]), b.at[j]);
            *(Out *)(y + i) = b;
        } else {
            for (; i < size; i++) from_float(to_float(x[i]), y[i]);
        }
    }
}
