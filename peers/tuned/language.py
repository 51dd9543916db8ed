"""hydra: a language model with compressed convolutional attention and routed MLPs."""
import math
import torch
import torch.nn.functional as F
from common import S, add_rows, compiled, option, rms_norm, rope, rope_table
from loss_head import Head
from optimizers import HYPER, Optimizer, Parameters
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


def hydra_attention(w, x, c, cos, sin):
    b, t, _ = x.shape
    rep = c.heads // c.kv_heads
    q0, k0, v, prev = (x @ w["qkv"].t()).split((c.latent, c.kv_dim, c.kv_dim // 2, c.kv_dim - c.kv_dim // 2), -1)
    v = torch.cat((v, later(prev, 1)), -1)
    q = causal_conv(causal_conv(q0, w["q_conv1"], c.heads), w["q_conv2"], 1)
    k = causal_conv(causal_conv(k0, w["k_conv1"], c.kv_heads), w["k_conv2"], 1)
    heads = lambda y, n: y.unflatten(-1, (n, c.head_dim)).transpose(1, 2)
    q, k, v, q0, k0 = heads(q, c.heads), heads(k, c.kv_heads), heads(v, c.kv_heads), heads(q0, c.heads), heads(k0, c.kv_heads)
    q = q.float() + 0.5 * k0.float().repeat_interleave(rep, 1)
    k = k.float() + 0.5 * q0.float().unflatten(1, (c.kv_heads, rep)).mean(2)
    unit = lambda y: y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + c.norm_eps)
    q, k = rope(unit(q), cos, sin).to(S.low), rope(unit(k) * math.sqrt(c.head_dim) * w["temperature"], cos, sin).to(S.low)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    return y.transpose(1, 2).reshape(b, t, c.latent) @ w["o"].t()


def hydra_block(w, x, capacity, c, cos, sin):
    b, t, _ = x.shape
    h = x + hydra_attention(w, rms_norm(x, w["attn_norm"], c.norm_eps), c, cos, sin)

    def mlp(h, i):
        u = rms_norm(h.float() + w["depth_embedding"][i], w["mlp_norm"], c.norm_eps).to(S.low)
        gate, up = (u @ w["wide"].t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ w["down"].t()
        return y * (2.0 * torch.sigmoid((h.float() * w["router"][i]).sum(-1, keepdim=True))).to(S.low)

    router_loss, active = 0.0, None
    for i, share in enumerate(capacity):
        k, seen = max(1, int(share * t)), h.detach().float()
        guess = (seen * w["causal_router"][i]).sum(-1)
        if k == t:
            chosen, h = torch.ones_like(guess), h + mlp(h, i)
        else:   # rows in any order: only the set matters
            z = (seen * w["router"][i].detach()).sum(-1)
            active = z.topk(k, sorted=False).indices if active is None else active.gather(1, z.gather(1, active).topk(k, sorted=False).indices)
            slot = torch.full((b, t), -1, device=x.device).scatter(1, active, torch.arange(k, device=x.device).expand(b, k))
            chosen, h = (slot >= 0).float(), h + Put.apply(mlp(Take.apply(h, active, slot), i), active, slot)
        router_loss = router_loss + F.binary_cross_entropy_with_logits(guess, chosen)
    return h, router_loss


def merged(m, get=lambda p: p.detach()):
    """What is trained, by name: q, k, v one behind another, and gate, up. `get` may ask for the gradients instead."""
    out = {"embedding": get(m.embedding), "norm": get(m.norm)}
    for i, b in enumerate(m.blocks):
        a = b.attn
        rows = lambda *linears: torch.cat([get(l.weight) for l in linears])
        out.update({f"{i}.qkv": rows(a.wq, a.wk, a.wv, a.wv_prev), f"{i}.o": get(a.wo.weight), f"{i}.wide": rows(b.gate, b.up), f"{i}.down": get(b.down.weight)})
        out.update((f"{i}.{n}", get(getattr(a, n))) for n in ("q_conv1", "q_conv2", "k_conv1", "k_conv2", "temperature"))
        out.update((f"{i}.{n}", get(getattr(b, n))) for n in ("attn_norm", "mlp_norm", "depth_embedding", "router", "causal_router"))
    return out


class HydraTraining:
    """Routers, norms and depths stay f32, as they are used; the convolutions' small weights share a buffer. The table's two gradients meet in one
    buffer: the head's product, to which the lookup's rows are added."""
    def __init__(self, m, ids, targets, small=1 << 17):
        self.c, self.ids, self.targets = m.c, ids, targets.flatten()
        here = self.targets >= 0
        self.weight = here / here.sum()
        self.cos, self.sin = rope_table(ids.shape[1], m.c.head_dim, m.c.rope_theta)
        self.p = Parameters(merged(m), small=small, full=lambda name: name.endswith(("norm", "router", "depth_embedding", "temperature")))
        part = lambda i: {name.split(".")[1]: leaf for name, leaf in self.p.leaf.items() if name.startswith(f"{i}.")}
        self.blocks = [(part(i), tuple(b.capacity)) for i, b in enumerate(m.blocks)]
        self.optimizer = Optimizer(self.p, flat_decay=HYPER["weight_decay"])
        self.head = Head("chunk", ids.numel(), m.c.vocab)

    def backward(self):
        """The loss; gradients are left in self.p. One block at a time, and one compilation for all of them: as a whole it compiles twice as long and runs no faster."""
        c, leaf, router_loss = self.c, self.p.leaf, 0.0
        table = leaf["embedding"].detach()
        x = start = F.embedding(self.ids, table).requires_grad_()
        for weights, capacity in self.blocks:
            x, one = compiled(hydra_block)(weights, x, capacity, c, self.cos, self.sin)
            router_loss = router_loss + one
        h = compiled(rms_norm)(x, leaf["norm"], c.norm_eps).flatten(0, 1)
        ce, dh, dw = self.head(h.detach(), table, self.targets, self.weight)
        torch.autograd.backward([h, c.router_weight * router_loss], [dh, None])
        with torch.no_grad():
            compiled(add_rows)(dw, self.ids.flatten(), start.grad.flatten(0, 1))
            self.p.grads["embedding"] = dw
            return ce + c.router_weight * router_loss

    def step(self):
        self.backward()
        self.optimizer.step()


def bench_hydra(batch=64):
    c = hydra.Config()
    m = hydra.Hydra(c).to(S.device); m.init(None)
    ids = torch.randint(0, 50257, (batch, c.seq), device=S.device)
    return [(HydraTraining(m, ids, ids.roll(-1, 1).contiguous()).step, 1)], batch * c.seq, "tokens"
