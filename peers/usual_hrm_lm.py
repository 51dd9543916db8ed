"""hrm_lm as a careful user of PyTorch has it: what is changed of the reference before it is compiled. bench.py times it, `tuned --check hrm_lm` compares it with the reference."""
import math
import torch
import torch.nn.functional as F
import hrm, hrm_lm, ssd

attend = hrm_lm.attend


def unmasked(q, k, v, heads, mask=None, causal=False):
    """For rows without padding: no mask, so that flash attention applies."""
    return attend(q, k, v, heads, None, causal)


def places_experts(self, x, real):
    """Experts without a loop and without the host: the best `places` tokens of each, in batched products. A place that is left empty has a weight of 0."""
    c = self.c
    flat, real = x.reshape(-1, c.dim), real.reshape(-1, 1)
    p = torch.softmax((flat @ self.router.t()).float(), -1)
    top, index = p.topk(c.top_k, -1)
    places = min(len(flat), math.ceil(c.capacity * len(flat) * c.top_k / c.experts))
    chosen = torch.zeros_like(p).scatter(1, index, top) * real
    weight, row = chosen.t().topk(places, dim=1, sorted=False)
    y = torch.bmm(F.gelu(torch.bmm(flat[row], self.up.transpose(1, 2))), self.down.transpose(1, 2))
    out = torch.zeros_like(flat).index_add(0, row.flatten(), (y * weight.unsqueeze(-1)).flatten(0, 1).to(flat.dtype))
    load = (torch.zeros_like(p).scatter(1, index, 1.0) * real).sum(0)
    return out.view_as(x), c.experts * ((p * real).sum(0) * load).sum() / real.sum() ** 2


def chunked_scan(self, u, size=128):
    """Mamba-2 with the scan in chunks, which autocast leaves in the types that it has."""
    c, (b, t, _) = self.c, u.shape
    z, xbc, dt = (u @ self.inward.t()).split((self.inner, self.inner + 2 * c.state, self.heads), -1)
    xbc = F.conv1d(xbc.transpose(1, 2), self.conv.unsqueeze(1), self.conv_bias, padding=c.conv - 1, groups=len(self.conv))[..., :t]
    x, B, C = F.silu(xbc.transpose(1, 2)).split((self.inner, c.state, c.state), -1)
    dt = F.softplus(dt.float() + self.dt_bias)
    with torch.autocast(u.device.type, enabled=False):
        y = ssd.chunked(x.unflatten(-1, (self.heads, -1)), dt, -dt * self.log_decay.exp(), B.unsqueeze(2), C.unsqueeze(2), self.skip, size)
    return (hrm.rms_norm(y.flatten(2) * F.silu(z), c.norm_eps) * self.norm) @ self.outward.t()


CHANGES = [(hrm_lm.Experts, "forward", places_experts), (hrm.Mamba2, "scan", chunked_scan)]
NO_PADDING = [(hrm_lm, "attend", unmasked)]
