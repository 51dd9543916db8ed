// The block's sum [D] of what its threads hold, each for VEC columns from column(p) on, none where that is past the row: first the rows of a
// warp, then the warps in order. `shared` [WARPS, D] is used where a row belongs to a warp or less; otherwise a column is one thread's.
template <int COUNT, typename F> __device__ __forceinline__ void leave(float (&held)[COUNT][VEC], F column, float *partial, float *shared) {
    if (LANES > 32) {
        #pragma unroll
        for (int p = 0; p < COUNT; p++)
            for (int i = 0; i < VEC && column(p) < D; i++) partial[column(p) + i] = held[p][i];
        return;
    }
    __syncthreads();
    #pragma unroll
    for (int p = 0; p < COUNT; p++)
        for (int i = 0; i < VEC; i++) {
            float v = held[p][i];
            for (int other = LANES; other < 32; other <<= 1) v += __shfl_xor_sync(0xffffffffu, v, other);
            if (threadIdx.x % 32 < LANES && column(p) < D) shared[threadIdx.x / 32 * D + column(p) + i] = v;
        }
    __syncthreads();
    for (int column = threadIdx.x; column < D; column += blockDim.x) {
        float v = 0.0f;
        for (int warp = 0; warp < WARPS; warp++) v += shared[warp * D + column];
        partial[column] = v;
    }
}
