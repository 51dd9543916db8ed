// order [ROWS]: the indices of rows that have a target, then -1. By one block. Also sets all losses to 0.
extern "C" __global__ void linear_ce_order(const int *targets, int *order, float *losses) {
    __shared__ int before[32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 share = (ROWS + 1023) / 1024, first = min(threadIdx.x * share, (u32)ROWS), end = min(first + share, (u32)ROWS);
    int own = 0;
    for (u32 r = first; r < end; r++) own += targets[r] >= 0;
    // Of the threads up to this one.
    int up_to = own;
    for (u32 step = 1; step < 32; step *= 2) {
        int more = __shfl_up_sync(0xffffffffu, up_to, step);
        if (lane >= step) up_to += more;
    }
    if (lane == 31) before[warp] = up_to;
    __syncthreads();
    int place = up_to - own, live = 0;
    for (u32 w = 0; w < 32; w++) {
        if (w < warp) place += before[w];
        live += before[w];
    }
    for (u32 r = first; r < end; r++) {
        if (targets[r] >= 0) order[place++] = r;
        if ((int)r >= live) order[r] = -1;
        losses[r] = 0.0f;
    }
}
