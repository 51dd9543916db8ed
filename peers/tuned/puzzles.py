"""hrm: two recurrent modules with mixtures of experts."""
import functools, math
import torch
import torch.nn.functional as F
from choose import fastest, own_kernels
from common import S, compiled, rms_norm, rope, rope_table, training
import hrm


class Spread(torch.autograd.Function):
    """A row for every (token, expert) pair, sorted by expert; the gradient is a gather and a sum of k, no atomics."""
    @staticmethod
    def forward(ctx, x, order, place, k):
        ctx.save_for_backward(place)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Unsort(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, order, place):
        ctx.save_for_backward(order)
        return y[place]

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]], None, None


def grouped(flat, gate_up, down, order, place, offsets, k):
    """y of every (token, expert) pair, sorted by expert"""
    gate, up = torch._grouped_mm(Spread.apply(flat, order, place, k), gate_up.mT, offs=offsets).chunk(2, -1)
    return torch._grouped_mm((F.silu(gate) * up).contiguous(), down.mT, offs=offsets)


def hrm_experts(x, router, gate_up, down, c, products):
    flat = x.flatten(0, 1)
    p = torch.softmax((flat @ router.t()).float(), -1)
    top, index = p.topk(c.top_k, -1)
    top = top / top.sum(-1, keepdim=True)
    key = index.flatten()
    order = key.to(torch.uint8).argsort(stable=True)                                 # 8 bits to sort by, not 64
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
    counts = (key.unsqueeze(1) == torch.arange(c.experts, device=x.device)).sum(0)
    offsets = counts.cumsum(0).to(torch.int32)
    y = products(flat, gate_up, down, order, place, offsets, c.top_k)
    y = (Unsort.apply(y, order, place).unflatten(0, (-1, c.top_k)).float() * top.unsqueeze(-1)).sum(1)
    return y.to(x.dtype).view_as(x), c.experts * (counts / key.numel() * p.mean(0)).sum()


def hrm_step(m, carry, ids, targets):
    """All weights cast once for the six passes of a segment; lookup and head as products of 16 columns; the carry goes on in place."""
    c = m.c
    cos, sin = rope_table(c.seq, c.dim // c.heads, c.rope_theta)
    high0, low0 = carry["high"].to(S.low), carry["low"].to(S.low)

    def module(layers, state, injection, products):
        x, balance = state + injection, 0.0
        for qkv, out, router, gate_up, down in layers:
            b, t, d = x.shape
            q, k, v = (x @ qkv.t()).view(b, t, 3, c.heads, d // c.heads).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(rope(q, cos, sin).to(S.low), rope(k, cos, sin).to(S.low), v)
            x = rms_norm(x + a.transpose(1, 2).reshape(b, t, d) @ out.t(), None, c.norm_eps)
            y, one = hrm_experts(x, router, gate_up, down, c, products)
            x, balance = rms_norm(x + y, None, c.norm_eps), balance + one
        return x, balance

    def loss_of(products, high, low, ids, targets):
        cast = lambda layers: [tuple(w.to(S.low) for w in (l.qkv, l.out, l.experts.router, l.experts.gate_up, l.experts.down)) for l in layers]
        low_w, high_w = cast(m.low.layers), cast(m.high.layers)
        columns = -(-c.vocab // 8) * 8
        rows = lambda w: F.pad(w, (0, 0, 0, columns - c.vocab)).to(S.low)
        x = (ids.unsqueeze(-1) == torch.arange(columns, device=ids.device)).to(S.low) @ rows(m.embedding * math.sqrt(c.dim))
        with torch.no_grad():
            for i in range(1, c.high_cycles * c.low_cycles):
                low, _ = module(low_w, low, high + x, products)
                if i % c.low_cycles == 0:
                    high, _ = module(high_w, high, low, products)
        low, balance_low = module(low_w, low, high + x, products)
        high, balance_high = module(high_w, high, low, products)
        logits = (high @ rows(m.head).t())[..., :c.vocab].float()
        halt = (high[:, 0].float() * m.halt).sum(-1) + m.halt_bias
        mask = targets >= 0
        ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(targets.shape)
        right = ((logits.argmax(-1) == targets) | ~mask).all(1)
        loss = (ce.sum(1) / mask.sum(1).clamp_min(1)).mean() + c.halt_weight * F.binary_cross_entropy_with_logits(halt, right.float())
        return loss + c.balance_weight * (balance_low + balance_high), high.detach(), low.detach()
    loss_of, ways = compiled(loss_of), {"torch": grouped}
    if own_kernels():
        import experts_kernel
        tiles = experts_kernel.tiles(ids.numel(), c)
        ways["own"] = lambda flat, gate_up, down, order, place, offsets, k: experts_kernel.Experts.apply(flat, gate_up, down, order // k, place, offsets, k, torch.is_grad_enabled(), tiles)

    def once(way):
        m.zero_grad()
        loss = loss_of(way, high0, low0, ids, targets)[0]
        loss.backward()
        return loss.detach()
    way = ways[fastest("hrm", {name: functools.partial(once, way) for name, way in ways.items()}, calls=1)]
    m.zero_grad()

    def backward():
        loss, high, low = loss_of(way, high0, low0, ids, targets)
        loss.backward()
        high0.copy_(high)
        low0.copy_(low)
        return loss.detach()
    return backward


def bench_hrm(batch=384):
    c = hrm.Config()
    m = hrm.Hrm(c).to(S.device); m.init(None)
    ids, targets = torch.randint(1, 11, (batch, c.seq), device=S.device), torch.randint(2, 11, (batch, c.seq), device=S.device)
    return training(m, hrm_step(m, m.start(batch, S.device), ids, targets)), batch, "examples"
