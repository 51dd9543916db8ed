// The scan in chunks of 128 positions, on tensor cores, with everything between chunks computed first: `ssd_sums` (decays), `ssd_walk` (the state before every
// chunk), then one block for each chunk that goes through the heads of a group, `ssd_out` or `ssd_back`. What heads have in common (B, C, C B^T and the
// sums of dB and dC) is read, computed and written once. Decays are powers of two: sums of decays times log2(e) from the chunk's start on.
#define THREADS 256
#define CHUNK 128
#define CHUNKS ((TIME + CHUNK - 1) / CHUNK)
#define SHARED_BY (HEADS / GROUPS)      // heads of a group
#define HELD (SHARED_BY / PARTS)        // heads of a block
#define NUMBERS (4 * CHUNK)             // f32 of a head and chunk: dt, sums of decays, decay to the end times dt, decay from the start
#define LOG2_E 1.44269504f

// Position t in the order of the scan, as it lies in memory.
__device__ __forceinline__ int place(int t) { return REVERSE ? TIME - 1 - t : t; }

// Tiles have rows of WIDTH elements. Units of 16 bytes are permuted by row, so that the same unit of eight rows lies in different banks.
template <int WIDTH> __device__ __forceinline__ int at(int row, int unit) { return row * WIDTH + ((unit ^ (row & 7)) << 3); }

// Rows t0 .. t0 + CHUNK; row t lies at from + place(t) * step. Zeros beyond the last.
template <int WIDTH, bool PACKED> __device__ __forceinline__ void fetch_rows(T *tile, const T *from, u64 step, int t0) {
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * WIDTH / 8; i += THREADS) {
        int r = i / (WIDTH / 8), unit = i % (WIDTH / 8), t = t0 + r;
        bool live = t < TIME;
        const T *row = from + (u64)(live ? place(t) : 0) * step + unit * 8;
        T *to = tile + at<WIDTH>(r, unit);
        if (PACKED) copy16(to, row, live);
        else
            for (int j = 0; j < 8; j++) to[j] = live ? row[j] : T{};
    }
}

// A contiguous state [P, N].
__device__ __forceinline__ void fetch_state(T *tile, const T *from) {
#pragma unroll
    for (int i = threadIdx.x; i < P * N / 8; i += THREADS) copy16(tile + at<N>(i / (N / 8), i % (N / 8)), from + i * 8, true);
}

template <int MANY> __device__ __forceinline__ void fetch_numbers(float *to, const float *from) {
    if (threadIdx.x < MANY / 4) copy16(to + threadIdx.x * 4, from + threadIdx.x * 4, true);
}

// Fragments of 16 x 16. The left operand from rows [m][k], or from columns [k][m].
template <int WIDTH> __device__ __forceinline__ void left_rows(u32 a[4], const T *tile, int m, int k) {
    int lane = threadIdx.x % 32;
    matrices(a, tile + at<WIDTH>(m + lane % 16, k / 8 + lane / 16));
}
template <int WIDTH> __device__ __forceinline__ void left_columns(u32 a[4], const T *tile, int k, int m) {
    int lane = threadIdx.x % 32;
    matrices_t(a, tile + at<WIDTH>(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2));
}
// sum += a b of 16 x 16, with b [n][k], or b [k][n], in shared memory.
template <int WIDTH> __device__ __forceinline__ void rows_of(u32 b[4], const T *tile, int n, int k) {
    int lane = threadIdx.x % 32;
    matrices(b, tile + at<WIDTH>(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
}
template <int WIDTH> __device__ __forceinline__ void columns_of(u32 b[4], const T *tile, int k, int n) {
    int lane = threadIdx.x % 32;
    matrices_t(b, tile + at<WIDTH>(k + lane % 16, n / 8 + lane / 16));
}
__device__ __forceinline__ void product(float (*sum)[4], const u32 a[4], const u32 b[4]) {
    mma<T>(sum[0], a, b[0], b[1]), mma<T>(sum[1], a, b[2], b[3]);
}

__device__ __forceinline__ float low_of(u32 both) { return to_float(T{(unsigned short)both}); }
__device__ __forceinline__ float high_of(u32 both) { return to_float(T{(unsigned short)(both >> 16)}); }
__device__ __forceinline__ u32 times(u32 both, float low, float high) { return pack<T>(low_of(both) * low, high_of(both) * high); }

// Two adjacent elements of a tile, at an even column.
template <int WIDTH> __device__ __forceinline__ u32 pair_at(const T *tile, int row, int column) {
    return *(const u32 *)(tile + at<WIDTH>(row, column / 8) + column % 8);
}

// Over the four threads that share a row.
__device__ __forceinline__ float row_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// One of the two rows of a thread's sums of 16 x 32: each thread writes 16 bytes.
__device__ __forceinline__ void write_32(T *to, const float (*sum)[4], int half, bool live) {
    u32 p[4];
#pragma unroll
    for (int n = 0; n < 4; n++) p[n] = pack<T>(sum[n][2 * half], sum[n][2 * half + 1]);
    transpose(p);
    if (live) *(uint4 *)(to + threadIdx.x % 4 * 8) = make_uint4(p[0], p[1], p[2], p[3]);
}
