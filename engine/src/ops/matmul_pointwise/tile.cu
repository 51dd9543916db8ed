// a [HEADS, M, K] times b [HEADS, K, N] on tensor cores, and a pointwise expression on the result while it is in registers.
// A block keeps BN columns of b in shared memory and walks over tiles of BM rows of a; a warp has 32 x 32 of a tile. The
// expression's other inputs are loaded before the matmul starts, so that memory stays busy.
#define THREADS 256
#define BN COLUMNS
#define BM (8192 / BN)
#define TILES ((M + BM - 1) / BM)
#define ACROSS ((N + BN - 1) / BN)
#define KP ((K + 15) / 16 * 16)
#define PITCH (KP + 8) // eight rows, 16 bytes each, lie in different banks

// Permutes 32 columns so that a thread gets 8 adjacent ones: columns 8 p + 2 j and the next are columns 2 p and the next of the warp's j-th mma.
__device__ __forceinline__ u32 place(u32 n) { return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2; }

// COUNT vectors of K elements, `step` apart, of which those from `left` on are zeros. Vector v goes to row v of `to`, or to its place.
template <int COUNT, bool PLACED> __device__ __forceinline__ void load(T *to, const T *from, u64 step, u32 left) {
    u32 v = threadIdx.x / 8, k = threadIdx.x % 8 * 8;
    to += (PLACED ? place(v) : v) * PITCH + k;
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 32) {
        bool live = v + i < left;
        const T *vector = from + (live ? v + i : 0) * step;
#pragma unroll
        for (u32 j = 0; j < KP; j += 64)
            if (KP % 64 == 0 || k + j < KP) {
                bool inside = K == KP || k + j < K;
                copy16(to + i * PITCH + j, vector + (inside ? k + j : 0), live && inside);
            }
    }
}

// Columns that lie side by side; zeros where there are fewer than BN.
__device__ __forceinline__ void turn_columns(T *to, const T *b, u32 left) {
    // Neighbouring threads have neighbouring k, so that they write to different banks.
#pragma unroll 4
    for (u32 i = threadIdx.x; i < BN / 8 * (KP / 2); i += THREADS) {
        u32 n = i / (KP / 2) * 8, k = i % (KP / 2) * 2;
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (n < left && k < K) low = *(const uint4 *)(b + (u64)k * B_ROW + n), high = *(const uint4 *)(b + (u64)(k + 1) * B_ROW + n);
        u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 j = 0; j < 8; j++) *(u32 *)(to + place(n + j) * PITCH + k) = __byte_perm(l[j / 2], h[j / 2], j % 2 ? 0x7632 : 0x5410);
    }
}

__device__ __forceinline__ void load_rows(T *to, const T *a, u32 tile) {
    load<BM, false>(to, a + (u64)tile * BM * A_ROW, A_ROW, M - tile * BM);
    copies_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_pointwise(const T *a, const T *b, PARAMETERS) {
    extern __shared__ __align__(16) float shared[];
    T *columns = (T *)shared, *rows = columns + BN * PITCH; // rows [BUFFERS, BM, PITCH]
    const Pointers at = {POINTERS};
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 m_warp = warp / (BN / 32) * 32, n_warp = warp % (BN / 32) * 32;
    // Blocks of one head that run at the same time are at the same rows, which are then read from memory once.
    u32 part = blockIdx.x % (HEADS * ACROSS), head = part / ACROSS, n0 = part % ACROSS * BN;
    u32 tile = blockIdx.x / (HEADS * ACROSS), n = n0 + n_warp + lane % 4 * 8;
    a += (u64)head * A_HEAD;
    b += (u64)head * B_HEAD + (u64)n0 * B_COLUMN;
    if (B_ROW == 1) load<BN, true>(columns, b, B_COLUMN, N - n0);
    else turn_columns(columns, b, N - n0);
    load_rows(rows, a, tile);

    for (u32 buffer = 0; tile < TILES; tile += WALKERS) {
        // A thread's four rows of a tile, in each of which it has 8 columns.
        INDEX first = (INDEX)tile * BM + m_warp + lane / 4;
        const auto live = [&](int r) { return first + 8 * r < M && n < N; };
        const auto index = [&](int r) {
            INDEX m = first + 8 * r;
            return (HEADS_INSIDE ? m * HEADS + head : (INDEX)head * M + m) * N + n;
        };
        Sides sides[4];
#pragma unroll
        for (int r = 0; r < EARLY; r++)
            if (live(r)) fetch(at, index(r), sides[r]);
        copies_wait<0>();
        __syncthreads(); // this tile has arrived, and no warp reads the other buffer any more
        const T *left = rows + (buffer * BM + m_warp + lane % 16) * PITCH + lane / 16 * 8;
        const T *right = columns + (n_warp + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
        buffer = (buffer + 1) % BUFFERS;
        if (BUFFERS > 1 && tile + WALKERS < TILES) load_rows(rows + buffer * BM * PITCH, a, tile + WALKERS);

        float c[2][4][4] = {};
#pragma unroll
        for (int k = 0; k < KP; k += 16) {
            u32 x[2][4], y[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) matrices(x[i], left + 16 * i * PITCH + k), matrices(y[i], right + 16 * i * PITCH + k);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) mma<T>(c[i][2 * j], x[i], y[j][0], y[j][1]), mma<T>(c[i][2 * j + 1], x[i], y[j][2], y[j][3]);
        }
        if (BUFFERS == 1 && tile + WALKERS < TILES) {
            __syncthreads(); // nobody reads this tile any more
            load_rows(rows, a, tile + WALKERS);
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (live(r)) {
                if (r >= EARLY) fetch(at, index(r), sides[r]);
                float product[8];
#pragma unroll
                for (int j = 0; j < 8; j++) product[j] = c[r / 2][j / 2][r % 2 * 2 + j % 2];
                finish(at, index(r), sides[r], product);
            }
    }
}
