// The scan in chunks of CHUNK = 16 WARPS positions (see mod.rs). A block has WARPS warps; of what is as long as a chunk, each has 16 rows. Tiles in
// shared memory are padded with zeros to multiples of 16. Decays are powers of two: sums of decays times log2(e) from the chunk's start on.
#define THREADS (32 * WARPS)
#define CHUNK (16 * WARPS)
#define CHUNKS ((TIME + CHUNK - 1) / CHUNK)
#define P_TILES ((P + 15) / 16)
#define N_TILES ((N + 15) / 16)
#define P_PITCH (16 * P_TILES + 8)  // elements of a row; eight rows, 16 bytes each, lie in different banks
#define N_PITCH (16 * N_TILES + 8)
#define UNITS (P_TILES * N_TILES)   // 16 x 16 tiles of a state [P, N]
#define OWN ((UNITS + WARPS - 1) / WARPS)
#define SHARED_BY (HEADS / GROUPS)  // heads of a group
#define LOG2_E 1.44269504f

// Position t in the order of the scan, as it lies in memory.
__device__ __forceinline__ int place(int t) { return REVERSE ? TIME - 1 - t : t; }

__device__ __forceinline__ float two_to(float x) {
#ifdef WIDE
    return exp2f(x);
#else
    return power_of_two(x);
#endif
}

// Rows t0 .. t0 + CHUNK of COLUMNS elements; row t lies at from + place(t) * step. Zeros beyond the last.
template <int COLUMNS, int PITCH, bool PACKED> __device__ __forceinline__ void load(T *tile, const T *from, u64 step, int t0) {
    const int EIGHTS = (PITCH - 8) / 8;
    for (int i = threadIdx.x; i < CHUNK * EIGHTS; i += THREADS) {
        int r = i / EIGHTS, c = i % EIGHTS * 8, t = t0 + r;
        bool live = t < TIME;
        const T *row = from + (u64)(live ? place(t) : 0) * step;
        T *to = tile + r * PITCH + c;
        if (PACKED) {
            live = live && c < COLUMNS;
#pragma unroll
            for (int j = 0; j < 8; j += 16 / (int)sizeof(T)) copy16(to + j, row + (c < COLUMNS ? c + j : 0), live);
        } else
            for (int j = 0; j < 8; j++) to[j] = live && c + j < COLUMNS ? row[c + j] : T{};
    }
}

// Operands of a product of 16 x 16 tiles. The left one is read from rows [m][k] or from columns [k][m] of shared memory, or rounded from sums; its k may
// be multiplied by one number each.
#ifdef WIDE
struct Left { const float *at, *by; int row, column; };
#define SCRATCH 16 * 17 // floats of each warp
__device__ __forceinline__ Left left_rows(const T *tile, int pitch, int m, int k) { return Left{tile + m * pitch + k, 0, pitch, 1}; }
__device__ __forceinline__ Left left_columns(const T *tile, int pitch, int k, int m, const float *by) { return Left{tile + k * pitch + m, by + k, 1, pitch}; }
__device__ __forceinline__ Left left_sums(const float sum[2][4], float *scratch, int lane) {
    __syncwarp();
    for (int n = 0; n < 2; n++)
        for (int j = 0; j < 4; j++) scratch[(lane / 4 + j / 2 * 8) * 17 + 8 * n + lane % 4 * 2 + j % 2] = sum[n][j];
    __syncwarp();
    return Left{scratch, 0, 17, 1};
}
__device__ __forceinline__ void product(float sum[2][4], const Left &a, const float *b, int k_step, int n_step, int lane) {
#pragma unroll 1
    for (int k = 0; k < 16; k++) {
        float by = a.by ? a.by[k] : 1.0f, low = by * a.at[lane / 4 * a.row + k * a.column], high = by * a.at[(lane / 4 + 8) * a.row + k * a.column];
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 2; j++) {
                float right = b[k * k_step + (8 * n + lane % 4 * 2 + j) * n_step];
                sum[n][j] += low * right, sum[n][2 + j] += high * right;
            }
    }
}
// sum += a b, with b [n][k] in shared memory.
__device__ __forceinline__ void by_rows(float sum[2][4], const Left &a, const T *tile, int pitch, int n, int k, int lane) {
    product(sum, a, tile + n * pitch + k, 1, pitch, lane);
}
// The same with b [k][n].
__device__ __forceinline__ void by_columns(float sum[2][4], const Left &a, const T *tile, int pitch, int k, int n, int lane) {
    product(sum, a, tile + k * pitch + n, pitch, 1, lane);
}
#else
struct Left { u32 of[4]; };
#define SCRATCH 0
__device__ __forceinline__ Left left_rows(const T *tile, int pitch, int m, int k) {
    int lane = threadIdx.x % 32;
    Left a;
    matrices(a.of, tile + (m + lane % 16) * pitch + k + lane / 16 * 8);
    return a;
}
__device__ __forceinline__ u32 times(u32 both, float low, float high) {
    return pack<T>(to_float(T{(unsigned short)both}) * low, to_float(T{(unsigned short)(both >> 16)}) * high);
}
__device__ __forceinline__ Left left_columns(const T *tile, int pitch, int k, int m, const float *by) {
    int lane = threadIdx.x % 32;
    Left a;
    matrices_t(a.of, tile + (k + lane % 8 + lane / 16 * 8) * pitch + m + lane / 8 % 2 * 8);
    by += k + lane % 4 * 2;
    a.of[0] = times(a.of[0], by[0], by[1]), a.of[1] = times(a.of[1], by[0], by[1]);
    a.of[2] = times(a.of[2], by[8], by[9]), a.of[3] = times(a.of[3], by[8], by[9]);
    return a;
}
__device__ __forceinline__ Left left_sums(const float sum[2][4], float *, int) {
    Left a;
#pragma unroll
    for (int j = 0; j < 4; j++) a.of[j] = pack<T>(sum[j / 2][j % 2 * 2], sum[j / 2][j % 2 * 2 + 1]);
    return a;
}
// sum += a b, with b [n][k] in shared memory.
__device__ __forceinline__ void by_rows(float sum[2][4], const Left &a, const T *tile, int pitch, int n, int k, int lane) {
    u32 b[4];
    matrices(b, tile + (n + lane % 8 + lane / 16 * 8) * pitch + k + lane / 8 % 2 * 8);
    mma<T>(sum[0], a.of, b[0], b[1]), mma<T>(sum[1], a.of, b[2], b[3]);
}
// The same with b [k][n].
__device__ __forceinline__ void by_columns(float sum[2][4], const Left &a, const T *tile, int pitch, int k, int n, int lane) {
    u32 b[4];
    matrices_t(b, tile + (k + lane % 16) * pitch + n + lane / 16 * 8);
    mma<T>(sum[0], a.of, b[0], b[1]), mma<T>(sum[1], a.of, b[2], b[3]);
}
#endif

// Row and column of number j of a thread's sums, in 16 x 8.
__device__ __forceinline__ int row_of(int j, int lane) { return lane / 4 + j / 2 * 8; }
__device__ __forceinline__ int column_of(int j, int lane) { return lane % 4 * 2 + j % 2; }

// Over the four threads that share a row.
__device__ __forceinline__ float row_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// What a chunk's steps amount to, one number a position.
struct Decays { float *dt, *sum, *from_start, *to_end; }; // to_end: with dt as a factor where that is asked for
#define DECAYS (4 * CHUNK)

// The decays of the chunk at t0; ends with a barrier, also for copies that were waited for.
__device__ __forceinline__ void decays_of(const Decays &of, const float *dt, const float *decay, int t0, bool with_dt) {
    int lane = threadIdx.x;
    float total = 0.0f;
    for (int i = lane; threadIdx.x < 32 && i - lane < CHUNK; i += 32) {
        bool live = i < CHUNK && t0 + i < TIME;
        u64 at = (u64)(live ? place(t0 + i) : 0) * HEADS;
        float v = live ? decay[at] * LOG2_E : 0.0f;
        if (i < CHUNK) of.dt[i] = live ? dt[at] : 0.0f;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            float other = __shfl_up_sync(0xffffffffu, v, by);
            if (lane >= by) v += other;
        }
        v += total;
        if (i < CHUNK) of.sum[i] = v, of.from_start[i] = two_to(v);
        total = __shfl_sync(0xffffffffu, v, 31);
    }
    for (int i = lane; threadIdx.x < 32 && i < CHUNK; i += 32) of.to_end[i] = two_to(total - of.sum[i]) * (with_dt ? of.dt[i] : 1.0f);
    __syncthreads();
}

// A state [P, N] in registers: unit `warp OWN + k` is number k of a warp, so that its units share rows.
typedef float State[OWN][2][4];
#define EVEN (UNITS % (OWN * WARPS) == 0)

// state = keep * state + sum over positions of by * left [P] right [N].
__device__ __forceinline__ void advance(State state, float keep, const T *left, const T *right, const float *by, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < OWN; k++)
#pragma unroll
        for (int j = 0; j < 8; j++) state[k][j / 4][j % 4] *= keep;
#ifdef WIDE
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int t = 0; t < CHUNK; t += 16) {
        Left rows;
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            int unit = warp * OWN + k, m = unit / N_TILES * 16, n = unit % N_TILES * 16;
            if (!EVEN && unit >= UNITS) continue;
            if (k == 0 || N_TILES % OWN != 0) rows = left_columns(left, P_PITCH, t, m, by);
            by_columns(state[k], rows, right, N_PITCH, t, n, lane);
        }
    }
}

// The state, rounded, as a tile [P][N].
__device__ __forceinline__ void write_state(T *tile, const State state, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        int unit = warp * OWN + k, m = unit / N_TILES * 16, n = unit % N_TILES * 16;
        if (!EVEN && unit >= UNITS) continue;
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            from_floats(state[k][j / 4][j % 4], state[k][j / 4][j % 4 + 1], tile + (m + row_of(j % 4, lane)) * N_PITCH + n + j / 4 * 8 + lane % 4 * 2);
    }
}

// A state as f32 in memory, as the threads hold it: [UNITS, 32, 8].
#define STATE (UNITS * 256)
__device__ __forceinline__ void read_start(State state, const float *from, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        int unit = warp * OWN + k;
#pragma unroll
        for (int j = 0; j < 8; j++) state[k][j / 4][j % 4] = unit < UNITS ? from[unit * 256 + lane * 8 + j] : 0.0f;
    }
}
