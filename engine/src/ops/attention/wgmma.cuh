// Products of four warps, a warp group, on compute capability 9.0. They go on while the warps do something else; the right side lies in shared
// memory, the left one there or in registers, and sums are held as by mma, 16 rows a warp.
// A matrix in shared memory has rows of 64 elements, 128 bytes, and begins on a multiple of 1024 bytes. The eights of a row are in another order
// for each of eight rows, so that they lie in different banks (128-byte swizzle). What is wider comes in chunks of 64 columns.

// Where element k of row r lies among `rows` rows.
__device__ __forceinline__ u32 spot(u32 rows, u32 r, u32 k) { return (k / 64 * rows + r) * 64 + ((k / 8 % 8) ^ (r % 8)) * 8 + k % 8; }

// What a product is told about a matrix: its address, bytes from one chunk to the next, 1024 bytes from eight rows to the next, the swizzle.
// The chunks count where rows are those of the sum: then 16 of them are 2048 bytes, or 128 here; else 16 columns are 32 bytes, or 2.
__device__ __forceinline__ u64 rows_at(const void *p, u32 chunk = 16) {
    return (u64)(shared_address(p) >> 4 & 0x3fff) | (u64)(chunk >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Before products, where registers that they read or write were written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Sums are neither read nor written before what was waited for.
__device__ __forceinline__ void settled(float &c) { asm volatile("" : "+f"(c)::"memory"); }

// The first place in dynamic shared memory where a matrix may begin.
__device__ __forceinline__ char *first_place(void *shared) { return (char *)shared + (-shared_address(shared) & 1023); }

// Of 32 columns, a thread gets 8 neighbours: columns 8 p + 2 j and the next are columns 2 p and the next of the j-th eight.
__device__ __forceinline__ u32 place(u32 n) { return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2; }
