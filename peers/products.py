#!/usr/bin/env python3
"""What the products of a Qwen3-0.6B layer take on this GPU: each by itself or merged, plain or added to what is there.

    python3 peers/products.py

8,192 rows, bf16, 14 sets of weights in turn, so that none is in the cache; replayed as one CUDA graph.
"""
import statistics, torch

SETS, ROWS = 14, 8192


def matrix(*shape):
    return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()


def timed(name, run, flops):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    times = []
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    us = statistics.median(times) / SETS
    print(f"{name}: {us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s", flush=True)


for k, widths in ((1024, (2048, 1024, 1024)), (1024, (3072, 3072)), (2048, (1024,)), (3072, (1024,))):
    n = sum(widths)
    flops = 2 * ROWS * k * n
    x, dx = [matrix(ROWS, k) for _ in range(2)], matrix(ROWS, k)
    weights = [[matrix(width, k) for width in widths] for _ in range(SETS)]
    merged = [torch.cat(w) for w in weights]
    y, all_y = [matrix(ROWS, width) for width in widths], matrix(ROWS, n)
    timed(f"{k} -> {widths} apart, plain", lambda: [torch.mm(x[i % 2], w.t(), out=c) for i in range(SETS) for w, c in zip(weights[i], y)], flops)
    timed(f"{k} -> {widths} apart, added", lambda: [torch.addmm(c, x[i % 2], w.t(), out=c) for i in range(SETS) for w, c in zip(weights[i], y)], flops)
    timed(f"{k} -> {n} merged, plain", lambda: [torch.mm(x[i % 2], merged[i].t(), out=all_y) for i in range(SETS)], flops)
    timed(f"{k} -> {n} merged, added", lambda: [torch.addmm(all_y, x[i % 2], merged[i].t(), out=all_y) for i in range(SETS)], flops)
    timed(f"{widths} -> {k} apart, added", lambda: [torch.addmm(dx, d, w, out=dx) for i in range(SETS) for w, d in zip(weights[i], y)], flops)
    timed(f"{n} -> {k} merged, plain", lambda: [torch.mm(all_y, merged[i], out=dx) for i in range(SETS)], flops)
    timed(f"{n} -> {k} merged, added", lambda: [torch.addmm(dx, all_y, merged[i], out=dx) for i in range(SETS)], flops)
