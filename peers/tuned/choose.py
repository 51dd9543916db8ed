"""Own kernels beside PyTorch's: which is taken is found out on the card, where each way is captured as a graph and timed alone.

KERNELS=torch|own asks for one; without it the faster is taken, and a way that fails or gives other numbers is left out (stderr says so).
On a CPU own kernels run in Triton's interpreter (TRITON_INTERPRET=1), for --check.
"""
import os, sys
import torch
from common import S, option
from timing import median


def own_kernels():
    """Whether Triton's kernels can run here."""
    if S.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:   # a PyTorch for CPUs alone
        return False
    return option("KERNELS", "" if S.device == "cuda" else "torch") != "torch"


def replayed(way, calls):
    """`calls` of it in one graph, so that what the host needs to launch them does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        way()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            way()
    return graph.replay


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


def same(found, wanted, tolerance):
    """Whether each tensor differs by no more than so much of the largest number."""
    return all(((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max().clamp_min(1e-6)).item() for a, b in zip(tensors(found), tensors(wanted), strict=True))


def fastest(what, ways, calls=4, repeat=10, tolerance=3e-2):
    """The name of the fastest of `ways` (name -> call without arguments that returns tensors). The first is what the others must agree with."""
    asked = option("KERNELS", "" if S.device == "cuda" else next(iter(ways)))
    matching = [name for name in ways if name.split()[0] == asked]
    if len(ways) == 1 or S.device != "cuda":
        return (matching or list(ways))[0]
    wanted, times = [t.clone() for t in tensors(next(iter(ways.values()))())], {}
    for name in matching or ways:
        try:
            if not same(ways[name](), wanted, tolerance):
                raise ArithmeticError("gives other numbers")
            times[name] = median(replayed(ways[name], calls), repeat=repeat) / calls
        except Exception as e:   # whatever a compiler throws: the other ways are left
            print(f"{what}, {name}: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr)
    torch.cuda.empty_cache()
    print(f"{what}: " + ", ".join(f"{name} {ms:.4f} ms" for name, ms in times.items()), file=sys.stderr)
    return min(times, key=times.get)
