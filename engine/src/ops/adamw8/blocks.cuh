// 8-bit states (map.rs). A block of 256 numbers belongs to one warp: a lane has four of them from 4 * lane on, and four from 128 + 4 * lane on.
typedef unsigned char u8;

struct alignas(16) Map {
    float numbers[256], middles[256];
    u8 cells[CELLS];
};

// Every thread of the block calls it; a barrier must follow.
__device__ __forceinline__ void copy_map(Map &to, const u32 *from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Map) / 16); i += blockDim.x) ((uint4 *)&to)[i] = ((const uint4 *)from)[i];
}

// What numbers are multiplied by before they are ranked.
__device__ __forceinline__ float inverse_of(float most) { return most >= 1.17549435e-38f ? 1.0f / most : 0.0f; }

__device__ __forceinline__ u32 rank_of(const Map &map, float magnitude) {
    const u32 cell = min(max(__float_as_uint(magnitude) >> 16, (u32)FIRST), (u32)LAST) - FIRST;
    const u32 rank = map.cells[cell];
    return rank + (magnitude > map.middles[rank]);
}

__device__ __forceinline__ u8 signed_byte(const Map &map, float v, float inverse) {
    const u32 rank = rank_of(map, __fmul_rn(fabsf(v), inverse));
    return (u8)(v < 0.0f ? 256 - min(rank, 127u) : rank);
}

// A square that is not 0 does not become 0.
__device__ __forceinline__ u8 unsigned_byte(const Map &map, float v, float inverse) {
    return (u8)max(rank_of(map, __fmul_rn(fabsf(v), inverse)), (u32)(v > 0.0f));
}
