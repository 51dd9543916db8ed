// As product.cu, for every type and size: a block has 64 x 64 of y, a thread 4 x 4, sums are f32.
#define SIDE 64
#define DEEP 16
#define PITCH (SIDE + 4)
#define SIDES (SWIGLU ? 2 : 1)

extern "C" __global__ void __launch_bounds__(256) grouped_product(const T *x, const T *w, const int *offsets, const int *order,
#if SWIGLU
                                                                  const float *weights,
#endif
                                                                  T *y
#if KEPT
                                                                  , T *h
#endif
) {
    __shared__ __align__(16) float a[DEEP][PITCH], b[SIDES][DEEP][PITCH];
    const int across = (OUT + SIDE - 1) / SIDE;
    int tile = blockIdx.x / across, column = blockIdx.x % across * SIDE, expert = 0, first = 0, end = 0;
    for (;; expert++) {
        if (expert == EXPERTS) return;
        first = offsets[expert];
        end = offsets[expert + 1];
        int tiles = (end - first + SIDE - 1) / SIDE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    first += tile * SIDE;
    w += (u64)expert * K * OUT * SIDES;

    // A thread reads four neighbours: of row r from `piece` on; or, of w as it lies, of row k = deep.
    int r = threadIdx.x / 4, piece = threadIdx.x % 4 * 4, deep = threadIdx.x / 16, wide = threadIdx.x % 16 * 4;
    bool in = first + r < end;
    const T *row = x + (u64)(in ? GATHER ? order[first + r] / TOP : first + r : 0) * K;
    float sum[SIDES][4][4] = {};
    for (int k = 0; k < K; k += DEEP) {
        #pragma unroll
        for (int e = 0; e < 4; e++) a[piece + e][r] = in && k + piece + e < K ? to_float(row[k + piece + e]) : 0.0f;
        #pragma unroll
        for (int s = 0; s < SIDES; s++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                if (TRANSPOSED) {
                    bool live = column + r < OUT && k + piece + e < K;
                    b[s][piece + e][r] = live ? to_float(w[(u64)(s * OUT + column + r) * K + k + piece + e]) : 0.0f;
                } else {
                    bool live = k + deep < K && column + wide + e < OUT;
                    b[s][deep][wide + e] = live ? to_float(w[(u64)(k + deep) * OUT + column + wide + e]) : 0.0f;
                }
            }
        __syncthreads();
        #pragma unroll
        for (int d = 0; d < DEEP; d++) {
            float4 u = *(const float4 *)&a[d][deep * 4];
            float m[4] = {u.x, u.y, u.z, u.w};
            #pragma unroll
            for (int s = 0; s < SIDES; s++) {
                float4 v = *(const float4 *)&b[s][d][wide];
                float n[4] = {v.x, v.y, v.z, v.w};
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++) sum[s][i][j] += m[i] * n[j];
            }
        }
        __syncthreads();
    }

    #pragma unroll
    for (int i = 0; i < 4; i++) {
        int to = first + deep * 4 + i;
        if (to >= end) break;
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            int n = column + wide + j;
            if (n >= OUT) break;
#if SWIGLU
            float gate = sum[0][i][j], up = sum[1][i][j];
            from_float(weights[order[to]] * (gate / (1.0f + expf(-gate)) * up), y[(u64)to * OUT + n]);
#if KEPT
            from_float(gate, h[(u64)to * (2 * OUT) + n]);
            from_float(up, h[(u64)to * (2 * OUT) + OUT + n]);
#endif
#else
            from_float(sum[0][i][j], y[(u64)to * OUT + n]);
#endif
        }
    }
}
