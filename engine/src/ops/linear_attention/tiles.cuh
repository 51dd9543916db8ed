// Linear attention with tensor cores (see mod.rs): a time of up to 16 TILES rows, rows of shared memory without padding, whose groups of
// 8 elements are swizzled so that eight rows are in different banks.
#define THREADS (32 * WARPS)
#define TILES ((TIME + 15) / 16)
#define PITCH (16 * TILES + 8)              // of a square in shared memory, in elements
#define SQUARE ((TIME + 7) / 8 * 8)         // elements of a row of s
#define D_TILES (D / 16)
#define D_ROW ((D + 63) / 64 * 64)          // elements of a row [D] in shared memory

struct __align__(16) Four { float of[4]; };
struct __align__(16) Eight { u32 of[4]; }; // elements of T

__device__ __forceinline__ void halves(u32 both, float &low, float &high) {
    low = to_float(T{(unsigned short)both}), high = to_float(T{(unsigned short)(both >> 16)});
}

// Where the elements from 8 `eight` on lie, in rows of `width`.
__device__ __forceinline__ int place(int row, int eight, int width) { return row * width + (eight ^ row % 8) * 8; }

// The row of tile `tile` that a thread names for `matrices`. Rows beyond the last are the last: what comes of them is not kept, or
// multiplied by 0.
__device__ __forceinline__ int row_of(int tile, int lane) {
    int row = 16 * tile + lane % 16;
    return row < TIME ? row : TIME - 1;
}

// The scores are symmetric: of tiles (row, column) only those with row <= column are computed, numbered column by column.
#define TRIANGLE (TILES * (TILES + 1) / 2)
__device__ __forceinline__ constexpr int column_of(int tile) {
    int column = 0;
    while ((column + 1) * (column + 2) / 2 <= tile) column++;
    return column;
}
__device__ __forceinline__ constexpr int row_in(int tile) { return tile - column_of(tile) * (column_of(tile) + 1) / 2; }

// A 16 x 16 tile of accumulators, rounded, as operand a of an mma; 0 outside of the scores.
__device__ __forceinline__ void rounded(u32 a[4], const float sum[2][4], int row_tile, int column_tile, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int row = 16 * row_tile + lane / 4 + j % 2 * 8, column = 16 * column_tile + lane % 4 * 2 + j / 2 * 8;
        float x = sum[j / 2][j % 2 * 2], y = sum[j / 2][j % 2 * 2 + 1];
        a[j] = pack<T>(row < TIME && column < TIME ? x : 0.0f, row < TIME && column + 1 < TIME ? y : 0.0f);
    }
}
// The same on the other side of the diagonal.
__device__ __forceinline__ void mirrored(u32 b[4], const u32 a[4]) {
    b[0] = transposed(a[0]), b[1] = transposed(a[2]), b[2] = transposed(a[1]), b[3] = transposed(a[3]);
}
