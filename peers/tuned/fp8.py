"""FP8 by hand for plain decoders (FP8=tensorwise): every product of the layers is `torch._scaled_mm` with fast sums; embedding, head, norms and attention as in bf16.

Scales are delayed: a tensor's is the largest number that it may hold, divided by the largest that the same tensor held in the last 16 steps; they live on the device.
One Triton kernel rounds an activation or a gradient, writes its rows and its columns (each of three products wants its operands along its own sum) and keeps the maximum. The optimizer's kernel does
the same for the weights, which have no bf16 copy. Activations and weights are e4m3, gradients e5m2.
"""
import functools
import torch
import triton
import triton.language as tl
from choose import fastest
from common import S, compiled

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
HISTORY = 16


@triton.jit
def narrow_tile(x, scale, amax, to, to_t, rows, columns, m, n, LARGEST: tl.constexpr):
    """A tile as rows, as columns, and into the maximum."""
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.atomic_max(amax, tl.max(tl.max(tl.where(inside, tl.abs(x), 0.0), 1), 0))
    low = tl.minimum(tl.maximum(x * scale, -LARGEST), LARGEST).to(to.dtype.element_ty)
    tl.store(to + rows[:, None].to(tl.int64) * n + columns[None, :], low, mask=inside)
    tl.store(to_t + columns[:, None].to(tl.int64) * m + rows[None, :], tl.trans(low), mask=(columns[:, None] < n) & (rows[None, :] < m))


@triton.jit
def round_kernel(x, scale, amax, to, to_t, m, n, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    tile = tl.load(x + rows[:, None].to(tl.int64) * n + columns[None, :], mask=(rows[:, None] < m) & (columns[None, :] < n), other=0.0).to(tl.float32)
    narrow_tile(tile, tl.load(scale), amax, to, to_t, rows, columns, m, n, LARGEST)


@triton.jit
def adamw_kernel(p, m, v, g, clip, rate, c1, c2, decay, beta1, beta2, eps, scale, amax, to, to_t, rows_of, columns_of, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """optimizers.adamw_one, and the new weights narrow."""
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    at, inside = rows[:, None].to(tl.int64) * columns_of + columns[None, :], (rows[:, None] < rows_of) & (columns[None, :] < columns_of)
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    old_m, old_v, w, rate = tl.load(m + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0), tl.load(p + at, mask=inside, other=0.0), tl.load(rate)
    new_m, new_v = old_m + (1 - beta1) * (grad - old_m), old_v + (1 - beta2) * (grad * grad - old_v)
    w = w * (1 - rate * decay) - rate * (new_m / tl.load(c1)) / (tl.sqrt(new_v / tl.load(c2)) + eps)
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)
    tl.store(p + at, w, mask=inside)
    narrow_tile(w, tl.load(scale), amax, to, to_t, rows, columns, rows_of, columns_of, LARGEST)


def rounded(x, dtype, scale, amax, tile=(64, 64, 4)):
    """x: [m, n] -> the same narrow, and its transpose"""
    (m, n), (bm, bn, warps) = x.shape, tile
    to, to_t = x.new_empty(m, n, dtype=dtype), x.new_empty(n, m, dtype=dtype)
    round_kernel[(triton.cdiv(m, bm), triton.cdiv(n, bn))](x, scale, amax, to, to_t, m, n, LARGEST[dtype], bm, bn, num_warps=warps)
    return to, to_t


def new_scales(amax, history, scale, largest):
    history.copy_(torch.cat((history[1:], amax[None])))
    top = history.amax(0)
    scale.copy_(torch.where(top > 0, largest / top.clamp_min(1e-30), 1.0))
    amax.zero_()


class Product(torch.autograd.Function):
    """x W^T + bias; x: [rows, in]. `leaf` stands for the weights and takes their gradient."""
    @staticmethod
    def forward(ctx, x, leaf, bias, layer):
        f, w, i = layer.fp8, layer.w, layer.activation
        x8, ctx.xt = rounded(x, torch.float8_e4m3fn, f.scale[i], f.amax[i], f.tile)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return torch._scaled_mm(x8, w.t(), f.inverse[i], f.inverse[layer.weight], bias=bias, out_dtype=S.low, use_fast_accum=True)

    @staticmethod
    def backward(ctx, g):
        layer, xt = ctx.layer, ctx.xt
        f, i, ctx.xt = layer.fp8, layer.gradient, None
        g = g.contiguous()
        g8, gt = rounded(g, torch.float8_e5m2, f.scale[i], f.amax[i], f.tile)
        product = functools.partial(torch._scaled_mm, out_dtype=S.low, use_fast_accum=True)
        dx = product(g8, layer.wt.t(), f.inverse[i], f.inverse[layer.weight])
        dw = product(gt, xt.t(), f.inverse[i], f.inverse[layer.activation])
        return dx, dw, g.sum(0) if ctx.has_bias else None, None


class Linear:
    """One weight, narrow in both orientations, and where its three scales are."""
    def __init__(self, fp8, i, master):
        self.fp8, self.weight, self.activation, self.gradient = fp8, i, fp8.count + i, 2 * fp8.count + i
        self.m, self.v = torch.zeros_like(master), torch.zeros_like(master)
        fp8.amax[self.weight] = master.abs().max()
        fp8.scale[self.weight] = LARGEST[torch.float8_e4m3fn] / fp8.amax[self.weight]
        self.w, self.wt = rounded(master, torch.float8_e4m3fn, fp8.scale[self.weight], fp8.amax[self.weight])

    def __call__(self, x, leaf, bias):
        return Product.apply(x.flatten(0, -2).contiguous(), leaf, bias, self).unflatten(0, x.shape[:-1])


class Fp8:
    """The products of all layers. masters: name -> f32 weights, which `step` updates."""
    def __init__(self, masters, tokens):
        self.masters, self.count = masters, len(masters)
        self.amax, self.scale = torch.zeros(3 * self.count, device=S.device), torch.ones(3 * self.count, device=S.device)
        self.scale[2 * self.count:] = 1024 * tokens   # gradients of a mean, before any was seen
        self.largest = torch.tensor([LARGEST[torch.float8_e4m3fn]] * 2 * self.count + [LARGEST[torch.float8_e5m2]] * self.count, device=S.device)
        self.history = torch.zeros(HISTORY, 3 * self.count, device=S.device)
        self.tile = self.best_tile()
        self.linear = {name: Linear(self, i, p) for i, (name, p) in enumerate(masters.items())}
        self.inverse = 1 / self.scale

    def best_tile(self):
        """(rows, columns, warps) of the rounding kernel, timed."""
        many = [(bm, bn, warps) for bm, bn in ((64, 64), (128, 64), (64, 128), (128, 128)) for warps in (4, 8)]
        if S.device != "cuda":
            return many[0]
        x, one, amax = torch.randn(16384, 2048, device=S.device).to(S.low), torch.ones((), device=S.device), torch.zeros((), device=S.device)
        name = fastest("fp8 rounding", {" ".join(("own", *map(str, t))): functools.partial(rounded, x, torch.float8_e4m3fn, one, amax, t) for t in many})
        return tuple(map(int, name.split()[1:]))

    @torch.no_grad()
    def scales(self, weights=True):
        """After a step: what was the largest becomes the next scales. The weights were rounded by the old one."""
        n = self.count
        self.inverse[:n].copy_(1 / self.scale[:n])
        kept = None if weights else (self.amax[:n].clone(), self.scale[:n].clone())
        compiled(new_scales)(self.amax, self.history, self.scale, self.largest)
        if kept:   # they have not been rounded again
            self.amax[:n].copy_(kept[0]), self.scale[:n].copy_(kept[1])
        self.inverse[n:].copy_(1 / self.scale[n:])

    @torch.no_grad()
    def step(self, grads, clip, rate, c1, c2, h):
        bm, bn, warps = 64, 64, 8   # what fits into registers
        for name, p in self.masters.items():
            one, g = self.linear[name], grads[name]
            i, (rows, columns) = one.weight, p.shape
            adamw_kernel[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](p, one.m, one.v, g, clip, rate, c1, c2, h["weight_decay"], h["beta1"], h["beta2"], h["eps"], self.scale[i], self.amax[i],
                                                                        one.w, one.wt, rows, columns, LARGEST[torch.float8_e4m3fn], bm, bn, num_warps=warps)
        self.scales()
