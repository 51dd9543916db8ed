// Attention in f32 for any type and head size. 256 threads as 16 x 16; a thread owns R x R scores of a tile of TILE queries and
// TILE keys, and R rows of a result with every sixteenth column.
#define TILE (16 * R)
#define WIDE ((D + 15) / 16)
#define PITCH (16 * WIDE + 1) // odd: the rows of a column lie in different banks
#define SQUARE (TILE + 1)
#define GROUP (HEADS / KV)
#define QUERY_TILES ((TIME + TILE - 1) / TILE)
#define KEY_TILES ((KEYS + TILE - 1) / TILE)

// How many keys query t sees.
__device__ __forceinline__ int seen(int t) {
    int n = CAUSAL ? t + 1 + KEYS - TIME : KEYS;
    return n < KEYS ? n : KEYS;
}

// Row t of a head lies at from + t * step. Zeros beyond `rows` and beyond D.
template <class T> __device__ __forceinline__ void load(float *tile, const T *from, u64 step, int first, int rows) {
    for (int i = threadIdx.x; i < TILE * 16 * WIDE; i += 256) {
        int r = i / (16 * WIDE), c = i % (16 * WIDE);
        tile[r * PITCH + c] = first + r < rows && c < D ? to_float(from[(first + r) * step + c]) : 0.0f;
    }
}

// out[a][b] = row (ty + 16 a) of A times row (tx + 16 b) of B.
__device__ __forceinline__ void dots(float out[R][R], const float *A, const float *B, int ty, int tx) {
    for (int a = 0; a < R; a++)
        for (int b = 0; b < R; b++) out[a][b] = 0.0f;
#pragma unroll 4
    for (int i = 0; i < D; i++) {
        float x[R], y[R];
#pragma unroll
        for (int a = 0; a < R; a++) x[a] = A[(ty + 16 * a) * PITCH + i], y[a] = B[(tx + 16 * a) * PITCH + i];
#pragma unroll
        for (int a = 0; a < R; a++)
#pragma unroll
            for (int b = 0; b < R; b++) out[a][b] += x[a] * y[b];
    }
}

// sum[a][c] += row (ty + 16 a) of P [TILE, TILE] times column (tx + 16 c) of B [TILE, D].
__device__ __forceinline__ void add_product(float sum[R][WIDE], const float *P, const float *B, int ty, int tx) {
#pragma unroll 2
    for (int i = 0; i < TILE; i++) {
        float p[R];
#pragma unroll
        for (int a = 0; a < R; a++) p[a] = P[(ty + 16 * a) * SQUARE + i];
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            float x = B[i * PITCH + tx + 16 * c];
#pragma unroll
            for (int a = 0; a < R; a++) sum[a][c] += p[a] * x;
        }
    }
}

template <class T> __device__ __forceinline__ void store(T *to, u64 step, int first, int rows, float sum[R][WIDE], float factor, int ty, int tx) {
#pragma unroll
    for (int a = 0; a < R; a++)
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            int t = first + ty + 16 * a, i = tx + 16 * c;
            if (t < rows && i < D) from_float(factor * sum[a][c], to[t * step + i]);
        }
}
