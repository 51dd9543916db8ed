// A tile [TM, TN] of a GEMM on tensor cores, in steps of STEP along K.
// In shared memory both operands are rows of 64 elements (128 bytes). A row of an operand has 64 elements along K; or, if the operand is TRANSPOSED, rows
// are along K: 64 of them for its first 64 columns, 64 for the next. Piece c (16 bytes) of row r lies at c ^ r % 8, wgmma's 128-byte swizzle, so that
// eight rows' pieces are in different banks.
// With wgmma, four more warps copy (warp specialization), so that computing warps never wait for their own copies.
#define THREADS 256
#define COPIERS (WGMMA ? 128 : THREADS)
#define BLOCK (WGMMA ? THREADS + COPIERS : THREADS)
#define TM 128
#define STEP 64
#define A_BYTES (TM * 128)
#define STAGE ((TM + TN) * 128)
#define PASS (COPIERS / 8) // rows that are copied at once
// A warp has 16 * DOWN rows and 8 * ACROSS columns of a tile.
#define DOWN (WGMMA ? 1 : 4)
#define ACROSS (WGMMA ? TN / 8 : TN / 32)

typedef float Sums[DOWN][ACROSS][4];

__device__ __forceinline__ u32 warp_row() { return WGMMA ? threadIdx.x / 32 * 16 : threadIdx.x / 128 * 64; }
__device__ __forceinline__ u32 warp_column() { return WGMMA ? 0 : threadIdx.x / 32 % 4 * (TN / 4); }

// A thread copies piece copier() % 8 of rows copier() / 8 + PASS i of a side.
__device__ __forceinline__ u32 copier() { return WGMMA ? threadIdx.x - THREADS : threadIdx.x; }
__device__ __forceinline__ u32 own_piece() { return copier() % 8 * 8; } // in elements
__device__ __forceinline__ u32 own_row(int i) { return copier() / 8 + PASS * i; }
__device__ __forceinline__ char *own_place(char *side, int i) {
    u32 r = copier() / 8;
    return side + r * 128 + ((copier() % 8 ^ r % 8) << 4) + i * (PASS * 128);
}

__device__ __forceinline__ char *stages() {
    extern __shared__ __align__(1024) float shared[];
#if WGMMA
    return first_place(shared);
#else
    return (char *)shared;
#endif
}

#if WGMMA
__device__ __forceinline__ void multiply(Sums &c, const char *stage) {
    u64 a = rows_at(stage + threadIdx.x / 128 * 8192, 8192), b = rows_at(stage + A_BYTES, 8192);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma(&c[0][0][0], a + k * (A_TRANSPOSED ? 128 : 2), b + k * (B_TRANSPOSED ? 128 : 2));
    products_commit();
}

// A ring of stages. source.copy(stage) starts to load the next step of the block's work, or returns that there is none.
template <class Source> struct Ring {
    Source &source;
    char *memory;
    u64 *full, *empty;
    u32 now, phase;
    bool held; // whether a wgmma may still read the previous stage

    __device__ __forceinline__ Ring(Source &s) : source(s), memory(stages()), now(0), phase(0), held(false) {
        __shared__ u64 barriers[2][STAGES];
        full = barriers[0], empty = barriers[1];
        if (threadIdx.x < STAGES) expect(full + threadIdx.x, COPIERS), expect(empty + threadIdx.x, THREADS / 32);
        __syncthreads();
    }
    __device__ __forceinline__ bool copying() const { return threadIdx.x >= THREADS; }
    // True for warps that copied all there was.
    __device__ __forceinline__ bool copied() {
        if (!copying()) {
            take_registers<208>();
            return false;
        }
        give_registers<88>();
        for (bool first = true;;) {
            if (!first) await(empty + now, phase - 1);
            if (!source.copy(memory + now * STAGE)) return true;
            arrive_with_copies(full + now);
            if (++now == STAGES) now = 0, phase++, first = false;
        }
    }
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0) arrive(empty + (now == 0 ? STAGES - 1 : now - 1));
    }
    __device__ __forceinline__ void add(Sums &c, u32 steps) {
        for (u32 s = 0; s < steps; s++) {
            await(full + now, phase);
            show();
            multiply(c, memory + now * STAGE);
            products_wait<1>(); // for all steps but this one
            if (held) release();
            held = true;
            if (++now == STAGES) now = 0, phase++;
        }
    }
    // All steps have been added.
    __device__ __forceinline__ void finish(Sums &c) {
        products_wait<0>();
        release();
        held = false;
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) settled(c[0][j][i]);
    }
};
#else
__device__ __forceinline__ void multiply(Sums &c, const char *stage) {
    u32 lane = threadIdx.x % 32, low = lane % 8, high = lane / 16, middle = lane / 8 % 2;
    // The row and the piece of it that this lane names to ldmatrix.
    u32 a_row = A_TRANSPOSED ? warp_row() + high * 8 + low : warp_row() + lane % 16;
    u32 a_piece = A_TRANSPOSED ? middle : high;
    u32 column = warp_column() / 8; // in pieces
    u32 b_row = B_TRANSPOSED ? column / 8 * 64 + middle * 8 + low : warp_column() + high * 8 + low;
    u32 b_piece = B_TRANSPOSED ? column % 8 + high : middle;
    const char *a = stage + a_row * 128, *b = stage + A_BYTES + b_row * 128;
    a_piece = (a_piece ^ low) << 4;
    b_piece = (b_piece ^ low) << 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 x[DOWN][4], y[ACROSS / 2][4];
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
            if (A_TRANSPOSED) matrices_t(x[i], a + k * 2048 + (a_piece ^ i << 5));
            else matrices(x[i], a + i * 2048 + (a_piece ^ k << 5));
        }
#pragma unroll
        for (int j = 0; j < ACROSS / 2; j++) {
            if (B_TRANSPOSED) matrices_t(y[j], b + k * 2048 + (b_piece ^ j << 5));
            else matrices(y[j], b + j * 2048 + (b_piece ^ k << 5));
        }
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++) mma<T>(c[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
    }
}

// As above, by warps that copy and multiply.
template <class Source> struct Ring {
    Source &source;
    char *memory;
    u32 now;

    __device__ __forceinline__ Ring(Source &s) : source(s), memory(stages()), now(0) {}
    __device__ __forceinline__ bool copying() const { return true; }
    __device__ __forceinline__ bool copied() {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            source.copy(memory + i * STAGE);
            copies_commit();
        }
        return false;
    }
    __device__ __forceinline__ void add(Sums &c, u32 steps) {
        for (u32 s = 0; s < steps; s++) {
            copies_wait<STAGES - 2>();
            __syncthreads(); // this step has arrived, and no warp reads the next stage any more
            source.copy(memory + (now == 0 ? STAGES - 1 : now - 1) * STAGE);
            copies_commit();
            multiply(c, memory + now * STAGE);
            now = now + 1 < STAGES ? now + 1 : 0;
        }
    }
    __device__ __forceinline__ void finish(Sums &) {}
};
#endif

// Inclusive prefix sum over the lanes of a warp, in `upto`; returns the sum of all.
__device__ __forceinline__ u32 count_up(u32 own, u32 &upto) {
    upto = own;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        u32 other = __shfl_up_sync(0xffffffffu, upto, i);
        if (threadIdx.x % 32 >= i) upto += other;
    }
    return __shfl_sync(0xffffffffu, upto, 31);
}

// An expert's rows, and a number counted from its first.
struct Found {
    u32 expert, first, end, number;
};

// The expert of work unit number n, where experts have `units(rows)` units each, in order. Every warp searches for itself.
template <class Units> __device__ __forceinline__ bool find(const int *offsets, u32 number, Units units, Found &f) {
    for (u32 some = 0; some < EXPERTS; some += 32) {
        u32 e = some + threadIdx.x % 32, upto;
        u32 first = e < EXPERTS ? offsets[e] : 0, end = e < EXPERTS ? offsets[e + 1] : 0, own = units(end - first);
        u32 all = count_up(own, upto);
        if (number < all) {
            int who = __ffs(__ballot_sync(0xffffffffu, number < upto)) - 1;
            f = {some + who, __shfl_sync(0xffffffffu, first, who), __shfl_sync(0xffffffffu, end, who),
                 number - __shfl_sync(0xffffffffu, upto - own, who)};
            return true;
        }
        number -= all;
    }
    return false;
}
