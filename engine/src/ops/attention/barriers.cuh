// mbarriers in shared memory, for warp-specialized blocks in which some warps copy and others compute (compute capability 9.0). Their phases
// alternate.
__device__ __forceinline__ void expect(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives when all asynchronous copies of this thread have completed.
__device__ __forceinline__ void arrive_with_copies(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and expects so many bytes of bulk copies.
__device__ __forceinline__ void arrive_and_expect(u64 *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// A bulk copy of contiguous bytes, a multiple of 16, which signals the barrier.
__device__ __forceinline__ void copy_row(void *to, const void *from, int bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void await(u64 *barrier, u32 phase) {
    u32 over;
    do
        asm volatile("{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
                     : "=r"(over) : "r"(shared_address(barrier)), "r"(phase % 2) : "memory");
    while (!over);
}

// A proxy fence: makes completed copies visible to wgmma, and new barriers to bulk copies. It waits for all of the thread's own copies, so copying threads
// must not call it.
__device__ __forceinline__ void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The four copying warps give up registers to the others.
template <int LEFT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT)); }
template <int ALL> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(ALL)); }
