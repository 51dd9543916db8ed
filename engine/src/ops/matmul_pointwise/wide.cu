// a [HEADS, M, K] times b [HEADS, K, N] by Hopper's products of four warps, which read both from shared memory, and arithmetic on the result
// while it is in registers. A block keeps BN columns of b and walks over tiles of BM rows of a. What the arithmetic reads beside the
// product is asked for before the product begins, so that memory is busy meanwhile.
#define THREADS 128
#define BM 64
#define BN 128
#define TILES ((M + BM - 1) / BM)
#define ACROSS ((N + BN - 1) / BN)
#define KC ((K + 63) / 64) // chunks of 64 of K: 128 bytes a row
#define PACKS (BN / 32)

// Where element k of row r lies among `rows` rows: chunk by chunk, and within a chunk the eights of a row in another order for each of
// eight rows, as the products expect them (128-byte swizzle).
__device__ __forceinline__ u32 spot(u32 rows, u32 r, u32 k) { return (k / 64 * rows + r) * 64 + ((k / 8 % 8) ^ (r % 8)) * 8 + k % 8; }

// Of 32 columns, a thread gets 8 neighbours: columns 8 p + 2 j and the next are columns 2 p and the next of the j-th eight.
__device__ __forceinline__ u32 place(u32 n) { return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2; }

// COUNT vectors of K elements, `step` apart, of which those from `left` on are zeros. Vector v goes to row v of `to`, or to its place.
template <int COUNT, bool PLACED> __device__ __forceinline__ void load(T *to, const T *from, u64 step, u32 left) {
    u32 v = threadIdx.x / 8, k = threadIdx.x % 8 * 8;
#pragma unroll 4
    for (u32 i = 0; i < COUNT; i += THREADS / 8) {
        bool live = v + i < left;
        const T *vector = from + (live ? v + i : 0) * step;
#pragma unroll
        for (u32 j = 0; j < KC * 64; j += 64) {
            bool inside = K % 64 == 0 || k + j < K;
            copy16(to + spot(COUNT, PLACED ? place(v + i) : v + i, k + j), vector + (inside ? k + j : 0), live && inside);
        }
    }
}

// Columns that lie side by side; zeros where there are fewer than BN.
__device__ __forceinline__ void turn_columns(T *to, const T *b, u32 left) {
    // Neighbouring threads have neighbouring k, so that they write to different banks.
#pragma unroll 4
    for (u32 i = threadIdx.x; i < BN / 8 * (KC * 32); i += THREADS) {
        u32 n = i / (KC * 32) * 8, k = i % (KC * 32) * 2;
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (n < left && k < K) low = *(const uint4 *)(b + (u64)k * B_ROW + n), high = *(const uint4 *)(b + (u64)(k + 1) * B_ROW + n);
        u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 j = 0; j < 8; j++) *(u32 *)(to + spot(BN, place(n + j), k)) = __byte_perm(l[j / 2], h[j / 2], j % 2 ? 0x7632 : 0x5410);
    }
}

__device__ __forceinline__ void load_rows(T *to, const T *a, u32 tile) {
    load<BM, false>(to, a + (u64)tile * BM * A_ROW, A_ROW, M - tile * BM);
    copies_commit();
}

// This thread's copies are there, and products see them.
__device__ __forceinline__ void copies_arrive() {
    copies_wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What a product is told about a matrix in shared memory: its address, 1024 bytes from eight rows to the next, 128-byte swizzle.
__device__ __forceinline__ u64 described(const T *p) { return (u64)(shared_address(p) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// c (64 x 128, four warps) = a b, plus c unless `first`. Rows and columns are held as by mma, 16 rows a warp.
__device__ __forceinline__ void multiply(float c[64], u64 a, u64 b, bool first) {
    asm volatile("{ .reg .pred more; setp.eq.b32 more, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
                 "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, more, 1, 1, 0, 0; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
                   "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
                   "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
                   "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
                   "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
                   "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
                   "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
                   "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
                 : "l"(a), "l"(b), "r"((int)first));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_pointwise(const T *a, const T *b, PARAMETERS) {
    extern __shared__ __align__(1024) float shared[];
    T *columns = (T *)shared, *rows = columns + BN * (KC * 64);
    const Pointers at = {POINTERS};
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Blocks of one head that run at the same time are at the same rows, which are then read from memory once.
    u32 part = blockIdx.x % (HEADS * ACROSS), head = part / ACROSS, n0 = part % ACROSS * BN;
    u32 tile = blockIdx.x / (HEADS * ACROSS), n = n0 + lane % 4 * 8;
    a += (u64)head * A_HEAD;
    b += (u64)head * B_HEAD + (u64)n0 * B_COLUMN;
    if (B_ROW == 1) load<BN, true>(columns, b, B_COLUMN, N - n0);
    else turn_columns(columns, b, N - n0);
    load_rows(rows, a, tile);
    copies_arrive();

    for (; tile < TILES; tile += WALKERS) {
        // A thread's two rows of a tile, in each of which it has 8 columns of every 32.
        INDEX first = (INDEX)tile * BM + warp * 16 + lane / 4;
        const auto live = [&](int i) { return first + 8 * (i % 2) < M && n + 32 * (i / 2) < N; };
        const auto index = [&](int i) {
            INDEX m = first + 8 * (i % 2);
            return (HEADS_INSIDE ? m * HEADS + head : (INDEX)head * M + m) * N + (n + 32 * (i / 2));
        };
        Sides sides[2 * PACKS];
#pragma unroll
        for (int i = 0; i < EARLY; i++)
            if (live(i)) fetch(at, index(i), sides[i]);
        __syncthreads(); // this tile is there
        float c[64];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < KC * 64; k += 16)
            multiply(c, described(rows + k / 64 * (BM * 64) + k % 64), described(columns + k / 64 * (BN * 64) + k % 64), k == 0);
        asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads(); // nobody reads this tile any more
        if (tile + WALKERS < TILES) load_rows(rows, a, tile + WALKERS);
#pragma unroll
        for (int i = 0; i < 2 * PACKS; i++) {
            if (i == PACKS) copies_arrive(); // waits for what this thread wrote, too: not with all of a tile's results on their way
            if (!live(i)) continue;
            if (i >= EARLY) fetch(at, index(i), sides[i]);
            float product[8];
#pragma unroll
            for (int j = 0; j < 8; j++) product[j] = c[(i / 2 * 4 + j / 2) * 4 + i % 2 * 2 + j % 2];
            finish(at, index(i), sides[i], product);
        }
    }
}
