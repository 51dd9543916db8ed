"""hrm's experts in Triton: a grouped product that gathers its rows, with SwiGLU behind it; on the way back, one with SwiGLU's gradient behind it.

Rows are sorted by expert; offsets[e] is where expert e's rows end. A tile of rows is of one expert. What is gained against `torch._grouped_mm` is traffic: rows that
are gathered are not written, and gate and up only where a gradient needs them.
"""
import functools
import torch
import triton
import triton.language as tl
from choose import fastest
from common import S


@triton.jit
def tile_of(offsets, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """The expert of this program's rows (EXPERTS where there is none left), the first of them, and where the expert's end."""
    e = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + e)
    starts = tl.where(e > 0, tl.load(offsets + tl.maximum(e - 1, 0)), 0)
    tiles = (ends - starts + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    pid = tl.program_id(0)
    expert = tl.sum((last <= pid).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, starts + (pid - last + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def up_kernel(x, rows_of, w, offsets, h, gates, K: tl.constexpr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """h = silu(x gate^T) * (x up^T). w: [EXPERTS, 2 HIDDEN, K]; KEEP: gate and up are written to gates [rows, 2 HIDDEN]."""
    expert, start, end = tile_of(offsets, EXPERTS, BM)
    if expert < EXPERTS:
        row, column, k = start + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        here = row[:, None] < end
        a = x + tl.load(rows_of + row, mask=row < end, other=0).to(tl.int64)[:, None] * K + k[None, :]
        b = w + expert.to(tl.int64) * 2 * HIDDEN * K + column[None, :] * K + k[:, None]
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for i in range(0, K, BK):
            part = tl.load(a + i, mask=here, other=0.0)
            gate = tl.dot(part, tl.load(b + i), gate, input_precision="ieee")
            up = tl.dot(part, tl.load(b + HIDDEN * K + i), up, input_precision="ieee")
        low = h.dtype.element_ty
        gate, up = gate.to(low), up.to(low)
        if KEEP:
            to = gates + row.to(tl.int64)[:, None] * 2 * HIDDEN + column[None, :]
            tl.store(to, gate, mask=here)
            tl.store(to + HIDDEN, up, mask=here)
        g = gate.to(tl.float32)
        tl.store(h + row.to(tl.int64)[:, None] * HIDDEN + column[None, :], (g / (1 + tl.exp(-g)) * up.to(tl.float32)).to(low), mask=here)


@triton.jit
def back_kernel(dy, w, offsets, gates, d_gates, K: tl.constexpr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """SwiGLU's gradient of dy down. w: [EXPERTS, K, HIDDEN]"""
    expert, start, end = tile_of(offsets, EXPERTS, BM)
    if expert < EXPERTS:
        row, column, k = start + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        here = row[:, None] < end
        a = dy + row.to(tl.int64)[:, None] * K + k[None, :]
        b = w + expert.to(tl.int64) * K * HIDDEN + k[:, None] * HIDDEN + column[None, :]
        dh = tl.zeros((BM, BN), tl.float32)
        for i in range(0, K, BK):
            dh = tl.dot(tl.load(a + i, mask=here, other=0.0), tl.load(b + i * HIDDEN), dh, input_precision="ieee")
        at = row.to(tl.int64)[:, None] * 2 * HIDDEN + column[None, :]
        gate, up = tl.load(gates + at, mask=here, other=0.0).to(tl.float32), tl.load(gates + at + HIDDEN, mask=here, other=0.0).to(tl.float32)
        s = 1 / (1 + tl.exp(-gate))
        low = d_gates.dtype.element_ty
        tl.store(d_gates + at, (dh * up * s * (1 + gate * (1 - s))).to(low), mask=here)
        tl.store(d_gates + at + HIDDEN, (dh * gate * s).to(low), mask=here)


def fitting(n, most):
    return next(b for b in (256, 128, 64, 32, 16) if b <= most and n % b == 0)


def launch(kernel, rows, experts, hidden, k, tile, *arguments, **named):
    bm, bn, bk, warps, stages = tile
    bn, bk = fitting(hidden, bn), fitting(k, bk)
    kernel[(triton.cdiv(rows, bm) + experts, hidden // bn)](*arguments, k, hidden, experts, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages, **named)


@torch.library.custom_op("peers::experts_up", mutates_args=())
def experts_up(x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, keep: bool, tile: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [tokens, k]; rows: the token of each sorted row -> h [rows, hidden], and [gate, up] or nothing"""
    experts, hidden, k = w.shape[0], w.shape[1] // 2, w.shape[2]
    h, gates = x.new_empty(len(rows), hidden), x.new_empty(len(rows) if keep else 0, 2 * hidden)
    launch(up_kernel, len(rows), experts, hidden, k, tile, x, rows, w, offsets, h, gates, KEEP=keep)
    return h, gates


@experts_up.register_fake
def _(x, rows, w, offsets, keep, tile):
    return x.new_empty(len(rows), w.shape[1] // 2), x.new_empty(len(rows) if keep else 0, w.shape[1])


@torch.library.custom_op("peers::experts_back", mutates_args=())
def experts_back(dy: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, gates: torch.Tensor, tile: list[int]) -> torch.Tensor:
    d_gates = torch.empty_like(gates)
    launch(back_kernel, len(dy), w.shape[0], w.shape[2], w.shape[1], tile, dy, w, offsets, gates, d_gates)
    return d_gates


@experts_back.register_fake
def _(dy, w, offsets, gates, tile):
    return torch.empty_like(gates)


class Experts(torch.autograd.Function):
    """y of every sorted row. The gradients of weights and rows are grouped products as they are; rows are gathered for one of them, and summed by token with a gather."""
    @staticmethod
    def forward(ctx, x, gate_up, down, rows, place, offsets, k, keep, tiles):
        h, gates = experts_up(x, rows, gate_up, offsets, keep, tiles[0])
        ctx.save_for_backward(x, gate_up, down, rows, place, offsets, h, gates)
        ctx.k, ctx.tiles = k, tiles
        return torch._grouped_mm(h, down.mT, offs=offsets)

    @staticmethod
    def backward(ctx, dy):
        x, gate_up, down, rows, place, offsets, h, gates = ctx.saved_tensors
        dy = dy.contiguous()
        d_gates = experts_back(dy, down, offsets, gates, ctx.tiles[1])
        d_down = torch._grouped_mm(dy.mT, h, offs=offsets)
        d_gate_up = torch._grouped_mm(d_gates.mT, x[rows], offs=offsets)
        dx = torch._grouped_mm(d_gates, gate_up, offs=offsets)[place].unflatten(0, (-1, ctx.k)).sum(1)
        return dx, d_gate_up, d_down, None, None, None, None, None, None


TILES = [[128, 128, 64, 8, 3], [128, 128, 64, 8, 4], [128, 64, 64, 8, 4], [64, 128, 64, 4, 3], [64, 128, 64, 8, 4]]   # rows, columns, of the sum, warps, stages


def tiles(tokens, c):
    """The fastest of both kernels, even loads."""
    if S.device != "cuda":
        return [16, 16, 16, 4, 2], [16, 16, 16, 4, 2]
    make, n = lambda *shape: torch.randn(shape, device=S.device).mul_(0.1).to(S.low), tokens * c.top_k
    rows = torch.randint(0, tokens, (n,), device=S.device)
    offsets = (torch.arange(1, c.experts + 1, device=S.device) * n // c.experts).to(torch.int32)
    x, w, down = make(tokens, c.dim), make(c.experts, 2 * c.hidden, c.dim), make(c.experts, c.dim, c.hidden)
    names = {" ".join(("own", *map(str, t))): t for t in TILES}
    up = fastest("experts' gate and up", {name: functools.partial(experts_up, x, rows, w, offsets, True, t) for name, t in names.items()})
    gates = experts_up(x, rows, w, offsets, True, names[up])[1]
    back = fastest("experts' gradient", {name: functools.partial(experts_back, x[rows], down, offsets, gates, t) for name, t in names.items()})
    return names[up], names[back]
