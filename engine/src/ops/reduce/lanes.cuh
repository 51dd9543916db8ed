// LANES threads own a row: a power of two up to 32, or the whole block. GROUPS rows a block.
__device__ __forceinline__ int row_lane() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_group() { return threadIdx.x / LANES; }

__device__ __forceinline__ float row_sum(float v) {
    if (LANES > 32) v = block_sum(v);
    for (int i = LANES > 32 ? 0 : LANES / 2; i > 0; i >>= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
    return v;
}
__device__ __forceinline__ float row_max(float v) {
    if (LANES > 32) v = block_max(v);
    for (int i = LANES > 32 ? 0 : LANES / 2; i > 0; i >>= 1) v = larger(v, __shfl_xor_sync(0xffffffffu, v, i));
    return v;
}
