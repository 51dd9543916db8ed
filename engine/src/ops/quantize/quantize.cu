// A block of 512 threads takes tiles of 128 x 128: a thread has four rows of eight columns. The transpose goes through shared memory, four rows of a column in a word.
// text.rs writes the kernel.
#define WORDS 33 // of a column in shared memory: 32, and one so that columns begin in other banks
#define ACROSS ((N + 127) / 128) // tiles

// Divides eight adjacent numbers by a scale and rounds them; `most` grows to the bits of the largest absolute value.
template <class Q> __device__ __forceinline__ void rounded(const float v[8], float by, u32 &most, u32 words[2]) {
    alignas(8) Q q[8];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        float pair[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 size = __float_as_uint(v[j + k]) & 0x7fffffffu; // ordered as the numbers are, NaN last
            most = size > most ? size : most;
            pair[k] = fmaf(v[j + k], by, v[j + k] * 0.0f); // infinity times 0 is NaN
        }
        from_floats(pair[0], pair[1], q + j);
    }
    words[0] = *(u32 *)q, words[1] = *(u32 *)(q + 4);
}
// Four rows of eight bytes into shared memory, as eight columns of four bytes; `to`: the first column's word.
__device__ __forceinline__ void turn(const u32 words[4][2], u32 *to) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 a = words[0][h], b = words[1][h], c = words[2][h], d = words[3][h];
        u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140); // columns 0 and 1 of two rows each
        to[(4 * h) * WORDS] = __byte_perm(ab, cd, 0x5410), to[(4 * h + 1) * WORDS] = __byte_perm(ab, cd, 0x7632);
        ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
        to[(4 * h + 2) * WORDS] = __byte_perm(ab, cd, 0x5410), to[(4 * h + 3) * WORDS] = __byte_perm(ab, cd, 0x7632);
    }
}
// A tile's columns from shared memory to their rows of the transpose [N, M].
__device__ __forceinline__ void write_turned(const u32 *turned, unsigned char *columns, int tile) {
    int first = tile / ACROSS * 128, from = tile % ACROSS * 128, lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j < 128; j += 16) {
        if (from + j < N && first + 4 * lane < M) *(u32 *)(columns + (u64)(from + j) * M + first + 4 * lane) = turned[j * WORDS + lane];
    }
}

