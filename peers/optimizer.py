#!/usr/bin/env python3
"""What AdamW's and Muon's updates cost in PyTorch, on the weights of a decoder: milliseconds an update (clipping included), and as a share of a whole step.

    python3 peers/optimizer.py [--model gpt2-124m] [--whole] [--json out.json]
    python3 peers/optimizer.py --device cpu --tiny    # shows only that it runs

adamw, muon: tuned/optimizers.py, compiled, captured as one CUDA graph (bf16 gradients, f32 masters and moments, bf16 copies written; Newton-Schulz in bf16, batched over matrices of one
shape). torch-adamw, torch-muon: torch.optim's own, fused AdamW and Muon (match_rms_adamw) over f32 parameters and gradients, clip_grad_norm_, launched call by call; muon with AdamW for
the rest. --whole: whole training steps with both, of peers/decoder.py's fastest kind; their difference is what Muon costs. Muon as reference/golden_decoder.py defines it.
"""
import argparse, json, os, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "tuned")]
import torch  # noqa: E402
from common import S  # noqa: E402
from decoder import captured, set_option  # noqa: E402
from optimizers import HYPER, Optimizer, Parameters  # noqa: E402
from timing import median  # noqa: E402
import plain  # noqa: E402


def fill(params):
    """Random gradients: where the model's are bf16 these are, too, and they stay (an update forgets its own list)."""
    kept = {name: torch.randn_like(p, dtype=torch.float32 if name in ("embedding", "position", "head") or name.endswith("norm") else S.low) for name, p in params.leaf.items()}
    params.forget = lambda: None
    params.grads = kept


def ours(s, kind):
    params = Parameters(plain.random_start(s))
    fill(params)
    step = Optimizer(params, kind, plain.matrices(s)).step
    step()
    return captured(step) if S.device == "cuda" else step


def torchs(s, kind):
    start = {name: p.requires_grad_() for name, p in plain.random_start(s).items()}
    inside = [p for name, p in start.items() if kind == "muon" and name in plain.matrices(s)]
    rest = [p for p in start.values() if not any(p is q for q in inside)]
    for p in start.values():
        p.grad = torch.randn_like(p)
    h = HYPER
    opts = [torch.optim.AdamW(rest, lr=h["lr"], betas=(h["beta1"], h["beta2"]), eps=h["eps"], weight_decay=h["weight_decay"], fused=True)]
    if inside:
        opts.append(torch.optim.Muon(inside, lr=h["lr"], weight_decay=h["weight_decay"], momentum=h["momentum"], adjust_lr_fn="match_rms_adamw"))

    def step():
        torch.nn.utils.clip_grad_norm_(start.values(), h["clip"], foreach=True)
        for o in opts:
            o.step()
    return step


def whole(s, kind):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    set_option("OPTIMIZER", kind)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        step = plain.random_training(s).step
        step()
        return captured(step) if S.device == "cuda" else step


def newton_schulz_flops(s):
    """Five times: x x^T, A A and (..) x of every matrix [r, c], r <= c."""
    total = 0
    for name, rows in plain.matrices(s).items():
        for n in rows:
            r, c = sorted((n, plain.shapes(s)[name][1]))
            total += 5 * (4 * r * r * c + 2 * r * r * r)
    return total


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="gpt2-124m", choices=list(plain.SIZES))
    p.add_argument("--whole", action="store_true")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json")
    a = p.parse_args()
    S.device, S.mode = a.device, "graphs"
    if a.device == "cpu":   # virtual machines may announce AMX and not have it
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    torch.manual_seed(0)
    s = plain.tiny(plain.SIZES[a.model]) if a.tiny else plain.SIZES[a.model]
    cuda, rows = a.device == "cuda", {}
    cases = [("adamw", ours, "adamw"), ("muon", ours, "muon"), ("torch-adamw", torchs, "adamw"), ("torch-muon", torchs, "muon")]
    cases += [("whole step, adamw", whole, "adamw"), ("whole step, muon", whole, "muon")] if a.whole else []
    for name, make, kind in cases:
        row = dict(optimizer=name, model=a.model, parameters=plain.parameters(s))
        try:
            step = make(s, kind)
            row["ms"] = round(median(step, repeat=15 if cuda else 1, cuda=cuda), 4)
            if name == "muon":
                row["newton_schulz_tflop"] = round(newton_schulz_flops(s) / 1e12, 3)
        except Exception as e:   # one that fails ends no other
            row["error"] = f"{type(e).__name__}: {str(e)[:300]}"
        rows[name] = row
        print(json.dumps(row), flush=True)
        step = None
        if cuda:
            torch.cuda.empty_cache()
    ms = lambda name: rows.get(name, {}).get("ms")
    for kind in ("", "torch-", "whole step, "):
        if ms(kind + "adamw") and ms(kind + "muon"):
            both = ms(kind + "adamw"), ms(kind + "muon")
            print(f"{kind or 'update, '}adamw {both[0]:.3f} ms, muon {both[1]:.3f} ms: {both[1] - both[0]:+.3f} ms" + (f", {both[1] / both[0] - 1:+.1%} of a step" if "whole" in kind else ""))
    if a.json:
        with open(a.json, "w") as out:
            json.dump(list(rows.values()), out, indent=1)


if __name__ == "__main__":
    main()
