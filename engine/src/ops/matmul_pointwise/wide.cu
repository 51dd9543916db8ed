// a [HEADS, M, K] times b [HEADS, K, N] with wgmma, both operands in shared memory, and a pointwise expression on the result while it is in registers.
// The tiles are divided evenly among the blocks: a block keeps BN columns of b as long as its tiles have the same columns, and its GROUPS warp groups
// alternate on its tiles. Four more warps copy what a group's next tile needs, rows of a and the expression's other inputs, while the group finishes the
// tile before.
#define GROUPS 3
#define THREADS (128 * GROUPS)
#define BM 64
#define BN 128
#define TILES ((M + BM - 1) / BM)
#define ACROSS ((N + BN - 1) / BN)
#define ALL (HEADS * ACROSS * TILES)
#define INDEX_OF(m, head, n) ((HEADS_INSIDE ? (INDEX)(m) * HEADS + (head) : (INDEX)(head) * M + (m)) * N + (n))
#define KC ((K + 63) / 64) // chunks of 64 of K: 128 bytes a row
#define PACKS (BN / 32)
#define STAGE (BM * (KC * 64 + BN * SIDES / 2)) // elements: rows of a, then the sides' tiles

// COUNT vectors of K elements, `step` apart, of which those from `left` on are zeros, copied by BY threads. Vector v goes to row v of
// `to`, or to its place.
template <int COUNT, int BY, bool PLACED> __device__ __forceinline__ void load(T *to, const T *from, u64 step, u32 left, u32 thread) {
    u32 k = thread % 8 * 8;
#pragma unroll 4
    for (u32 v = thread / 8; v < COUNT; v += BY / 8) {
        bool live = v < left;
        const T *vector = from + (live ? v : 0) * step;
#pragma unroll
        for (u32 j = 0; j < KC * 64; j += 64) {
            bool inside = K % 64 == 0 || k + j < K;
            copy16(to + spot(COUNT, PLACED ? place(v) : v, k + j), vector + (inside ? k + j : 0), live && inside);
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

// Where 8 columns from 8 `eight` on of row r lie in a tile of a side: two rows, of which 64 bytes each are read at once, in different banks.
__device__ __forceinline__ u32 pack_of(u32 r, u32 eight) { return r * (BN / 8) + (eight ^ r % 2 * 4); }

// The tiles of a block, `count` from `begin` on. They change their columns at `part`'s end; among those with the same columns, they are
// taken in such an order that blocks which have other columns are at about the same rows, and memory is written in long runs.
struct Part {
    u32 head, n0, low, rows, end; // rows of tiles, from `low` on; the first tile of the next part

    __device__ __forceinline__ Part(u32 begin, u32 count, u32 i) {
        u32 part = (begin + i) / TILES, from = max(begin, part * TILES);
        head = part / ACROSS, n0 = part % ACROSS * BN, low = from - part * TILES;
        end = min(count, (part + 1) * TILES - begin), rows = begin + end - from;
    }
    __device__ __forceinline__ u32 first_row(u32 i) const { return (low + (i + 2 * rows - end % rows - low % rows) % rows) * BM; }
};

// All but the copying warps.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS + 128) matmul_pointwise(const T *a, const T *b, PARAMETERS) {
    extern __shared__ __align__(1024) float shared[];
    __shared__ u64 full[GROUPS], empty[GROUPS];
    T *columns = (T *)shared, *stages = columns + BN * (KC * 64);
    const Pointers at = {POINTERS};
    u32 begin = (u64)ALL * blockIdx.x / gridDim.x, count = (u64)ALL * (blockIdx.x + 1) / gridDim.x - begin;
    u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (threadIdx.x < GROUPS) expect(full + threadIdx.x, 128), expect(empty + threadIdx.x, 128);
    __syncthreads();

    if (threadIdx.x >= THREADS) {
        give_registers<32>();
        for (u32 i = 0; i < count; i++) {
            const Part part(begin, count, i);
            u32 head = part.head, first = part.first_row(i);
            T *stage = stages + i % GROUPS * STAGE;
            if (i >= GROUPS) await(empty + i % GROUPS, i / GROUPS - 1);
            u32 thread = threadIdx.x - THREADS, eight = thread % (BN / 8), n = part.n0 + 8 * eight;
#pragma unroll 4
            for (u32 r = thread / (BN / 8); r < BM; r += 128 / (BN / 8)) {
                bool live = first + r < M && n < N;
                ask(at, live ? INDEX_OF(first + r, head, n) : 0, stage + BM * KC * 64, pack_of(r, eight), live);
            }
            load<BM, 128, false>(stage, a + (u64)head * A_HEAD + (u64)first * A_ROW, A_ROW, M - first, thread);
            arrive_with_copies(full + i % GROUPS);
        }
        return;
    }

    take_registers<160>();
    const u32 group = threadIdx.x / 128, row = warp * 16 + lane / 4;
    const T *stage = stages + group * STAGE;
    u32 i = group;
    for (u32 at_columns = 0; at_columns < count;) {
        const Part part(begin, count, at_columns);
        u32 head = part.head, n0 = part.n0, n = n0 + lane % 4 * 8;
        const T *from = b + (u64)head * B_HEAD + (u64)n0 * B_COLUMN;
        meet(); // nobody reads the columns before these any more
        if (B_ROW == 1) load<BN, THREADS, true>(columns, from, B_COLUMN, N - n0, threadIdx.x);
        else turn_columns(columns, from, N - n0);
        copies_commit();
        copies_wait<0>();
        show();
        meet();
        at_columns = part.end;
        for (; i < part.end; i += GROUPS) {
            // A thread's two rows of a tile, in each of which it has 8 columns of every 32.
            INDEX first = part.first_row(i) + row;
            Sides sides[2 * PACKS];
            const auto take_side = [&](int p) { take(sides[p], stage + BM * KC * 64, pack_of(row + 8 * (p % 2), lane % 4 + 4 * (p / 2))); };
            await(full + group, i / GROUPS);
            show();
            float c[64];
            products_begin();
#pragma unroll
            for (int k = 0; k < KC * 64; k += 16) {
                u64 x = rows_at(stage + k / 64 * (BM * 64) + k % 64), y = rows_at(columns + k / 64 * (BN * 64) + k % 64);
                if (k == 0) multiply_first(c, x, y);
                else multiply(c, x, y);
            }
            products_commit();
#pragma unroll
            for (int p = 0; p < EARLY; p++) take_side(p);
            products_wait<0>();
            if (EARLY == 2 * PACKS) arrive(empty + group);
#pragma unroll
            for (int p = 0; p < 2 * PACKS; p++) {
                if (p >= EARLY) take_side(p);
                if (first + 8 * (p % 2) >= M || n + 32 * (p / 2) >= N) continue;
                float product[8];
#pragma unroll
                for (int j = 0; j < 8; j++) product[j] = c[(p / 2 * 4 + j / 2) * 4 + p % 2 * 2 + j % 2];
                finish(at, INDEX_OF(first + 8 * (p % 2), head, n + 32 * (p / 2)), sides[p], product);
            }
            if (EARLY < 2 * PACKS) arrive(empty + group);
        }
    }
}
