"""hydra: a language model with compressed convolutional attention and routed MLPs."""
import math
import torch
import torch.nn.functional as F
from common import S, LinearCrossEntropy, add_rows, compiled, option, rms_norm, rope, rope_table, training
import hydra


def pick(x, index):
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def pick_or_zero(x, slot):
    return torch.where((slot >= 0).unsqueeze(-1), pick(x, slot.clamp_min(0)), 0.0)


class Take(torch.autograd.Function):
    """Rows `active` of x. slot is the inverse map (-1: not there), so the gradient is a gather too, and fuses."""
    @staticmethod
    def forward(ctx, x, active, slot):
        ctx.save_for_backward(slot)
        return pick(x, active)

    @staticmethod
    def backward(ctx, g):
        return pick_or_zero(g, *ctx.saved_tensors), None, None


class Put(torch.autograd.Function):
    """The opposite: row i of y to place active[i], zero elsewhere."""
    @staticmethod
    def forward(ctx, y, active, slot):
        ctx.save_for_backward(active)
        return pick_or_zero(y, slot)

    @staticmethod
    def backward(ctx, g):
        return pick(g, *ctx.saved_tensors), None, None


def later(x, n):
    return F.pad(x, (0, 0, n, 0))[:, :x.shape[1]] if n else x


def causal_conv(x, weight, groups):
    """As one product with all taps (groups: block-diagonal), whose shifted sum fuses with what follows."""
    if option("CONV", "matmul") == "cudnn":
        return hydra.causal_conv(x, weight.to(x.dtype), groups)
    o, i, width = weight.shape
    w = weight.to(x.dtype).view(groups, o // groups, i, width).permute(0, 2, 3, 1)
    w = w.unsqueeze(3) * torch.eye(groups, device=x.device, dtype=x.dtype).view(groups, 1, 1, groups, 1)
    taps = (x @ w.reshape(groups * i, width * o)).unflatten(-1, (width, o))
    return sum(later(taps[:, :, j], width - 1 - j) for j in range(width))


def hydra_attention(a, x, c, cos, sin):
    b, t, _ = x.shape
    rep = c.heads // c.kv_heads
    w = torch.cat((a.wq.weight, a.wk.weight, a.wv.weight, a.wv_prev.weight)).to(S.low)
    q0, k0, v, prev = (x @ w.t()).split((c.latent, c.kv_dim, c.kv_dim // 2, c.kv_dim - c.kv_dim // 2), -1)
    v = torch.cat((v, later(prev, 1)), -1)
    q = causal_conv(causal_conv(q0, a.q_conv1, c.heads), a.q_conv2, 1)
    k = causal_conv(causal_conv(k0, a.k_conv1, c.kv_heads), a.k_conv2, 1)
    heads = lambda y, n: y.unflatten(-1, (n, c.head_dim)).transpose(1, 2)
    q, k, v, q0, k0 = heads(q, c.heads), heads(k, c.kv_heads), heads(v, c.kv_heads), heads(q0, c.heads), heads(k0, c.kv_heads)
    q = q.float() + 0.5 * k0.float().repeat_interleave(rep, 1)
    k = k.float() + 0.5 * q0.float().unflatten(1, (c.kv_heads, rep)).mean(2)
    unit = lambda y: y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + c.norm_eps)
    q, k = rope(unit(q), cos, sin).to(S.low), rope(unit(k) * math.sqrt(c.head_dim) * a.temperature, cos, sin).to(S.low)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    return y.transpose(1, 2).reshape(b, t, c.latent) @ a.wo.weight.to(S.low).t()


def hydra_block(m, x, c, cos, sin):
    b, t, _ = x.shape
    h = x + hydra_attention(m.attn, rms_norm(x, m.attn_norm, c.norm_eps), c, cos, sin)
    wide, down = torch.cat((m.gate.weight, m.up.weight)).to(S.low), m.down.weight.to(S.low)

    def mlp(h, i):
        u = rms_norm(h.float() + m.depth_embedding[i], m.mlp_norm, c.norm_eps).to(S.low)
        gate, up = (u @ wide.t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ down.t()
        return y * (2.0 * torch.sigmoid((h.float() * m.router[i]).sum(-1, keepdim=True))).to(S.low)

    router_loss, active = 0.0, None
    for i, share in enumerate(m.capacity):
        k, seen = max(1, int(share * t)), h.detach().float()
        guess = (seen * m.causal_router[i]).sum(-1)
        if k == t:
            chosen, h = torch.ones_like(guess), h + mlp(h, i)
        else:   # rows in any order: only the set matters
            z = (seen * m.router[i].detach()).sum(-1)
            active = z.topk(k, sorted=False).indices if active is None else active.gather(1, z.gather(1, active).topk(k, sorted=False).indices)
            slot = torch.full((b, t), -1, device=x.device).scatter(1, active, torch.arange(k, device=x.device).expand(b, k))
            chosen, h = (slot >= 0).float(), h + Put.apply(mlp(Take.apply(h, active, slot), i), active, slot)
        router_loss = router_loss + F.binary_cross_entropy_with_logits(guess, chosen)
    return h, router_loss


def hydra_step(m, ids, targets):
    """The table's two gradients meet in one buffer: the head's product, to which the lookup's rows are added."""
    c, table, flat = m.c, m.embedding, ids.flatten()
    cos, sin = rope_table(ids.shape[1], c.head_dim, c.rope_theta)

    # One block at a time, and one compilation for all of them: as a whole it compiles twice as long and runs no faster.
    block, last = compiled(hydra_block), compiled(rms_norm)

    def hidden(x):
        loss = 0.0
        for one in m.blocks:
            x, r = block(one, x, c, cos, sin)
            loss = loss + r
        return last(x, m.norm, c.norm_eps).flatten(0, 1), loss

    def backward():
        low = table.detach().to(S.low)
        x = F.embedding(ids, low).requires_grad_()
        h, router_loss = hidden(x)
        here = targets.flatten() >= 0
        ce = LinearCrossEntropy.apply(h, table, low, targets.flatten(), here / here.sum(), None)
        loss = ce + c.router_weight * router_loss
        loss.backward()
        compiled(add_rows)(table.grad, flat, x.grad.flatten(0, 1))
        return loss.detach()
    return backward


def bench_hydra(batch=64):
    c = hydra.Config()
    m = hydra.Hydra(c).to(S.device); m.init(None)
    ids = torch.randint(0, 50257, (batch, c.seq), device=S.device)
    return training(m, hydra_step(m, ids, ids.roll(-1, 1).contiguous())), batch * c.seq, "tokens"
