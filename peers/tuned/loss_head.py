"""The loss head of a decoder whose whole head is trained: logits are overwritten by their gradient, in chunks of rows, and all gradients are made at once.

Two of its parts exist in several ways; each is chosen by what this PyTorch computes correctly, and fastest.
"""
import sys
import torch
import torch.nn.functional as F
from common import S, compiled, option
from timing import median

try:
    import triton
    import triton.language as tl
except ImportError:   # a PyTorch for CPUs alone
    triton = None


# ---------------------------------------------------------------- logits -> their gradient
def by_compile(logits, target, weight):
    """The weighted cross-entropy of every row, summed; logits [rows, vocab] become its gradient. A target of -1 counts nothing."""
    z, here = logits.float(), target.clamp_min(0)[:, None]
    weight = weight * (target >= 0)
    lse = z.logsumexp(-1, keepdim=True)
    loss = (weight * (lse - z.gather(1, here)).squeeze(1)).sum()
    hit = torch.arange(z.shape[1], device=z.device) == here
    logits.copy_(((z - lse).exp() - hit.float()) * weight[:, None])
    return loss


def gradient_by_compile(logits, target, weight):
    return compiled(by_compile)(logits, target, weight)


if triton:
    @triton.jit
    def row_kernel(logits, target, weight, loss, vocab, BLOCK: tl.constexpr):
        """One program a row: the row is read twice, the second time from L2, and written once."""
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * vocab
        here = tl.load(target + row)
        share = tl.where(here >= 0, tl.load(weight + row), 0.0)
        wanted = tl.load(base + tl.maximum(here, 0)).to(tl.float32)   # before anything is overwritten
        best, total = -float("inf"), 0.0
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(base + at, mask=at < vocab, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
            top = tl.maximum(best, tl.max(z, 0))
            total = total * tl.exp(best - top) + tl.sum(tl.exp(z - top), 0)
            best = top
        lse = best + tl.log(total)
        tl.store(loss + row, share * (lse - wanted))
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(base + at, mask=at < vocab, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
            g = (tl.exp(z - lse) - tl.where(at == here, 1.0, 0.0)) * share
            tl.store(base + at, g.to(logits.dtype.element_ty), mask=at < vocab)

    def gradient_by_triton(logits, target, weight):
        loss = torch.empty(len(logits), device=logits.device)
        row_kernel[(len(logits),)](logits, target, weight, loss, logits.shape[1], BLOCK=min(16384, triton.next_power_of_2(logits.shape[1])), num_warps=32)
        return loss.sum()


def right(way, vocab):
    """Whether it agrees with the formula, on a few rows."""
    z = torch.randn(16, vocab, device=S.device).to(S.low)
    target, weight = torch.randint(-1, vocab, (16,), device=S.device), torch.rand(16, device=S.device)
    target[0] = -1
    wanted_g = z.clone()
    wanted = by_compile(wanted_g, target, weight)
    try:
        loss = way(z, target, weight)
    except Exception as e:   # whatever a compiler throws: the other way is left
        print(f"{way.__name__}: {type(e).__name__}: {e}", file=sys.stderr)
        return False
    return torch.allclose(loss, wanted, rtol=1e-3) and torch.allclose(z.float(), wanted_g.float(), rtol=2e-2, atol=1e-6)


def gradient_way(rows, vocab):
    """SOFTMAX=compile|triton, or the faster of both."""
    ways = dict(compile=gradient_by_compile, **(dict(triton=gradient_by_triton) if triton else {}))
    asked = option("SOFTMAX", "compile" if S.device == "cpu" else "")
    if asked:
        return ways[asked]
    ways = [w for w in ways.values() if w is gradient_by_compile or right(w, vocab)]
    z = torch.zeros(rows, vocab, device=S.device, dtype=S.low)
    target, weight = torch.zeros(rows, dtype=torch.long, device=S.device), torch.ones(rows, device=S.device) / rows
    return min(ways, key=lambda w: median(lambda: w(z, target, weight), repeat=3))


# ---------------------------------------------------------------- an f32 sum of bf16 products
def add_by_cast(total, a, b):
    part = a @ b
    return part.float() if total is None else total.add_(part)


def add_by_mm(total, a, b):
    part = torch.mm(a, b, out_dtype=torch.float32)
    return part if total is None else total.add_(part)


def add_by_addmm(total, a, b):
    return torch.mm(a, b, out_dtype=torch.float32) if total is None else torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def add_way():
    """The product is added inside of the GEMM where that can be asked for."""
    a, b = torch.randn(64, 32, device=S.device).to(S.low), torch.randn(32, 48, device=S.device).to(S.low)
    wanted = 2 * (a.float() @ b.float())
    for way in (add_by_addmm, add_by_mm) if S.device == "cuda" else ():
        try:
            if torch.allclose(way(way(None, a, b), a, b), wanted, rtol=1e-2, atol=1e-2):
                return way
        except (RuntimeError, TypeError):
            pass
    return add_by_cast


# ---------------------------------------------------------------- the head
class Head:
    """kind: chunk or whole. The call gives the loss, its gradient by h [rows, dim] and by the head [vocab, dim] (f32; None where the head is frozen)."""
    def __init__(self, kind, rows, vocab, frozen=False):
        self.chunk = min(rows, int(option("CHUNK", "8192"))) if kind == "chunk" else rows
        self.gradient, self.add, self.frozen = gradient_way(self.chunk, vocab), add_way(), frozen

    def ways(self):
        return f"{self.gradient.__name__}, {self.add.__name__}"

    @torch.no_grad()
    def __call__(self, h, low, targets, weight):
        dh, dw, loss = torch.empty_like(h), None, torch.zeros((), device=h.device)
        for i in range(0, len(h), self.chunk):
            rows = slice(i, i + self.chunk)
            g = h[rows] @ low.t()
            loss += self.gradient(g, targets[rows], weight[rows])
            torch.mm(g, low, out=dh[rows])
            if not self.frozen:
                dw = self.add(dw, g.t(), h[rows])
        return loss, dh, dw


def plain_loss(h, low, targets, weight):
    return (F.cross_entropy((h @ low.t()).float(), targets, ignore_index=-1, reduction="none") * weight).sum()
