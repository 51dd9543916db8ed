// Persistent blocks take one work item (piece) after another; four of their warps copy ahead of the others.
#define COPIERS 128
#ifndef HEADS_HERE // of HEADS, those that this launch takes; its pointers are to the first of them
#define HEADS_HERE HEADS
#endif

#ifndef ORDER // how blocks take pieces (see order.cuh), and how many blocks there are: for pieces of queries, and of keys
#define ORDER longest_first
#define BLOCKS gridDim.x
#define KEY_BLOCKS gridDim.x
#endif

// 64 queries for each of GROUPS warp groups: of several heads that read the same keys, if there are such, else of one.
template <int GROUPS> struct QueryPiece {
    static const int SEVERAL = GROUPS % 2 == 0 ? 2 : GROUPS, HEADS_AT_ONCE = GROUP % SEVERAL == 0 ? SEVERAL : 1;
    static const int STREAMS = BATCH * HEADS_HERE / HEADS_AT_ONCE;
    static const int QUERIES = 64 * GROUPS / HEADS_AT_ONCE, PIECES = (TIME + QUERIES - 1) / QUERIES;
    Turn turn;
    u32 b, head;
    int t0;
    __device__ __forceinline__ QueryPiece(u32 round) : turn(ORDER(STREAMS, PIECES, BLOCKS, blockIdx.x, round)) {
        b = turn.stream / (HEADS_HERE / HEADS_AT_ONCE), head = turn.stream % (HEADS_HERE / HEADS_AT_ONCE) * HEADS_AT_ONCE;
        t0 = (int)turn.piece * QUERIES;
    }
    __device__ __forceinline__ bool live() const { return turn.live; }
    __device__ __forceinline__ u32 head_of(u32 group) const { return head + group % HEADS_AT_ONCE; }
    __device__ __forceinline__ int first_of(u32 group) const { return t0 + 64 * (int)(group / HEADS_AT_ONCE); }
    // Keys from here on are seen by none of the queries.
    __device__ __forceinline__ int end() const { return CAUSAL && t0 + QUERIES + OFFSET < KEYS ? t0 + QUERIES + OFFSET : KEYS; }
};

// The index of the warp group. The shuffle tells the compiler that it is uniform in a warp, so that wgmma descriptors are computed once.
__device__ __forceinline__ u32 own_group() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

// COUNT rows from row `first` on; row t lies at from + t * step. Zeros beyond `rows`.
template <int COUNT> __device__ __forceinline__ void load(T *to, const T *from, u64 step, int first, int rows, u32 copier) {
    u32 r = copier / (D / 8), c = copier % (D / 8) * 8;
    to += spot(COUNT, r, c), from += (first + r) * step + c;
    const u32 pass = COPIERS / (D / 8);
    int left = rows - first - (int)r;
#pragma unroll 8
    for (u32 i = 0; i < COUNT; i += pass, from += pass * step) copy16(to + i * 64, from, left > (int)i);
}

// Writes accumulators, times a factor for each of a thread's two rows, to row(0) and row(1), unless these are null.
template <class Row> __device__ __forceinline__ void store(const float *sum, float first, float second, u32 lane, Row row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        T *to = row(half);
        float factor = half ? second : first;
#pragma unroll
        for (int c = 0; c < D; c += 32) {
            u32 p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *two = sum + c / 2 + 4 * j + 2 * half;
                p[j] = pack<T>(two[0] * factor, two[1] * factor);
            }
            transpose(p);
            if (to) *(uint4 *)(to + lane % 4 * 8 + c) = make_uint4(p[0], p[1], p[2], p[3]);
        }
    }
}

