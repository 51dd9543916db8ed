"""diversity as one Triton kernel: each program reads one set once."""
import torch
import triton
import triton.language as tl


@triton.jit
def diversity_kernel(e, out, n, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(|sum u|^2 - sum |u|^2) / (n (n - 1)) is the mean cosine of all pairs of unit vectors u."""
    one = tl.program_id(0)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x = tl.load(e + one * n * width + row * width + column, mask=(row < n) & (column < width), other=0.0).to(tl.float32)
    square = tl.sum(x * x, 1)
    scale = 1 / tl.maximum(tl.sqrt(square), 1e-12)
    total = tl.sum(x * scale[:, None], 0)
    tl.store(out + one, 1 - (tl.sum(total * total, 0) - tl.sum(square * scale * scale, 0)) / (n * (n - 1)))


def diversity(e, warps=4):
    """e: [sets, replies, width], contiguous -> [sets], f32"""
    sets, n, width = e.shape
    out = torch.empty(sets, device=e.device)
    diversity_kernel[(sets,)](e, out, n, width, triton.next_power_of_2(n), triton.next_power_of_2(width), num_warps=warps)
    return out
