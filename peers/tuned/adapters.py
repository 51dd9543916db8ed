"""polychromic: LoRA on a frozen decoder, and both losses in one step. The replies are written by writing.py."""
import functools
import torch
import torch.nn.functional as F
from choose import fastest, own_kernels
from common import S, compiled, option, rms_norm, rope, rope_table
from loss_head import Head
from optimizers import HYPER, Optimizer, Parameters
import polychromic

GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))   # products that share an input
WIDE = (0, 2)                                                  # those whose adapters lie beside the weights


def adapters_of(m, get=lambda p: p.detach()):
    """What is trained, by name: B of a group block-diagonal, those of WIDE first; A one behind another. `get` may ask for the gradients instead."""
    out = {}
    for g in (*WIDE, *(g for g in range(len(GROUPS)) if g not in WIDE)):
        for i, l in enumerate(m.layers):
            out[f"{i}.{g}.b"] = torch.block_diag(*[get(getattr(l, n).lora_b) for n in GROUPS[g]])
    for i, l in enumerate(m.layers):
        for g, group in enumerate(GROUPS):
            out[f"{i}.{g}.a"] = torch.cat([get(getattr(l, n).lora_a) for n in group])
    return out


class Base:
    """The frozen weights in S.low, q, k, v one behind another, and gate, up, each of these beside its adapters: [W, scale * B] is one matrix.
    The adapters' f32 masters lie in one buffer, their rounded copies in another: AdamW is one kernel, and one more puts each B into its place."""
    def __init__(self, m, **hyper):
        low = lambda *ps: torch.cat([p.detach() for p in ps]).to(S.low)
        self.c, self.scale = m.c, m.c.alpha / m.c.rank
        self.table, self.norm = low(m.embedding), m.norm.detach()
        self.head = self.table if m.c.tied else low(m.head)
        self.p = Parameters(adapters_of(m), small=1 << 62, full=lambda name: False)
        self.optimizer = Optimizer(self.p, flat_decay=HYPER["weight_decay"], **hyper)
        self.masks = {g: self.scale * torch.block_diag(*[torch.ones_like(getattr(m.layers[0], n).lora_b) for n in GROUPS[g]]).to(S.low) for g in WIDE}
        self.layers, self.lora, places, start = [], [], {}, 0
        sizes = {g: (len(mask), getattr(m.layers[0], GROUPS[g][0]).weight.shape[1], mask.shape[1]) for g, mask in self.masks.items()}
        self.store = torch.empty(len(m.layers) * sum(rows * (columns + ranks) for rows, columns, ranks in sizes.values()), device=S.device, dtype=S.low)
        for i, l in enumerate(m.layers):
            norms, weights, lora = [l.attn_norm.detach(), l.mlp_norm.detach()] + ([l.q_norm.detach(), l.k_norm.detach()] if m.c.qk_norm else [None, None]), [], []
            for g, group in enumerate(GROUPS):
                w, both = low(*[getattr(l, n).weight for n in group]), None
                if g in WIDE:
                    rows, columns, ranks = sizes[g]
                    both = self.store[start:start + rows * (columns + ranks)].view(rows, -1)
                    both[:, :columns] = w
                    w = both[:, :columns]
                    places[g, i] = torch.arange(start, start + both.numel(), device=S.device).view_as(both)[:, columns:].flatten()
                    start += both.numel()
                weights.append(w)
                lora.append((self.p.leaf[f"{i}.{g}.a"], self.p.leaf[f"{i}.{g}.b"], both, self.masks.get(g, self.scale)))
            self.layers.append((*norms, *weights))
            self.lora.append(lora)
        self.places = torch.cat([places[key] for key in sorted(places)])   # in the order of the buffer
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        self.store.index_copy_(0, self.places, self.p.copy["low"][:len(self.places)] * self.scale)

    def update(self):
        self.optimizer.step()
        self.refresh()

    def merged(self):
        """Room for `merge`."""
        return [w[:4] + tuple(torch.empty(y.shape, device=S.device, dtype=S.low) for y in w[4:]) for w in self.layers]

    @torch.no_grad()
    def merge(self, out):
        """W + scale * B A of every layer: what writes replies has no product more."""
        for weights, lora, place in zip(self.layers, self.lora, out):
            for w, (a, b, both, _), to in zip(weights[4:], lora, place[4:]):
                torch.addmm(w, b * self.scale if both is None else both[:, w.shape[1]:], a, out=to)


class Extended(torch.autograd.Function):
    """x W^T + scale (x A^T) B^T as one product of [x, x A^T] and [W, scale B]: what adapters add is never written apart, and one product gives both gradients back.
    B is block-diagonal: `mask` is the scale inside of the blocks and zero outside."""
    @staticmethod
    def forward(ctx, x, both, a, b, mask):
        xa = x @ a.t()
        ctx.save_for_backward(x, xa, both, a, mask)
        return torch.cat((x, xa), 1) @ both.t()

    @staticmethod
    def backward(ctx, g):
        x, xa, both, a, mask = ctx.saved_tensors
        d = g @ both
        dx, dxa = d[:, :x.shape[1]], d[:, x.shape[1]:]
        return dx + dxa @ a, None, dxa.t() @ x, (g.t() @ xa) * mask, None


def adapted(x, w, lora):
    if lora is None:
        return x @ w.t()
    a, b, both, mask = lora
    if both is not None and option("EXTEND", "1") == "1":
        return Extended.apply(x, both, a, b, mask)
    return x @ w.t() + (x @ a.t()) @ (b * mask).t()


def project(u, norms, qkv, lora, cos, sin, c):
    """q, k, v as [rows, heads, head_dim], normalised and turned."""
    q, k, v = (y.unflatten(-1, (-1, c.head_dim)) for y in adapted(u, qkv, lora).split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)], -1))
    if norms[0] is not None:
        q, k = rms_norm(q.float(), norms[0], c.norm_eps), rms_norm(k.float(), norms[1], c.norm_eps)
    return rope(q, cos, sin).to(S.low), rope(k, cos, sin).to(S.low), v


def feed_forward(x, norm, wide, down, lora, c):
    gate, up = adapted(rms_norm(x, norm, c.norm_eps), wide, lora and lora[0]).chunk(2, -1)
    return adapted(F.silu(gate) * up, down, lora and lora[1])


def layer(x, delta, weights, lora, cos, sin, c, cache):
    """x: [batch, time, dim]. The sum x + delta is left to the next layer, where it fuses with its norm. cache: keys and values to fill, or None."""
    attn_norm, mlp_norm, q_norm, k_norm, qkv, o, wide, down = weights
    x = x if delta is None else x + delta
    b, t, d = x.shape
    u = rms_norm(x, attn_norm, c.norm_eps).flatten(0, 1)
    table = lambda y: y.repeat(b, 1).unsqueeze(1)
    q, k, v = (y.view(b, t, -1, c.head_dim).transpose(1, 2) for y in project(u, (q_norm, k_norm), qkv, lora and lora[0], table(cos), table(sin), c))
    if cache is not None:
        for place, y in zip(cache, (k, v)):
            place[:, :, :t].copy_(y.repeat_interleave(len(place) // b, 0))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + adapted(a.transpose(1, 2).reshape(b * t, -1), o, lora and lora[1]).view(b, t, d)
    return x, feed_forward(x.flatten(0, 1), mlp_norm, wide, down, lora and lora[2:], c).view(b, t, d)


def last_norm(x, delta, weight, eps):
    return rms_norm(x + delta, weight, eps)


def hidden(base, ids, cos, sin, lora=True, cache=None, layers=None, norm=True):
    """Plain causal attention: rows have no padding."""
    x, delta = F.embedding(ids, base.table), None
    for i, weights in enumerate(layers or base.layers):
        x, delta = compiled(layer)(x, delta, weights, base.lora[i] if lora else None, cos, sin, base.c, None if cache is None else cache[i])
    return compiled(last_norm)(x, delta, base.norm, base.c.norm_eps) if norm else (x, delta)


class HeadLoss:
    """The weighted cross-entropy of rows of h, and its gradient by h; the head is frozen."""
    def __init__(self, base, rows):
        self.base, self.rows, self.head = base, rows, Head("chunk", len(rows), base.c.vocab, frozen=True)

    @torch.no_grad()
    def __call__(self, h, targets, weight):
        loss, part, _ = self.head(h.index_select(0, self.rows), self.base.head, targets, weight)
        return loss, torch.zeros_like(h).index_copy_(0, self.rows, part)


class PolychromicTraining:
    """The supervised loss. Rows with a target alone enter the head: the loader knows them."""
    def __init__(self, base, ids, targets):
        self.base, self.p, self.optimizer, self.ids = base, base.p, base.optimizer, ids
        rows = (targets.flatten() >= 0).nonzero().flatten()
        self.targets, self.weight, self.head = targets.flatten()[rows], torch.full((len(rows),), 1 / len(rows), device=S.device), HeadLoss(base, rows)
        self.cos, self.sin = rope_table(ids.shape[1], base.c.head_dim, base.c.rope_theta)

    def forward(self):
        """The last hidden states, the loss, and its gradient by them."""
        h = hidden(self.base, self.ids, self.cos, self.sin).flatten(0, 1)
        return h, *self.head(h.detach(), self.targets, self.weight)

    def backward(self):
        h, loss, dh = self.forward()
        h.backward(dh)
        return loss

    def step(self):
        self.backward()
        self.base.update()


def polychromic_data(c, batch=16):
    ids = torch.randint(2, c.vocab, (batch, c.seq), device=S.device)
    targets = ids.roll(-1, 1)
    targets[:, :128] = -1
    return ids, targets


def decoder():
    c = polychromic.Config()
    m = polychromic.Decoder(c).to(S.device); m.init(None)
    return c, Base(m)


def bench_polychromic():
    c, base = decoder()
    ids, targets = polychromic_data(c)
    return [(PolychromicTraining(base, ids, targets).step, 1)], ids.numel(), "tokens"


def diversity(e):
    """Mean distance of a set's pairs in closed form: (|sum u|^2 - sum |u|^2) / (n (n - 1)) is their mean cosine. Reply by reply, so that one kernel reads e once."""
    n = e.shape[1]
    u = [e[:, i].float() for i in range(n)]
    u = [x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in u]
    return 1 - (sum(u).pow(2).sum(-1) - sum(x.pow(2).sum(-1) for x in u)) / (n * (n - 1))


def advantage(h, reply, baseline, started, p, c):
    """The weight of every token that was written, and the baseline of the next step."""
    count = reply.sum(1).clamp_min(1)
    e = (h.float() * reply.unsqueeze(-1)).sum(1) / count.unsqueeze(-1)
    score = diversity(e.view(-1, c.replies, h.shape[-1]))
    now = torch.where(started, baseline, score.mean())
    weight = ((score - now).repeat_interleave(c.replies) / count).unsqueeze(1) * reply[:, p:] * (c.weight / len(reply))
    return weight.flatten(), c.baseline_decay * now + (1 - c.baseline_decay) * score.mean()


class PolicyTraining(PolychromicTraining):
    """The replies' embeddings (the frozen base's mean hidden state), their diversity, the baseline, the policy gradient and the supervised loss: one backward."""
    def __init__(self, base, writer, ids, targets):
        super().__init__(base, ids, targets)
        n, t, p = len(writer.ids), writer.places, writer.prompts.shape[1]
        self.writer, self.policy = writer, HeadLoss(base, (torch.arange(n, device=S.device)[:, None] * t + torch.arange(p - 1, t - 1, device=S.device)).flatten())
        self.baseline, self.started = torch.zeros((), device=S.device), torch.zeros((), dtype=torch.bool, device=S.device)

    def backward(self):
        w, p = self.writer, self.writer.prompts.shape[1]
        seen = w.ids.clamp_min(0)
        with torch.no_grad():
            h = hidden(self.base, seen, w.cos, w.sin, lora=False)
            weight, new = compiled(advantage)(h, w.reply, self.baseline, self.started, p, self.base.c)
            self.baseline.copy_(new)
            self.started.fill_(True)
        # log p of what was written, by the weights that are trained, weighted: cross-entropy of those rows
        written = hidden(self.base, seen, w.cos, w.sin).flatten(0, 1)
        policy, d_written = self.policy(written.detach(), seen[:, p:].flatten(), weight)
        h, loss, dh = self.forward()
        torch.autograd.backward([written, h], [d_written, dh])
        return loss + policy


def bench_diversity(sets=4096, replies=10, width=384, calls=16):
    """Sixteen calls in one graph, the time is one call's. The input stays in the L2 cache, as it does in `kiln bench ops`."""
    e = torch.randn(sets, replies, width, device=S.device).to(S.low)
    ways = {"torch": lambda: compiled(diversity)(e)}
    if own_kernels():
        import diversity_kernel
        ways.update((f"own {warps}", functools.partial(diversity_kernel.diversity, e, warps)) for warps in (1, 2, 4, 8))
    way = ways[fastest("diversity", ways, calls=calls)]
    def step():
        for _ in range(calls):
            way()
    return [(step, 1)], sets, "sets", calls
