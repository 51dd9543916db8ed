// As outer.cu, for every type and size: a block has 64 x 64 of an expert's sum, over all of its rows, a thread 4 x 4.
#define SIDE 64
#define DEEP 16
#define PITCH (SIDE + 4)

extern "C" __global__ void __launch_bounds__(256) grouped_outer(const T *left, const T *right, const int *order, const int *offsets, float *y) {
    __shared__ __align__(16) float a[DEEP][PITCH], b[DEEP][PITCH];
    const int down = (M + SIDE - 1) / SIDE, across = (N + SIDE - 1) / SIDE;
    int expert = blockIdx.x / (down * across), m0 = blockIdx.x / across % down * SIDE, n0 = blockIdx.x % across * SIDE;
    int end = offsets[expert + 1], deep = threadIdx.x / 16, wide = threadIdx.x % 16 * 4;
    float sum[4][4] = {};
    for (int first = offsets[expert]; first < end; first += DEEP) {
        int row = first + deep;
        bool in = row < end;
        int token = in && (LEFT_BY_TOKEN || RIGHT_BY_TOKEN) ? order[row] / TOP : 0;
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            int m = m0 + wide + e, n = n0 + wide + e;
            a[deep][wide + e] = in && m < M ? to_float(left[(u64)(LEFT_BY_TOKEN ? token : row) * M + m]) : 0.0f;
            b[deep][wide + e] = in && n < N ? to_float(right[(u64)(RIGHT_BY_TOKEN ? token : row) * N + n]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll
        for (int d = 0; d < DEEP; d++) {
            float4 u = *(const float4 *)&a[d][deep * 4], v = *(const float4 *)&b[d][wide];
            float m[4] = {u.x, u.y, u.z, u.w}, n[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sum[i][j] += m[i] * n[j];
        }
        __syncthreads();
    }
    y += (u64)expert * M * N;
    #pragma unroll
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int m = m0 + deep * 4 + i, n = n0 + wide + j;
            if (m < M && n < N) y[(u64)m * N + n] = sum[i][j];
        }
}
