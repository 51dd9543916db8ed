// xs [batch, TIME, HEADS, N], 64 columns at a time, of the HELD heads that a block works on. A thread copies, rotates and writes the same
// groups of 8 elements of every head, so that the tables are read once for all.
#define CHUNK 64
#define CHUNKS ((N + CHUNK - 1) / CHUNK)
#define HEAD (TIME * CHUNK) // elements of one head's chunk
#define GROUPS (TIME * CHUNK / 8)
#define ROUNDS ((GROUPS + THREADS - 1) / THREADS)

struct Angles { Four cos, sin; };

// This thread's group of round k: its row, and its number in the row.
__device__ __forceinline__ bool group(int k, int &row, int &eight) {
    int i = threadIdx.x + k * THREADS;
    row = i / 8, eight = i % 8;
    return GROUPS % THREADS == 0 || i < GROUPS;
}

// Starts to copy chunk c; `from` is the first row of the first head.
__device__ __forceinline__ void fetch(T *chunk, const T *from, int c) {
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        int row, eight;
        if (!group(k, row, eight)) continue;
        int column = c * CHUNK + eight * 8;
        bool live = N % CHUNK == 0 || column < N;
        const T *at = from + (u64)row * (HEADS * (u64)N) + (live ? column : 0);
#pragma unroll
        for (int h = 0; h < HELD; h++) copy16(chunk + h * HEAD + place(row, eight, CHUNK), at + h * (u64)N, live);
    }
}

__device__ __forceinline__ void angles(Angles to[ROUNDS], const float *cos, const float *sin, int c) {
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        int row, eight;
        if (!group(k, row, eight)) continue;
        int column = c * CHUNK + eight * 8;
        int at = row * (N / 2) + (N % CHUNK == 0 || column < N ? column / 2 : 0);
        to[k].cos = *(const Four *)(cos + at), to[k].sin = *(const Four *)(sin + at);
    }
}

// RoPE of adjacent pairs.
__device__ __forceinline__ Eight rotated(Eight x, const Angles &by) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a, b;
        halves(x.of[j], a, b);
        x.of[j] = pack<T>(a * by.cos.of[j] - b * by.sin.of[j], a * by.sin.of[j] + b * by.cos.of[j]);
    }
    return x;
}

// For `matrices`: this thread's rows of a chunk from `chunk` on, `step` times 16 columns on. Whole tiles lie evenly apart: a constant leads
// from one to the next.
struct Rows {
    int whole, last;

    __device__ __forceinline__ Rows(int chunk, int step, int lane) {
        int eight = lane / 16 ^ 2 * step;
        whole = chunk + place(lane % 16, eight, CHUNK), last = chunk + place(row_of(TILES - 1, lane), eight, CHUNK);
        kept(whole), kept(last);
    }
    __device__ __forceinline__ const T *of(const T *memory, int tile) const {
        return 16 * tile + 16 <= TIME ? memory + whole + 16 * tile * CHUNK : memory + last;
    }
};
