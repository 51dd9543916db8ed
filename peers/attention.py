#!/usr/bin/env python3
"""PyTorch's attention at the shapes of `kiln bench ops`, bf16, causal: milliseconds, forward and backward, per backend.

    python3 peers/attention.py [--json out.json]
"""
import argparse, json
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from timing import median

# name of the case in kiln, then batch, time, query heads, key heads, head size
SHAPES = [("flash hydra", 16, 1024, 12, 3, 16), ("flash 64", 8, 1024, 12, 12, 64), ("flash 128", 8, 1024, 16, 8, 128)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json")
    a = p.parse_args()
    rows = []
    for name, batch, time, heads, kv, d in SHAPES:
        make = lambda h: torch.randn(batch, h, time, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q, k, v = make(heads), make(kv), make(kv)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)
                    y = run()
                    g = torch.randn_like(y)
                    forward = median(run)
                    backward = median(lambda: torch.autograd.grad(y, (q, k, v), g, retain_graph=True))
                rows.append(dict(case=name, backend=backend.name, forward_ms=forward, backward_ms=backward))
            except RuntimeError as e:
                rows.append(dict(case=name, backend=backend.name, error=str(e)[:80]))
            print(json.dumps(rows[-1]), flush=True)
    if a.json:
        json.dump(rows, open(a.json, "w"), indent=1)


main()
