// The index as (row, place in the index), by row and then by place: a stable counting sort in one launch. A block owns RANGE rows
// and goes through the whole index twice, which is N * ROWS / RANGE reads from the cache in all. Numbers outside of the table are
// left out; `total` is how many remain.
struct alignas(8) Entry { int row, place; };

__device__ __forceinline__ int warp_scan(int v) { // inclusive
    for (int i = 1; i < 32; i <<= 1) {
        int other = __shfl_up_sync(0xffffffffu, v, i);
        if ((threadIdx.x & 31) >= i) v += other;
    }
    return v;
}

// How much the threads before this one have; `all` is everyone's.
__device__ __forceinline__ int block_scan(int v, int &all) {
    __shared__ int warps[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int upto = warp_scan(v);
    __syncthreads();
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    int sums = warp_scan(lane < THREADS / 32 ? warps[lane] : 0);
    all = __shfl_sync(0xffffffffu, sums, 31);
    int before = __shfl_sync(0xffffffffu, sums, warp > 0 ? warp - 1 : 0);
    return upto - v + (warp > 0 ? before : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_rows(const int *index, int *total, Entry *hits, Entry *sorted) {
    __shared__ int next[RANGE]; // first how often each row is named, then where its next entry goes
    const int first = blockIdx.x * RANGE, stop = first + RANGE < ROWS ? first + RANGE : ROWS;
    const int tid = threadIdx.x, lane = tid & 31;
    for (int r = tid; r < RANGE; r += THREADS) next[r] = 0;
    __syncthreads();

    int below = 0;
    #pragma unroll 4
    for (int i = tid; i < N; i += THREADS) {
        int row = index[i];
        below += row >= 0 && row < first;
        if (row >= first && row < stop) atomicAdd(&next[row - first], 1);
    }
    int base, count;
    block_scan(below, base);
    int named = tid < RANGE ? next[tid] : 0; // RANGE <= THREADS
    int before = block_scan(named, count);
    if (tid < RANGE) next[tid] = base + before;
    if (blockIdx.x == gridDim.x - 1 && tid == 0) *total = base + count;

    // This block's entries, in the order of the index.
    int done = base;
    for (int chunk = 0; chunk < N; chunk += THREADS * EACH) {
        int rows[EACH], mine = 0, all;
        #pragma unroll
        for (int k = 0; k < EACH; k++) {
            int i = chunk + tid * EACH + k;
            rows[k] = i < N ? index[i] : -1;
            mine += rows[k] >= first && rows[k] < stop;
        }
        int at = done + block_scan(mine, all);
        #pragma unroll
        for (int k = 0; k < EACH; k++)
            if (rows[k] >= first && rows[k] < stop) hits[at++] = Entry{rows[k], chunk + tid * EACH + k};
        done += all;
    }
    __syncthreads();

    // One warp gives each entry its place among those of its row.
    if (tid >= 32) return;
    for (int i = base; i < done; i += 32) {
        bool real = i + lane < done;
        Entry e = real ? hits[i + lane] : Entry{-1, -1};
        u32 same = __match_any_sync(0xffffffffu, e.row);
        int rank = __popc(same & ((1u << lane) - 1));
        int at = real ? next[e.row - first] : 0;
        __syncwarp();
        if (real) sorted[at + rank] = e;
        if (real && rank == 0) next[e.row - first] = at + __popc(same);
        __syncwarp();
    }
}
