// Attention with tensor cores: 4 warps, each with 16 M rows of a tile (M_Q of queries, M_K of keys). A row is [D] of T; sums are f32.
#define PITCH (D + 8) // eight rows, 16 bytes each, lie in different banks
#define STEPS (D / 16)
#ifndef THREADS
#define THREADS 128
#endif

// A tile of 64 keys that some query from t0 on sees, and the least `until` in it.
struct Seen { int first, least; };

// The first such tile from key `first` on; none if it is `last` or more.
__device__ __forceinline__ Seen seen_from(const int *limits, int first, int last, int t0, int lane) {
    Seen s = {first, TIME};
    for (; MASKED && s.first < last; s.first += 64) {
        Reach r = reach<64>(limits, s.first, lane);
        s.least = r.least;
        if (r.most >= t0) break;
    }
    return s;
}

// COUNT rows from row `first` on; row t lies at from + t * step. Zeros beyond `rows`.
template <int COUNT> __device__ __forceinline__ void load(T *tile, const T *from, u64 step, int first, int rows) {
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * (D / 8); i += THREADS) {
        int r = i / (D / 8), c = i % (D / 8) * 8;
        bool live = first + r < rows;
        const T *row = from + (live ? first + r : 0) * step + c;
        if (PACKED) copy16(tile + r * PITCH + c, row, live);
        for (int j = 0; !PACKED && j < 8; j++) tile[r * PITCH + c + j] = live ? row[j] : T{};
    }
}

// Rows of a tile as operand a; step i of D.
__device__ __forceinline__ void load_a(u32 a[4], const T *tile, int i, int lane) {
    matrices(a, tile + lane % 16 * PITCH + 16 * i + lane / 16 * 8);
}

// s += a (16 M rows) times rows 0 .. 8 N of `tile`. Where a is not KEPT in registers it comes from `rows`.
template <int M, int N, bool KEPT>
__device__ __forceinline__ void by_rows(float s[M][N][4], const u32 a[M][KEPT ? STEPS : 1][4], const T *rows, const T *tile, int lane) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!KEPT) load_a(left[m], rows + 16 * m * PITCH, i, lane);
            for (int j = 0; KEPT && j < 4; j++) left[m][j] = a[m][KEPT ? i : 0][j];
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            matrices(b, tile + (8 * n + lane % 8 + lane / 16 * 8) * PITCH + 16 * i + lane / 8 % 2 * 8);
#pragma unroll
            for (int m = 0; m < M; m++) mma<T>(s[m][n], left[m], b[0], b[1]), mma<T>(s[m][n + 1], left[m], b[2], b[3]);
        }
    }
}

// sum += w (16 M rows, 16 N columns) times rows 0 .. 16 N of `tile`.
template <int M, int N>
__device__ __forceinline__ void by_columns(float sum[M][D / 8][4], const u32 w[M][N][4], const T *tile, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 b[4];
            matrices_t(b, tile + (16 * n + lane % 16) * PITCH + 16 * i + lane / 16 * 8);
#pragma unroll
            for (int m = 0; m < M; m++) mma<T>(sum[m][2 * i], w[m][n], b[0], b[1]), mma<T>(sum[m][2 * i + 1], w[m][n], b[2], b[3]);
        }
}

// 16 M rows of sums, from row `first` on; row t goes to to + t * step.
template <int M>
__device__ __forceinline__ void store(T *to, u64 step, int first, int rows, float sum[M][D / 8][4], float factor, int lane) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = first + 16 * m + 8 * half + lane / 4;
            if (t < rows)
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    *(u32 *)(to + t * step + 8 * n + lane % 4 * 2) = pack<T>(factor * sum[m][n][2 * half], factor * sum[m][n][2 * half + 1]);
        }
}
