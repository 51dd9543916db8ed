"""vision_bdh's attention in Triton: ReLU, RoPE, scores and scores x values in one kernel each way, so that queries are never written.

A program has one head of one picture. Rows are the class token (row 0, whose RoPE turns nothing) and a power of two of patches: the patches' scores are products on
tensor cores, the class token's row is added by hand. Pairs of neurons are taken apart into evens and odds, since the order of a sum does not matter.
"""
import functools
import torch
import triton
import triton.language as tl
from choose import fastest
from common import S


@triton.jit
def turned(x, cos, sin, ROWS: tl.constexpr, HALF: tl.constexpr):
    """max(x, 0) turned, as evens and odds. x: [ROWS, 2 HALF], f32"""
    e, o = tl.split(tl.reshape(tl.maximum(x, 0.0), (ROWS, HALF, 2)))
    return e * cos - o * sin, o * cos + e * sin


@triton.jit
def forward_kernel(pre, xn, cos, sin, y, scores, edge, batch, HEADS: tl.constexpr, NEURONS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    low = pre.dtype.element_ty
    b, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    WIDTH: tl.constexpr = HEADS * NEURONS
    rows, pairs = tl.arange(0, ROWS), tl.arange(0, BN // 2)
    base = pre + b.to(tl.int64) * (ROWS + 1) * WIDTH + h * NEURONS
    all, first, corner = tl.zeros((ROWS, ROWS), tl.float32), tl.zeros((ROWS,), tl.float32), 0.0
    for n in range(0, NEURONS, BN):
        at = base + n + tl.arange(0, BN)
        table = (rows[:, None] + 1) * (NEURONS // 2) + n // 2 + pairs[None, :]
        e, o = turned(tl.load(at[None, :] + (rows[:, None] + 1) * WIDTH).to(tl.float32), tl.load(cos + table).to(tl.float32), tl.load(sin + table).to(tl.float32), ROWS, BN // 2)
        e0, o0 = tl.split(tl.reshape(tl.maximum(tl.load(at).to(tl.float32), 0.0), (BN // 2, 2)))
        first += tl.sum(e * e0[None, :] + o * o0[None, :], 1)
        corner += tl.sum(e0 * e0 + o0 * o0, 0)
        e, o = e.to(low), o.to(low)
        all = tl.dot(e, tl.trans(e), all, input_precision="ieee")
        all = tl.dot(o, tl.trans(o), all, input_precision="ieee")
    own = tl.program_id(0)
    all = all.to(low)
    tl.store(scores + own * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :], all)
    tl.store(edge + own * 2 * ROWS + rows, first)
    tl.store(edge + own * 2 * ROWS + ROWS, corner)
    for d in range(0, DIM, BD):
        column = d + tl.arange(0, BD)
        place = (rows[:, None] + 1) * DIM + column[None, :]
        v = tl.load(xn + b * (ROWS + 1) * DIM + place)
        v0 = tl.load(xn + b * (ROWS + 1) * DIM + column).to(tl.float32)
        out = y + (h * batch + b) * (ROWS + 1) * DIM
        tl.store(out + place, (tl.dot(all, v, input_precision="ieee") + first[:, None] * v0[None, :]).to(low))
        tl.store(out + column, (corner * v0 + tl.sum(first[:, None] * v.to(tl.float32), 0)).to(low))


@triton.jit
def backward_kernel(dy, dxs, pre, xn, cos, sin, scores, edge, dpre, dxn, batch, HEADS: tl.constexpr, NEURONS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
                    BD: tl.constexpr):
    """dxs: the gradient by max(pre, 0) from elsewhere, added here. dxn: each head's part."""
    low = pre.dtype.element_ty
    own = tl.program_id(0)
    b, h = own // HEADS, own % HEADS
    WIDTH: tl.constexpr = HEADS * NEURONS
    rows, pairs = tl.arange(0, ROWS), tl.arange(0, BN // 2)
    s = tl.load(scores + own * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :])
    first, corner = tl.load(edge + own * 2 * ROWS + rows), tl.load(edge + own * 2 * ROWS + ROWS)
    ds, along, d_corner = tl.zeros((ROWS, ROWS), tl.float32), tl.zeros((ROWS,), tl.float32), 0.0
    for d in range(0, DIM, BD):
        column = d + tl.arange(0, BD)
        place = (rows[:, None] + 1) * DIM + column[None, :]
        value, head = xn + b * (ROWS + 1) * DIM, (h * batch + b) * (ROWS + 1) * DIM
        v, g = tl.load(value + place), tl.load(dy + head + place)
        v0, g0 = tl.load(value + column).to(tl.float32), tl.load(dy + head + column).to(tl.float32)
        ds = tl.dot(g, tl.trans(v), ds, input_precision="ieee")
        along += tl.sum(g.to(tl.float32) * v0[None, :] + v.to(tl.float32) * g0[None, :], 1)
        d_corner += tl.sum(g0 * v0, 0)
        # scores are symmetric
        tl.store(dxn + head + place, (tl.dot(s, g, input_precision="ieee") + first[:, None] * g0[None, :]).to(low))
        tl.store(dxn + head + column, (corner * g0 + tl.sum(first[:, None] * g.to(tl.float32), 0)).to(low))
    both = (ds + tl.trans(ds)).to(low)
    for n in range(0, NEURONS, BN):
        at = b.to(tl.int64) * (ROWS + 1) * WIDTH + h * NEURONS + n + tl.arange(0, BN)
        place = at[None, :] + (rows[:, None] + 1) * WIDTH
        table = (rows[:, None] + 1) * (NEURONS // 2) + n // 2 + pairs[None, :]
        c, t = tl.load(cos + table).to(tl.float32), tl.load(sin + table).to(tl.float32)
        x, x0 = tl.load(pre + place).to(tl.float32), tl.load(pre + at).to(tl.float32)
        e, o = turned(x, c, t, ROWS, BN // 2)
        e0, o0 = tl.split(tl.reshape(tl.maximum(x0, 0.0), (BN // 2, 2)))
        de = tl.dot(both, e.to(low), input_precision="ieee") + along[:, None] * e0[None, :]
        do = tl.dot(both, o.to(low), input_precision="ieee") + along[:, None] * o0[None, :]
        g = tl.reshape(tl.join(de * c + do * t, do * c - de * t), (ROWS, BN)) + tl.load(dxs + place).to(tl.float32)
        tl.store(dpre + place, tl.where(x > 0, g, 0.0).to(low))
        de0 = 2 * d_corner * e0 + tl.sum(along[:, None] * e, 0)
        do0 = 2 * d_corner * o0 + tl.sum(along[:, None] * o, 0)
        g0 = tl.reshape(tl.join(de0, do0), (BN,)) + tl.load(dxs + at).to(tl.float32)
        tl.store(dpre + at, tl.where(x0 > 0, g0, 0.0).to(low))


def shape(pre, xn, bn):
    (batch, t, dim), rows = xn.shape, xn.shape[1] - 1
    return batch, dict(DIM=dim, ROWS=rows, BN=bn, BD=next(d for d in (64, 32, 16) if dim % d == 0))


@torch.library.custom_op("peers::bdh_forward", mutates_args=())
def bdh_forward(pre: torch.Tensor, xn: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, bn: int, warps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre: [batch * time, heads * neurons]; xn: [batch, time, dim]; tables: [time, neurons / 2]. -> [heads, batch, time, dim], and the scores for the way back"""
    batch, sizes = shape(pre, xn, bn)
    rows, neurons = sizes["ROWS"], pre.shape[1] // heads
    y, scores = pre.new_empty(heads, *xn.shape), pre.new_empty(batch * heads, rows, rows)
    edge = pre.new_empty(batch * heads, 2 * rows, dtype=torch.float32)
    forward_kernel[(batch * heads,)](pre, xn, cos, sin, y, scores, edge, batch, HEADS=heads, NEURONS=neurons, num_warps=warps, **sizes)
    return y, scores, edge


@bdh_forward.register_fake
def _(pre, xn, cos, sin, heads, bn, warps):
    n, rows = heads * len(xn), xn.shape[1] - 1
    return pre.new_empty(heads, *xn.shape), pre.new_empty(n, rows, rows), pre.new_empty(n, 2 * rows, dtype=torch.float32)


@torch.library.custom_op("peers::bdh_backward", mutates_args=())
def bdh_backward(dy: torch.Tensor, dxs: torch.Tensor, pre: torch.Tensor, xn: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scores: torch.Tensor, edge: torch.Tensor, heads: int,
                 bn: int, warps: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sizes = shape(pre, xn, bn)
    dpre, dxn = torch.empty_like(pre), torch.empty_like(dy)
    backward_kernel[(batch * heads,)](dy, dxs, pre, xn, cos, sin, scores, edge, dpre, dxn, batch, HEADS=heads, NEURONS=pre.shape[1] // heads, num_warps=warps, **sizes)
    return dpre, dxn


@bdh_backward.register_fake
def _(dy, dxs, pre, xn, cos, sin, scores, edge, heads, bn, warps):
    return torch.empty_like(pre), torch.empty_like(dy)


class Scores(torch.autograd.Function):
    """-> scores x values, [heads, batch, time, dim], and max(pre, 0), whose gradient the kernel adds. tiles: the shapes that `tiles` chose"""
    @staticmethod
    def forward(ctx, pre, xn, cos, sin, heads, tiles):
        y, scores, edge = bdh_forward(pre, xn, cos, sin, heads, *tiles[0])
        ctx.save_for_backward(pre, xn, cos, sin, scores, edge)
        ctx.heads, ctx.tiles = heads, tiles
        return y, torch.relu(pre)

    @staticmethod
    def backward(ctx, dy, dxs):
        dpre, dxn = bdh_backward(dy.contiguous(), dxs.contiguous(), *ctx.saved_tensors, ctx.heads, *ctx.tiles[1])
        return dpre, dxn.float().sum(0).to(dxn.dtype), None, None, None, None


def tiles(batch, cos, sin, heads, dim):
    """(neurons at a time, warps) of both kernels, timed."""
    t, neurons = len(cos), 2 * cos.shape[1]
    many = [(bn, warps) for bn in (32, 64, 128) for warps in (4, 8) if bn <= neurons]
    if S.device != "cuda":
        return many[0], many[0]
    pre, xn = torch.randn(batch * t, heads * neurons, device=S.device).to(S.low), torch.randn(batch, t, dim, device=S.device).to(S.low)
    forward = {f"own {bn} {w}": functools.partial(bdh_forward, pre, xn, cos, sin, heads, bn, w) for bn, w in many}
    y, *kept = bdh_forward(pre, xn, cos, sin, heads, *many[0])
    backward = {f"own {bn} {w}": functools.partial(bdh_backward, y, pre, pre, xn, cos, sin, *kept, heads, bn, w) for bn, w in many}
    of = lambda name: tuple(map(int, name.split()[1:]))
    return of(fastest("scores", forward)), of(fastest("scores' gradient", backward))
