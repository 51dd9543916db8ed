// e [SETS, N, D]: 1 - cosine of vectors i < j of each set, y [SETS, N (N - 1) / 2]. A group has one i and all later j.
extern "C" __global__ void __launch_bounds__(LANES * GROUPS) pair_distances(const T *e, float *y) {
    u64 own = (u64)blockIdx.x * GROUPS + row_group(), set = own / (N - 1);
    int i = (int)(own % (N - 1));
    bool inside = set < SETS; // the whole group; a block of one group has no other
    if (!inside) set = 0;
    e += set * N * D;
    y += set * ((u64)N * (N - 1) / 2) + (u64)i * (2 * N - i - 1) / 2;
    Vector first, second;
    first.load(e + (u64)i * D);
    float inverse = inverse_length(first.dot(first));
    for (int j = i + 1; j < N; j++) {
        second.load(e + (u64)j * D);
        float along = first.dot(second), square = second.dot(second);
        if (row_lane() == 0 && inside) y[j - i - 1] = 1.0f - along * inverse * inverse_length(square);
    }
}
