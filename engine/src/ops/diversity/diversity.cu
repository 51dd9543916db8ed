// e [SETS, N, D]: for each set the mean over pairs of 1 - cosine. With u the normalized vectors, |sum of u|^2 = sum of |u|^2 + 2 (sum of u_i u_j over
// pairs). A block has a set, each of its GROUPS groups every GROUPS-th vector, UNROLL of them in flight at once.

// Over the block; the order is fixed.
__device__ __forceinline__ double block_sum_wide(double v) {
    __shared__ double parts[32];
    for (int i = 16; i > 0; i >>= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0;
    for (int w = 0; w < LANES * GROUPS / 32; w++) v += parts[w];
    __syncthreads();
    return v;
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) diversity(const T *e, float *y) {
    extern __shared__ float sums[]; // [GROUPS, D] where there is more than one
    e += (u64)blockIdx.x * N * D;
    Vector sum = {};
    float squares = 0.0f;
    for (int i0 = row_group(); i0 < N; i0 += GROUPS * UNROLL) {
        Vector v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i0 + k * GROUPS < N) v[k].load(e + (u64)(i0 + k * GROUPS) * D);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i0 + k * GROUPS >= N) break; // the whole group
            float square = v[k].dot(v[k]), inverse = inverse_length(square);
            squares += square * inverse * inverse;
#pragma unroll
            for (int i = 0; i < PER * VEC; i++) sum.at[i] += v[k].at[i] * inverse;
        }
    }
    double all = 0.0;
    if (GROUPS == 1) {
#pragma unroll
        for (int i = 0; i < PER * VEC; i++) all += (double)sum.at[i] * sum.at[i];
    } else {
#pragma unroll
        for (int i = 0; i < PER * VEC; i++) {
            int d = (i / VEC * LANES + row_lane()) * VEC + i % VEC;
            if (d < D) sums[row_group() * D + d] = sum.at[i];
        }
        __syncthreads();
        for (int d = threadIdx.x; d < D; d += LANES * GROUPS) {
            float s = 0.0f;
            for (int g = 0; g < GROUPS; g++) s += sums[g * D + d];
            all += (double)s * s;
        }
    }
    double pairs = block_sum_wide(all - (row_lane() == 0 ? squares : 0.0f));
    if (threadIdx.x == 0) y[blockIdx.x] = (float)(1.0 - pairs / ((double)N * (N - 1)));
}
