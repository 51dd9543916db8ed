// y [ROWS, D] takes source [N, D] in the order of `sorted`. No row of y is written twice.
struct alignas(8) Entry { int row, place; };

// Is this the last entry of its row?
__device__ __forceinline__ bool ends(const Entry *sorted, int total, int i) { return i + 1 == total || sorted[i + 1].row != sorted[i].row; }

__device__ __forceinline__ void add_to(T *to, const Pack<T> &old, const float *acc) {
    Pack<T> v;
    for (int k = 0; k < VEC; k++) from_float(to_float(old.at[k]) + acc[k], v.at[k]);
    write(to, v);
}

// One thread a pack of an entry.
template <bool PACKED> __device__ __forceinline__ void replace_rows(const int *count, const Entry *sorted, const T *source, T *y) {
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 i = item / (D / VEC);
    int column = item % (D / VEC) * VEC, total = *count;
    if (i >= total || !ends(sorted, total, i)) return;
    write(y + (u64)sorted[i].row * D + column, read<PACKED>(source + (u64)sorted[i].place * D + column));
}

extern "C" __global__ void replace(const int *total, const Entry *sorted, const T *source, T *y) {
    if (packed(source)) replace_rows<true>(total, sorted, source, y);
    else replace_rows<false>(total, sorted, source, y);
}

// One thread a pack of SEGMENT entries. A row whose entries all lie in the segment is finished here. Of a row that began in an
// earlier segment the sum goes to `head`, of one that begins here and goes on in the next to `tail` [segments, D].
template <bool PACKED>
__device__ __forceinline__ void add_rows(const int *count, const Entry *sorted, const T *source, T *y, float *head, float *tail) {
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 segment = item / (D / VEC);
    int column = item % (D / VEC) * VEC, total = *count;
    if (segment * SEGMENT >= total) return;
    int first = segment * SEGMENT, stop = first + SEGMENT < total ? first + SEGMENT : total;
    head += segment * D + column;
    tail += segment * D + column;

    bool begins = first == 0 || sorted[first - 1].row != sorted[first].row;
    float acc[VEC] = {};
    for (int batch = first; batch < stop; batch += BATCH) {
        // All loads first, so that they overlap.
        Entry e[BATCH];
        bool last[BATCH];
        Pack<T> v[BATCH], old[BATCH];
        #pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (batch + b >= stop) continue;
            e[b] = sorted[batch + b];
            last[b] = ends(sorted, total, batch + b);
        }
        #pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (batch + b >= stop) continue;
            v[b] = read<PACKED>(source + (u64)e[b].place * D + column);
            if (last[b]) old[b] = read<true>(y + (u64)e[b].row * D + column);
        }
        #pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (batch + b >= stop) continue;
            for (int k = 0; k < VEC; k++) acc[k] += to_float(v[b].at[k]);
            if (!last[b]) continue;
            if (begins) add_to(y + (u64)e[b].row * D + column, old[b], acc);
            for (int k = 0; k < VEC; k++) {
                if (!begins) head[k] = acc[k];
                acc[k] = 0.0f;
            }
            begins = true;
        }
    }
    if (ends(sorted, total, stop - 1)) return;
    for (int k = 0; k < VEC; k++) (begins ? tail : head)[k] = acc[k];
}

extern "C" __global__ void add(const int *total, const Entry *sorted, const T *source, T *y, float *head, float *tail) {
    if (packed(source)) add_rows<true>(total, sorted, source, y, head, tail);
    else add_rows<false>(total, sorted, source, y, head, tail);
}

// Rows that lie in several segments: the thread of the one where a row begins adds the sums of those that follow, in order.
extern "C" __global__ void add_long(const int *count, const Entry *sorted, T *y, const float *head, const float *tail) {
    u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 segment = item / (D / VEC);
    int column = item % (D / VEC) * VEC, total = *count;
    if ((segment + 1) * SEGMENT >= total) return; // the last one: nothing goes on
    int first = segment * SEGMENT, next = first + SEGMENT;
    int row = sorted[next - 1].row;
    bool begins = sorted[first].row != row || first == 0 || sorted[first - 1].row != row;
    if (!begins || sorted[next].row != row) return;

    float acc[VEC];
    for (int k = 0; k < VEC; k++) acc[k] = tail[segment * D + column + k];
    #pragma unroll 4
    for (u64 s = segment + 1; s * SEGMENT < total && sorted[s * SEGMENT].row == row; s++)
        for (int k = 0; k < VEC; k++) acc[k] += head[s * D + column + k];
    T *to = y + (u64)row * D + column;
    add_to(to, read<true>(to), acc);
}
