#!/usr/bin/env python3
"""The state-space scan of Mamba-2 in PyTorch, bf16: milliseconds forward and backward, and peak memory. One line of JSON for each case and peer.

    python3 peers/ssd.py [--peers compiled,mamba-ssm,attention] [--lengths 1024,8192,65536] [--tokens 65536] [--heads 24] [--head 64] [--state 128] [--chunk 256] [--json out.json]
    python3 peers/ssd.py --mamba-ssm FOLDER     # with the Triton kernels of an unpacked source package of mamba-ssm; nothing of it is built
    python3 peers/ssd.py --device cpu --tiny    # shows only that it runs, and that the peers agree with one step after another
    python3 peers/compare.py ssd-forward ssd-backward   # beside kiln's, in turn (MAMBA_SSM: the FOLDER)

compiled: the chunked form in plain PyTorch, torch.compile.  mamba-ssm: its Triton kernels, where the package can be imported or its FOLDER is given (which
holds mamba_ssm, and einops if Python has none).  attention: PyTorch's causal SDPA with heads * head / 2 channels in heads of 64, as wide as the model whose
scan it is: from which length the scan is faster.  The shapes are those of `kiln bench ops --only ssd`.
For compare.py the modes are scan-compiled and scan-mamba-ssm, each with GRAPH=on too: captured as a CUDA graph.
"""
import time
STARTED = time.time()
import argparse, json, os, subprocess, sys, types  # noqa: E402
import torch  # noqa: E402
import torch._functorch.config  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import serve  # noqa: E402
from timing import median  # noqa: E402

# Rows of compare.py: one row of 65,536 tokens, and which pass of it.
RECIPES = {"ssd-forward": "forward", "ssd-backward": "backward"}


def sequential(x, dt, decay, b, c, d):
    """h = exp(decay) h + dt x B, y = C h + d x, as it is defined."""
    h, ys = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1], dtype=torch.float32), []
    for t in range(x.shape[1]):
        h = decay[:, t, :, None, None].exp() * h + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        ys.append((h * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(ys, 1)


def chunked(x, dt, decay, b, c, d, size):
    """x [batch, time, heads, p]; dt, decay [batch, time, heads]; b, c [batch, time, 1, n]: one group."""
    batch, length, heads, p = x.shape
    n, count = b.shape[-1], -(-length // size)
    pad = count * size - length
    cut = lambda v: F.pad(v, (0, 0) * (v.dim() - 2) + (0, pad)).unflatten(1, (count, size))
    xs, dts, bs, cs = cut(x), cut(dt), cut(b).squeeze(3), cut(c).squeeze(3)
    sums = cut(decay).cumsum(2).permute(0, 1, 3, 2)                                     # [batch, chunk, heads, size]
    moved = (xs * dts[..., None]).to(x.dtype).transpose(2, 3)                           # [batch, chunk, heads, size, p]
    mask = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~mask, -1e30).exp()
    scores = (cs @ bs.transpose(-1, -2))[:, :, None] * between
    inside = scores.to(x.dtype) @ moved
    left = (moved * (sums[..., -1:] - sums).exp()[..., None]).to(x.dtype)
    states = left.transpose(-1, -2).float() @ bs[:, :, None].float() if x.device.type == "cpu" else (left.transpose(-1, -2) @ bs[:, :, None]).float()
    totals = sums[..., -1].transpose(1, 2)                                              # [batch, heads, chunk]
    run = F.pad(totals, (1, 0)).cumsum(-1)
    steps = torch.ones(count + 1, count + 1, dtype=torch.bool, device=x.device).tril()
    passed = (run[..., :, None] - run[..., None, :]).masked_fill(~steps, -1e30).exp()[..., :count, 1:]   # into chunk i, from the end of chunk j
    passed = passed * torch.ones(count, count, device=x.device).tril(-1)
    starts = torch.einsum("bhij,bjhpn->bihpn", passed, states)
    before = (cs[:, :, None] @ starts.to(x.dtype).transpose(-1, -2)) * sums.exp()[..., None]
    y = (inside + before).transpose(2, 3).flatten(1, 2)[:, :length]
    return (y + d[:, None] * x).to(x.dtype)


def inputs(batch, length, a, dtype):
    make = lambda *shape: torch.randn(*shape, device=a.device)
    x, b, c = (make(batch, length, h, w).to(dtype) for h, w in ((a.heads, a.head), (1, a.state), (1, a.state)))
    dt = F.softplus(make(batch, length, a.heads) - 3)
    rate = -torch.linspace(1, 16, a.heads, device=a.device)
    return [v.requires_grad_() for v in (x, dt, rate, b, c, torch.ones(a.heads, device=a.device))]


def mamba_ssm(a):
    """The scan of mamba-ssm. From a folder its kernels are imported without the package's __init__, which wants the compiled extension."""
    if a.mamba_ssm and "mamba_ssm" not in sys.modules:
        sys.path.append(os.path.abspath(a.mamba_ssm))
        package = types.ModuleType("mamba_ssm")
        package.__path__ = [os.path.join(os.path.abspath(a.mamba_ssm), "mamba_ssm")]
        sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as scan
    return lambda x, dt, rate, b, c, d: scan(x, dt, rate, b, c, a.chunk, D=d)


def compile_ahead(a):
    """mamba-ssm's kernels have some 150 variants, of which Triton's autotuner times each. Processes compile a share of them each into Triton's cache."""
    if a.share:
        import triton
        k, n, tune = *map(int, a.share.split("/")), triton.autotune
        triton.autotune = lambda configs, **rest: tune(configs=configs[k::n] or configs[:1], **rest)
        leaves = inputs(1, 2 * a.chunk, a, torch.bfloat16)
        y = mamba_ssm(a)(*leaves)
        torch.autograd.grad(y, leaves, torch.randn_like(y))
        sys.exit()
    args = [os.path.abspath(__file__), "--mamba-ssm", a.mamba_ssm, *(f"--{name}={getattr(a, name)}" for name in ("heads", "head", "state", "chunk"))]
    env = {key: v for key, v in os.environ.items() if key != "BENCH_ROW"}
    for p in [subprocess.Popen([sys.executable, *args, "--share", f"{k}/{a.workers}"], stdout=subprocess.DEVNULL, env=env) for k in range(a.workers)]:
        p.wait()


def peers(a):
    torch._functorch.config.donated_buffer = False   # the backward pass is timed many times over one forward pass
    compiled = torch.compile(chunked, dynamic=False) if a.device == "cuda" else chunked
    yield "compiled", lambda x, dt, rate, b, c, d: compiled(x, dt, dt * rate, b, c, d, a.chunk)
    try:
        triton = mamba_ssm(a)
    except Exception as e:
        print(f"mamba-ssm cannot be imported here: {e}", flush=True)
        return
    yield "mamba-ssm", triton


def measure(run, leaves, a):
    y = run(*leaves)
    g = torch.randn_like(y)
    cuda = a.device == "cuda"
    count = dict(repeat=10, calls=4, cuda=True) if cuda else dict(repeat=1, cuda=False)
    if cuda:
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated()
        torch.autograd.grad(run(*leaves), leaves, g)
        peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    forward = median(lambda: run(*leaves), **count)
    backward = median(lambda: torch.autograd.grad(y, leaves, g, retain_graph=True), **count)
    return dict(forward_ms=round(forward, 4), backward_ms=round(backward, 4), peak_mib=round(peak, 1) if cuda else None)


def check(a):
    leaves = inputs(2, 37, a, torch.float32)
    x, dt, rate, b, c, d = leaves
    right = sequential(x, dt, dt * rate, b.expand(-1, -1, a.heads, -1), c.expand(-1, -1, a.heads, -1), d)
    ours = chunked(x, dt, dt * rate, b, c, d, 16)
    assert torch.allclose(right, ours, atol=1e-4, rtol=1e-4), (right - ours).abs().max()
    print("the chunked form is what one step after another gives", flush=True)


def build(recipe, mode):
    """For serve.py: the pass of a row, and how it is captured."""
    a = arguments([])
    a.mamba_ssm = os.environ.get("MAMBA_SSM")
    if mode == "scan-mamba-ssm" and a.mamba_ssm:
        compile_ahead(a)
    known = dict(peers(a))
    if mode.removeprefix("scan-") not in known:
        sys.exit(f"there is no {mode} here: modes are {', '.join('scan-' + name for name in known)} (MAMBA_SSM names the folder of mamba-ssm)")
    run, leaves = known[mode.removeprefix("scan-")], inputs(1, a.tokens, a, torch.bfloat16)
    y = run(*leaves)
    g = torch.randn_like(y)

    def piece(y):
        return run(*leaves) if RECIPES[recipe] == "forward" else torch.autograd.grad(y, leaves, g, retain_graph=True)

    def captured():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = run(*leaves)   # gradients are made on the stream of their forward pass
            for _ in range(2):
                piece(y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            piece(y)
        return graph.replay
    return lambda: piece(y), 1, "runs", 1, captured if os.environ.get("TUNED_GRAPH") == "on" else None


def arguments(given=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--lengths", default="1024,8192,65536")
    for name, default in (("tokens", 65536), ("heads", 24), ("head", 64), ("state", 128), ("chunk", 256)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--mamba-ssm", metavar="FOLDER")
    p.add_argument("--workers", type=int, default=min(12, os.cpu_count()), help="processes that compile mamba-ssm's kernels")
    p.add_argument("--peers", default="compiled,mamba-ssm,attention", help="which of them")
    p.add_argument("--share", help=argparse.SUPPRESS)
    p.add_argument("--json")
    return p.parse_args(given)


def main():
    a = arguments()
    if a.device == "cpu":   # virtual machines may announce AMX and not have it
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    if a.tiny:
        a.lengths, a.tokens, a.heads, a.head, a.state, a.chunk = "32,80", 160, 4, 8, 8, 16
    if a.mamba_ssm and a.device == "cuda":
        compile_ahead(a)
    check(a)
    rows = []
    for length in map(int, a.lengths.split(",")):
        batch = max(1, a.tokens // length)
        width = a.heads * a.head // 2
        for name, run in [*peers(a), ("attention", None)]:
            if name not in a.peers.split(","):
                continue
            try:
                if name == "attention":
                    heads = max(1, width // 64)
                    leaves = [torch.randn(batch, heads, length, 64, device=a.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
                    run = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
                else:
                    leaves = inputs(batch, length, a, torch.bfloat16 if a.device == "cuda" else torch.float32)
                row = dict(peer=name, batch=batch, time=length, heads=a.heads, head=a.head, state=a.state, **measure(run, leaves, a))
            except Exception as e:   # out of memory, or a kernel that this card does not take
                row = dict(peer=name, batch=batch, time=length, error=str(e).splitlines()[0][:200])
            rows.append(row)
            print(json.dumps(row), flush=True)
            leaves = None
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    if os.environ.get("BENCH_ROW") == "1":
        serve.run(os.path.abspath(__file__), RECIPES, "scan-compiled", build, STARTED, warm_up=lambda recipe: 3)
    else:
        main()
