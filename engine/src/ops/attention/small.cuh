// Attention for small heads: shared memory holds all keys and values of one.

// Where 8 elements of a row lie in shared memory: swizzled instead of padded, so that eight rows are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * D + (chunk ^ row / (64 / D) % (D / 8)) * 8; }

// 16 rows from row `first` on as a, step i of D; row t lies at from + t * step. Zeros beyond `rows`.
__device__ __forceinline__ void fetch_a(u32 a[4], const T *from, u64 step, int first, int rows, int i, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int row = first + lane / 4 + j % 2 * 8;
        a[j] = row < rows ? *(const u32 *)(from + row * step + 16 * i + lane % 4 * 2 + j / 2 * 8) : 0;
    }
}
