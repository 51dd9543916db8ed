// wgmma: asynchronous matrix multiply-accumulate of a warp group (four warps) on compute capability 9.0. The right operand lies in shared memory, the
// left one there or in registers; accumulators have the layout of mma, 16 rows per warp.
// A matrix in shared memory has rows of 64 elements (128 bytes) with the 128-byte swizzle, and is aligned to 1024 bytes. Wider matrices are split into
// chunks of 64 columns.

// Where element k of row r lies among `rows` rows.
__device__ __forceinline__ u32 spot(u32 rows, u32 r, u32 k) { return (k / 64 * rows + r) * 64 + ((k / 8 % 8) ^ (r % 8)) * 8 + k % 8; }

// The matrix descriptor: address, bytes between chunks, 1024 bytes between groups of eight rows, the swizzle. The chunk stride matters if rows are along
// K: then a step of 16 rows is 2048 bytes, 128 in units of 16; otherwise a step of 16 columns is 32 bytes, 2 units.
__device__ __forceinline__ u64 rows_at(const void *p, u32 chunk = 16) {
    return (u64)(shared_address(p) >> 4 & 0x3fff) | (u64)(chunk >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Before wgmma, if registers that it reads or writes were written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Keeps the compiler from moving accesses to the accumulators before the wait.
__device__ __forceinline__ void settled(float &c) { asm volatile("" : "+f"(c)::"memory"); }

// The first 1024-byte boundary in dynamic shared memory.
__device__ __forceinline__ char *first_place(void *shared) { return (char *)shared + (-shared_address(shared) & 1023); }

// Permutes 32 columns so that a thread gets 8 adjacent ones: columns 8 p + 2 j and the next are columns 2 p and the next of the j-th group of eight.
__device__ __forceinline__ u32 place(u32 n) { return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2; }
