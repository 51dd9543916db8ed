// A block processes HELD heads of one sequence. First s = q q^T over chunks of xs, where SHARE warps share the tiles of a head's scores; then
// y = norm(s v), head by head, each warp with its part of the columns.
#define SHARE (WARPS / HELD)
#define OWN ((TRIANGLE + SHARE - 1) / SHARE) // tiles of a square for each warp
#define PER ((D_TILES + WARPS - 1) / WARPS)  // tiles of columns of v for each warp
#define AT_ONCE (12 / PER < 1 ? 1 : 12 / PER < TILES ? 12 / PER : TILES) // tiles of rows, so that 96 registers hold the sums

struct __align__(8) Moments { float mean, square; };

// Columns of a part.
__device__ __forceinline__ int columns(int part) {
    int tiles = D_TILES - part * PER;
    return D_TILES % WARPS == 0 || tiles >= PER ? 16 * PER : tiles > 0 ? 16 * tiles : 0;
}

// Adds what a head's chunk of q, from `chunk` on, gives to the tiles of warp PART.
template <int PART> __device__ __forceinline__ void multiply(float sum[OWN][2][4], const T *memory, int chunk, int lane) {
    const int first = PART * OWN, end = first + OWN < TRIANGLE ? first + OWN : TRIANGLE;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {
        u32 a[TILES][4];
        Rows rows(chunk, k, lane);
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (i <= column_of(end - 1)) matrices(a[i], rows.of(memory, i));
        // Fragments of rows as operand a are also fragments of columns as operand b.
#pragma unroll
        for (int i = first; i < end; i++) {
            const u32 *left = a[row_in(i)], *right = a[column_of(i)];
            mma<T>(sum[i - first][0], left, right[0], right[2]), mma<T>(sum[i - first][1], left, right[1], right[3]);
        }
    }
}

// Rounds the tiles of warp PART and puts them and their mirror images into shared memory.
template <int PART> __device__ __forceinline__ void put(T *scores, const float sum[OWN][2][4], int lane) {
    const int first = PART * OWN, end = first + OWN < TRIANGLE ? first + OWN : TRIANGLE;
#pragma unroll
    for (int i = first; i < end; i++) {
        int r = 16 * row_in(i), c = 16 * column_of(i);
        u32 a[4], m[4];
        rounded(a, sum[i - first], r / 16, c / 16, lane);
        mirrored(m, a);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = lane / 4 + j % 2 * 8, column = lane % 4 * 2 + j / 2 * 8;
            if (r + row < TIME) *(u32 *)(scores + (r + row) * PITCH + c + column) = a[j];
            if (r != c && c + row < TIME) *(u32 *)(scores + (c + row) * PITCH + r + column) = m[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
linear_attention(const T *xs, const float *cos, const float *sin, const T *v, T *y, float *rstd, T *s) {
    extern __shared__ __align__(16) float shared[];
    T *memory = (T *)shared, *values = memory + STAGES * HELD * HEAD;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 b = blockIdx.x / (HEADS / HELD), head = blockIdx.x % (HEADS / HELD) * HELD;
    const T *from = xs + (b * TIME * HEADS + head) * N;

    for (int i = threadIdx.x; i < TIME * (D / 8); i += THREADS)
        copy16(values + place(i / (D / 8), i % (D / 8), D_ROW), v + b * (TIME * D) + i * 8, true);
#pragma unroll
    for (int c = 0; c < STAGES - 1; c++) {
        if (c < CHUNKS) fetch(memory + c * HELD * HEAD, from, c);
        copies_commit();
    }
    Angles by[ROUNDS];
    angles(by, cos, sin, 0);

    float sum[OWN][2][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c++) {
        T *chunk = memory + stage * HELD * HEAD;
        copies_wait<STAGES - 2>();
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            int row, eight;
            if (!group(k, row, eight)) continue;
#pragma unroll
            for (int h = 0; h < HELD; h++) {
                Eight *at = (Eight *)(chunk + h * HEAD + place(row, eight, CHUNK));
                *at = rotated(*at, by[k]);
            }
        }
        __syncthreads();
        // All warps are done with the previous chunk: its memory is free.
        if (c + STAGES - 1 < CHUNKS) fetch(memory + (stage == 0 ? STAGES - 1 : stage - 1) * HELD * HEAD, from, c + STAGES - 1);
        copies_commit();
        if (c + 1 < CHUNKS) angles(by, cos, sin, c + 1);
        int own = (stage * HELD + warp / SHARE) * HEAD;
        if (warp % SHARE == 0) multiply<0>(sum, memory, own, lane);
        else multiply<SHARE - 1>(sum, memory, own, lane);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copies_wait<0>();
    __syncthreads();
    T *scores = memory + warp / SHARE * (TIME * PITCH);
    if (warp % SHARE == 0) put<0>(scores, sum, lane);
    else put<SHARE - 1>(scores, sum, lane);
    __syncthreads();
    s += (b * HEADS + head) * (TIME * SQUARE);
    for (int i = threadIdx.x; i < HELD * TIME * (SQUARE / 8); i += THREADS)
        *(Eight *)(s + i * 8) = *(const Eight *)(memory + i / (SQUARE / 8) * PITCH + i % (SQUARE / 8) * 8);

    Moments *moments = (Moments *)(memory + HELD * TIME * PITCH); // [HELD, WARPS, TIME]
#pragma unroll 1
    for (int h = 0; h < HELD; h++)
#pragma unroll 1
        for (int first = 0; first < TILES; first += AT_ONCE) {
            float r[AT_ONCE][PER][2][4] = {};
#pragma unroll 1
            for (int k = 0; k < TILES; k++) {
                u32 right[PER][4];
#pragma unroll
                for (int i = 0; i < PER; i++)
                    if (16 * i < columns(warp)) matrices_t(right[i], values + place(row_of(k, lane), 2 * (warp * PER + i) + lane / 16, D_ROW));
#pragma unroll
                for (int m = 0; m < AT_ONCE; m++) {
                    u32 left[4];
                    matrices(left, memory + (h * TIME + row_of(first + m, lane)) * PITCH + 16 * k + lane / 16 * 8);
#pragma unroll
                    for (int i = 0; i < PER; i++)
                        if (16 * i < columns(warp))
                            mma<T>(r[m][i][0], left, right[i][0], right[i][1]), mma<T>(r[m][i][1], left, right[i][2], right[i][3]);
                }
            }
            if (NORM) {
                // Mean and squares of the own columns, for those of all.
#pragma unroll
                for (int m = 0; m < AT_ONCE; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float mean = 0.0f, square = 0.0f;
#pragma unroll
                        for (int i = 0; i < PER; i++)
                            if (16 * i < columns(warp))
                                mean += r[m][i][0][2 * half] + r[m][i][0][2 * half + 1] + r[m][i][1][2 * half] + r[m][i][1][2 * half + 1];
                        mean += __shfl_xor_sync(0xffffffffu, mean, 1);
                        mean += __shfl_xor_sync(0xffffffffu, mean, 2);
                        mean *= 1.0f / (columns(warp) > 0 ? columns(warp) : 1);
#pragma unroll
                        for (int i = 0; i < PER; i++)
#pragma unroll
                            for (int n = 0; n < 4; n++) {
                                float x = r[m][i][n / 2][2 * half + n % 2] - mean;
                                if (16 * i < columns(warp)) square += x * x;
                            }
                        square += __shfl_xor_sync(0xffffffffu, square, 1);
                        square += __shfl_xor_sync(0xffffffffu, square, 2);
                        int row = 16 * (first + m) + 8 * half + lane / 4;
                        if (lane % 4 == 0 && row < TIME) moments[(h * WARPS + warp) * TIME + row] = Moments{mean, square};
                    }
                __syncthreads();
            }
#pragma unroll
            for (int m = 0; m < AT_ONCE; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = 16 * (first + m) + 8 * half + lane / 4;
                    if (row >= TIME) continue;
                    u64 line = ((head + h) * BATCH + b) * TIME + row;
                    float mean = 0.0f, square = 0.0f, scale = 1.0f;
                    if (NORM) {
#pragma unroll
                        for (int w = 0; w < WARPS; w++) mean += moments[(h * WARPS + w) * TIME + row].mean * (columns(w) * (1.0f / D));
#pragma unroll
                        for (int w = 0; w < WARPS; w++) {
                            Moments of = moments[(h * WARPS + w) * TIME + row];
                            square += of.square + columns(w) * (of.mean - mean) * (of.mean - mean);
                        }
                        scale = rsqrtf(square * (1.0f / D) + EPS);
                        if (warp == 0 && lane % 4 == 0) rstd[line] = scale;
                    }
#pragma unroll
                    for (int i = 0; i < PER; i++)
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            const float *of = r[m][i][n] + 2 * half;
                            T *to = y + line * D + 16 * (warp * PER + i) + 8 * n + lane % 4 * 2;
                            if (16 * i < columns(warp)) *(u32 *)to = pack<T>((of[0] - mean) * scale, (of[1] - mean) * scale);
                        }
                }
        }
}
