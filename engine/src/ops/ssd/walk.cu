// The state before every chunk, [batch, HEADS, CHUNKS, P, N]; one block for each (batch, head, segment of PER chunks), the state in registers. With BACKWARD
// the gradient with respect to the state after every chunk, from the end to the start: then `left` is dy and `right` is C, else x and B. A warp has 16 of P
// and half of N.
#define COLUMNS (N / 2)
typedef float State[COLUMNS / 8][4];
#define STATE (P * N)
#define STAGE ((CHUNK * (P + N)) * sizeof(T) + 2 * CHUNK * sizeof(float))

// Goes through a segment from `state` on; calls `visit` with each chunk's number before the chunk changes the state. Returns what is left of a state after it. With SKIP the last
// chunk is left out, since nothing reads what comes after it.
template <bool SKIP, class Visit>
__device__ __forceinline__ float walk(State state, const T *left, const T *right, const float *numbers, int segment, int h, u64 batch, const Visit &visit) {
    extern __shared__ __align__(16) float shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp / 2 * 16, column = warp % 2 * COLUMNS;
    left += batch * TIME * (u64)LEFT_ROW + h * P, right += batch * TIME * (u64)RIGHT_ROW + h / SHARED_BY * N;
    int first = segment * PER, count = CHUNKS - first < PER ? CHUNKS - first : PER;
    float total = 1.0f;
    auto chunk_at = [&](int k) { return BACKWARD ? first + count - 1 - k : first + k; };
    auto fetch = [&](int k) {
        T *tiles = (T *)((char *)shared + k % 2 * STAGE);
        int chunk = chunk_at(k);
        fetch_rows<P, LEFT_PACKED>(tiles, left, LEFT_ROW, chunk * CHUNK);
        fetch_rows<N, RIGHT_PACKED>(tiles + CHUNK * P, right, RIGHT_ROW, chunk * CHUNK);
        fetch_numbers<2 * CHUNK>((float *)(tiles + CHUNK * (P + N)), numbers + ((batch * CHUNKS + chunk) * HEADS + h) * NUMBERS + 2 * CHUNK);
        copies_commit();
    };
    fetch(0);
    for (int k = 0; k < count; k++) {
        copies_wait<0>();
        __syncthreads();
        if (k + 1 < count) fetch(k + 1);
        visit(chunk_at(k));
        if (SKIP && k + 1 == count) break;
        const T *lefts = (const T *)((char *)shared + k % 2 * STAGE), *rights = lefts + CHUNK * P;
        const float *of = (const float *)(rights + CHUNK * N), *by = of + (BACKWARD ? CHUNK : 0);
        float keep = of[2 * CHUNK - 1];
        total *= keep;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state[n][j] *= keep;
#pragma unroll
        for (int t = 0; t < CHUNK; t += 16) {
            u32 a[4];
            left_columns<P>(a, lefts, t, m);
            const float *w = by + t + lane % 4 * 2;
            a[0] = times(a[0], w[0], w[1]), a[1] = times(a[1], w[0], w[1]), a[2] = times(a[2], w[8], w[9]), a[3] = times(a[3], w[8], w[9]);
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                columns_of<N>(b, rights, t, column + 16 * n);
                product(state + 2 * n, a, b);
            }
        }
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ssd_walk(const T *left, const T *right, const float *numbers, const float *starts, T *states) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, segment = blockIdx.x % SEGMENTS, h = blockIdx.x / SEGMENTS % HEADS;
    u64 batch = blockIdx.x / SEGMENTS / HEADS;
    State state = {};
    if (SEGMENTS > 1)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) state[i / 4][i % 4] = starts[blockIdx.x * (u64)STATE + (warp * (COLUMNS / 2) + i) * 32 + lane];
    states += (batch * HEADS + h) * CHUNKS * (u64)STATE + (warp / 2 * 16 + lane / 4) * N + warp % 2 * COLUMNS;
    walk<true>(state, left, right, numbers, segment, h, batch, [&](int chunk) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < COLUMNS / 32; n++) write_32(states + chunk * (u64)STATE + half * 8 * N + n * 32, state + 4 * n, half, true);
    });
}

// What each segment leaves behind if it starts from a state of 0, and what it leaves of the state before it.
extern "C" __global__ void __launch_bounds__(THREADS, 2) ssd_ends(const T *left, const T *right, const float *numbers, float *ends, float *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    State state = {};
    float total = walk<false>(state, left, right, numbers, blockIdx.x % SEGMENTS, blockIdx.x / SEGMENTS % HEADS, blockIdx.x / SEGMENTS / HEADS, [](int) {});
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) ends[blockIdx.x * (u64)STATE + (warp * (COLUMNS / 2) + i) * 32 + lane] = state[i / 4][i % 4];
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// From what segments leave behind to what they start from, in place: `ends` [batch, heads, SEGMENTS, STATE]. One thread for each element of a state.
extern "C" __global__ void ssd_pass(float *ends, const float *totals) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)BATCH * HEADS * STATE) return;
    u64 scan = i / STATE, at = scan * SEGMENTS * STATE + i % STATE;
    float state = 0.0f;
    for (int k = 0; k < SEGMENTS; k++) {
        u64 segment = BACKWARD ? SEGMENTS - 1 - k : k;
        float end = ends[at + segment * STATE];
        ends[at + segment * STATE] = state;
        state = state * totals[scan * SEGMENTS + segment] + end;
    }
}
