// A stable counting sort of slots by expert. Each block counts the slots of every expert in its CHUNK; from the counts of all blocks it then knows
// where its own slots begin. With NONE, the last of the KINDS stands for no expert: offsets end where it begins.
#define THREADS 256

// This slot's expert, its peers among the lanes of the warp, and -1 past the end of the chunk.
__device__ __forceinline__ int expert_of(const int *chosen, u32 slot, u32 end, u32 &peers) {
    int e = slot < end ? chosen[slot] : -1;
    if (slot < end && (u32)e >= KINDS) __trap(); // the caller's mistake
    peers = __match_any_sync(0xffffffffu, e);
    return e;
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_count(const int *chosen, int *counts) {
    __shared__ int own[KINDS];
    for (int e = threadIdx.x; e < KINDS; e += THREADS) own[e] = 0;
    __syncthreads();
    u32 first = blockIdx.x * (u32)CHUNK, end = first + CHUNK < SLOTS ? first + CHUNK : SLOTS;
    for (u32 at = first; at < end; at += THREADS) {
        u32 peers;
        int e = expert_of(chosen, at + threadIdx.x, end, peers);
        if (e >= 0 && threadIdx.x % 32 == __ffs(peers) - 1) atomicAdd(&own[e], __popc(peers)); // integers: any order
    }
    __syncthreads();
    for (int e = threadIdx.x; e < KINDS; e += THREADS) counts[blockIdx.x * KINDS + e] = own[e];
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_place(const int *chosen, const int *counts, int *order, int *position, int *offsets) {
    __shared__ int total[KINDS], next[KINDS], here[THREADS / 32][KINDS]; // here: of each warp
    for (int e = threadIdx.x; e < KINDS; e += THREADS) {
        total[e] = next[e] = 0;
        for (int w = 0; w < THREADS / 32; w++) here[w][e] = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < BLOCKS * KINDS; i += THREADS) {
        int count = counts[i];
        atomicAdd(&total[i % KINDS], count);
        if (i / KINDS < blockIdx.x) atomicAdd(&next[i % KINDS], count);
    }
    __syncthreads();
    // The first row of each expert: the number of slots of all experts before it.
    for (int e = threadIdx.x; e < KINDS; e += THREADS) {
        int begin = 0;
        for (int i = 0; i < e; i++) begin += total[i];
        next[e] += begin;
        if (blockIdx.x == 0) {
            offsets[e] = begin;
            if (!NONE && e == KINDS - 1) offsets[KINDS] = SLOTS;
        }
    }
    u32 first = blockIdx.x * (u32)CHUNK, end = first + CHUNK < SLOTS ? first + CHUNK : SLOTS;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 at = first; at < end; at += THREADS) {
        u32 slot = at + threadIdx.x, peers;
        int e = expert_of(chosen, slot, end, peers);
        bool leads = e >= 0 && lane == __ffs(peers) - 1;
        if (leads) here[warp][e] = __popc(peers);
        __syncthreads();
        if (e >= 0) {
            int place = next[e] + __popc(peers & ((1u << lane) - 1));
            for (u32 w = 0; w < warp; w++) place += here[w][e];
            order[place] = slot;
            position[slot] = place;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < KINDS; i += THREADS)
            for (int w = 0; w < THREADS / 32; w++) {
                next[i] += here[w][i];
                here[w][i] = 0;
            }
        __syncthreads();
    }
}
