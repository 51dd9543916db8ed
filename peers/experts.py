#!/usr/bin/env python3
"""PyTorch's products of experts at the shapes of `kiln bench ops`, bf16: milliseconds and TFLOP/s of torch._grouped_mm and of a loop of
products, forward and both gradients, for even and for skewed loads.

    python3 peers/experts.py [--json out.json]
"""
import argparse, json
import torch
from timing import median

ROWS, EXPERTS = 62208, 8                                   # 384 x 81 tokens, 2 experts each
SHAPES = [("hrm's gate and up", 512, 1536), ("hrm's down", 768, 512)]   # name of the case in kiln, then in, out


def loads(name):
    """As the cases of kiln draw them: uniform, or the cube of a uniform number."""
    g = torch.Generator().manual_seed(1)
    share = torch.rand(ROWS, generator=g)
    expert = ((share if name == "even" else share ** 3) * EXPERTS).long()
    return torch.bincount(expert, minlength=EXPERTS).tolist()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json")
    a = p.parse_args()
    rows = []
    for name, k, n in SHAPES:
        for load in ("even", "skewed"):
            counts = loads(load)
            offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
            make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
            x, w, dy = make(ROWS, k), make(EXPERTS, n, k), make(ROWS, n)
            xs, dys = x.split(counts), dy.split(counts)
            # What the loops write.
            y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
            ys, dxs = y.split(counts), dx.split(counts)

            def loop(f):
                return lambda: [f(e) for e in range(EXPERTS)]

            steps = [
                ("forward", "grouped_mm", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)),
                ("forward", "loop", loop(lambda e: torch.mm(xs[e], w[e].t(), out=ys[e]))),
                ("gradient of rows", "grouped_mm", lambda: torch._grouped_mm(dy, w, offs=offsets)),
                ("gradient of rows", "loop", loop(lambda e: torch.mm(dys[e], w[e], out=dxs[e]))),
                ("gradient of weights", "grouped_mm", lambda: torch._grouped_mm(dy.t(), x, offs=offsets)),
                ("gradient of weights", "loop", loop(lambda e: torch.mm(dys[e].t(), xs[e], out=dw[e]))),
            ]
            for what, how, step in steps:
                row = dict(case=name, load=load, what=what, how=how)
                try:
                    # Inside a graph, as in a step: the loop is then not timed by its launches.
                    step()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step()
                    row["ms"] = median(graph.replay)
                    row["tflops"] = 2 * ROWS * k * n / row["ms"] / 1e9
                except RuntimeError as e:
                    row["error"] = str(e)[:80]
                rows.append(row)
                print(json.dumps(row), flush=True)
    if a.json:
        json.dump(rows, open(a.json, "w"), indent=1)


main()
