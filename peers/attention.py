#!/usr/bin/env python3
"""PyTorch's attention, bf16, causal: milliseconds and TFLOP/s, forward and backward, per backend. One line of JSON for each case and backend.

    python3 peers/attention.py [--cases ops,lengths] [--lengths 1024,2048,4096,8192,16384] [--tokens 16384] [--width 2048] [--kv-share 1] [--json out.json]
    python3 peers/attention.py --device cpu --tiny    # shows only that it runs

ops: the shapes of `kiln bench ops`.  lengths: heads of 64 and 128 over rows of each length, --tokens in all, --width / head size query heads and --kv-share times fewer key heads.
TFLOP/s count what causality leaves: forward 2 * batch * heads * time^2 * head_dim (half of 4), backward 2.5 times that.
"""
import argparse, json, os
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from timing import median

# name of the case in kiln, then batch, time, query heads, key heads, head size
OPS = [("flash hydra", 16, 1024, 12, 3, 16), ("flash 64", 8, 1024, 12, 12, 64), ("flash 128", 8, 1024, 16, 8, 128)]


def length_cases(a):
    for d in (64, 128):
        for time in map(int, a.lengths.split(",")):
            heads = a.width // d
            yield f"{d} x {time}", max(1, a.tokens // time), time, heads, max(1, heads // a.kv_share), d


def measure(shape, device, calls):
    """Heads lie as in a model: [batch, time, heads, head_dim], turned."""
    batch, time, heads, kv, d = shape
    make = lambda h: torch.randn(batch, time, h, d, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    q, k, v = make(heads), make(kv), make(kv)
    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)
    y = run()
    g = torch.randn_like(y)
    cuda = device == "cuda"
    count = dict(repeat=10, calls=calls, cuda=cuda) if cuda else dict(repeat=1, cuda=False)
    forward = median(run, **count)
    backward = median(lambda: torch.autograd.grad(y, (q, k, v), g, retain_graph=True), **count)
    flops = 2 * batch * heads * time * time * d
    return dict(forward_ms=round(forward, 5), backward_ms=round(backward, 5), forward_tflops=round(flops / forward / 1e9, 1), backward_tflops=round(2.5 * flops / backward / 1e9, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", default="ops,lengths")
    p.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--kv-share", type=int, default=1)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json")
    a = p.parse_args()
    if a.device == "cpu":   # virtual machines may announce AMX and not have it
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    if a.tiny:
        a.lengths, a.tokens, a.width = "32,64", 128, 256
    cases = ([(n, 1, 32, *rest) if a.tiny else (n, b, t, *rest) for n, b, t, *rest in OPS] if "ops" in a.cases else []) + (list(length_cases(a)) if "lengths" in a.cases else [])
    rows, best = [], {}

    def all_cases(name, backend):
        for case, *shape in cases:
            row = dict(case=case, backend=name, **dict(zip(("batch", "time", "heads", "kv_heads", "head_dim"), shape)))
            try:
                with sdpa_kernel(backend):
                    row.update(measure(shape, a.device, 10))
                best.setdefault(case, {})[name] = row
            except Exception as e:   # a backend that refuses a shape ends no other
                row["error"] = str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__
            rows.append(row)
            print(json.dumps(row), flush=True)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if a.device == "cuda" else (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        all_cases(backend.name, backend)
    if a.device == "cuda":   # FlashAttention 3 where its package is installed; it takes the flash backend's place for good
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
            all_cases("FA3", SDPBackend.FLASH_ATTENTION)
        except Exception as e:
            print(json.dumps(dict(backend="FA3", error=f"{type(e).__name__}: {str(e)[:160]}")), flush=True)

    print(f"\n{'case':14} {'forward ms':>11} {'TFLOP/s':>8} by               {'backward ms':>11} {'TFLOP/s':>8} by")
    for case, found in best.items():
        f, b = (min(found.values(), key=lambda r: r[way + "_ms"]) for way in ("forward", "backward"))
        print(f"{case:14} {f['forward_ms']:>11.4f} {f['forward_tflops']:>8.1f} {f['backend']:16} {b['backward_ms']:>11.4f} {b['backward_tflops']:>8.1f} {b['backend']}")
    if a.json:
        with open(a.json, "w") as out:
            json.dump(rows, out, indent=1)


main()
