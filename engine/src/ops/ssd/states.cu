// What each segment of PER chunks leaves behind if it starts from a state of 0; one block for each (batch, head, segment). With BACKWARD the same for the
// gradient with respect to the state, from the end to the start: then `left` is dy and `right` is C, else x and B. Returns the sum of decays.
__device__ __forceinline__ float segment_of(State state, const T *left, const float *dt, const float *decay, const T *right) {
    extern __shared__ __align__(16) float shared[];
    T *lefts = (T *)shared, *rights = lefts + CHUNK * P_PITCH;
    float *numbers = (float *)(rights + CHUNK * N_PITCH);
    Decays of = {numbers, numbers + CHUNK, numbers + 2 * CHUNK, numbers + 3 * CHUNK};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int segment = blockIdx.x % SEGMENTS, h = blockIdx.x / SEGMENTS % HEADS;
    u64 b = blockIdx.x / SEGMENTS / HEADS;
    const u64 left_step = LEFT_ROW, right_step = RIGHT_ROW;
    left += b * TIME * left_step + h * P, right += b * TIME * right_step + h / SHARED_BY * N, dt += b * TIME * HEADS + h, decay += b * TIME * HEADS + h;
    float total = 0.0f;
    int first = segment * PER, count = CHUNKS - first < PER ? CHUNKS - first : PER;
    for (int k = 0; k < count; k++) {
        int t0 = (BACKWARD ? first + count - 1 - k : first + k) * CHUNK;
        load<P, P_PITCH, LEFT_PACKED>(lefts, left, left_step, t0);
        load<N, N_PITCH, RIGHT_PACKED>(rights, right, right_step, t0);
        copies_commit();
        copies_wait<0>();
        decays_of(of, dt, decay, t0, true);
        total += of.sum[CHUNK - 1];
        advance(state, of.from_start[CHUNK - 1], lefts, rights, BACKWARD ? of.from_start : of.to_end, warp, lane);
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
ssd_states(const T *left, const float *dt, const float *decay, const T *right, float *ends, float *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    State state = {};
    float total = segment_of(state, left, dt, decay, right);
    ends += blockIdx.x * (u64)STATE;
    for (int k = 0; k < OWN; k++)
        for (int j = 0; j < 8; j++)
            if (warp * OWN + k < UNITS) ends[(warp * OWN + k) * 256 + lane * 8 + j] = state[k][j / 4][j % 4];
    if (threadIdx.x == 0) totals[blockIdx.x] = two_to(total);
}

// The state after the last position: [batch, HEADS, P, N]. One segment.
extern "C" __global__ void __launch_bounds__(THREADS) ssd_last(const T *left, const float *dt, const float *decay, const T *right, float *last) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    State state = {};
    segment_of(state, left, dt, decay, right);
    last += blockIdx.x * (u64)(P * N);
    for (int k = 0; k < OWN; k++) {
        int unit = warp * OWN + k;
        for (int j = 0; j < 8; j++) {
            int row = unit / N_TILES * 16 + row_of(j % 4, lane), column = unit % N_TILES * 16 + j / 4 * 8 + column_of(j % 4, lane);
            if (unit < UNITS && row < P && column < N) last[row * N + column] = state[k][j / 4][j % 4];
        }
    }
}

// From what segments leave behind to what they start from, in place: `ends` [batch, heads, SEGMENTS, STATE]. One thread for each element of a state.
extern "C" __global__ void ssd_pass(float *ends, const float *totals) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)SCANS * STATE) return;
    u64 scan = i / STATE, at = scan * SEGMENTS * STATE + i % STATE;
    float state = 0.0f;
    for (int k = 0; k < SEGMENTS; k++) {
        u64 segment = BACKWARD ? SEGMENTS - 1 - k : k;
        float end = ends[at + segment * STATE];
        ends[at + segment * STATE] = state;
        state = state * totals[scan * SEGMENTS + segment] + end;
    }
}
