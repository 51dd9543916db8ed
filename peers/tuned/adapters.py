"""polychromic: LoRA on a frozen decoder, replies written by it, and both losses in one step."""
import math, types
import torch
import torch.nn.functional as F
from common import S, LinearCrossEntropy, compiled, option, rms_norm, rope, rope_table, trainable, trainer, training
import polychromic


def merged_base(m):
    """The frozen weights in S.low: q, k, v one behind another, and gate, up."""
    low = lambda *ps: torch.cat([p.detach() for p in ps]).to(S.low)
    base = types.SimpleNamespace(c=m.c, table=low(m.embedding), head=low(m.embedding if m.c.tied else m.head), norm=m.norm.detach(), layers=[], lora=[])
    for l in m.layers:
        norms = [l.attn_norm.detach(), l.mlp_norm.detach()] + ([l.q_norm.detach(), l.k_norm.detach()] if m.c.qk_norm else [None, None])
        base.layers.append((*norms, low(l.q.weight, l.k.weight, l.v.weight), low(l.o.weight), low(l.gate.weight, l.up.weight), low(l.down.weight)))
        base.lora.append(tuple(tuple((n.lora_a, n.lora_b) for n in group) for group in ((l.q, l.k, l.v), (l.o,), (l.gate, l.up), (l.down,))))
    return base


def factors(group, scale):
    """A of a group one behind another, B block-diagonal and scaled, in S.low."""
    return torch.cat([a for a, _ in group]).to(S.low), torch.block_diag(*[b * scale for _, b in group]).to(S.low)


class Extended(torch.autograd.Function):
    """x W^T + (x A^T) B^T as one product of [x, x A^T] and [W, B]: what adapters add is never written apart, and one product gives both gradients back."""
    @staticmethod
    def forward(ctx, x, w, a, b):
        xa = x @ a.t()
        ctx.save_for_backward(x, xa, w, a, b)
        return torch.cat((x, xa), 1) @ torch.cat((w, b), 1).t()

    @staticmethod
    def backward(ctx, g):
        x, xa, w, a, b = ctx.saved_tensors
        d = g @ torch.cat((w, b), 1)
        dx, dxa = d[:, :x.shape[1]], d[:, x.shape[1]:]
        return dx + dxa @ a, None, dxa.t() @ x, g.t() @ xa


def adapted(x, w, lora, wide):
    if lora is None:
        return x @ w.t()
    a, b = lora
    if wide and option("EXTEND", "1") == "1":
        return Extended.apply(x, w, a, b)
    return x @ w.t() + (x @ a.t()) @ b.t()


def project(u, norms, qkv, lora, cos, sin, c):
    """q, k, v as [rows, heads, head_dim], normalised and turned."""
    q, k, v = (y.unflatten(-1, (-1, c.head_dim)) for y in adapted(u, qkv, lora, True).split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)], -1))
    if norms[0] is not None:
        q, k = rms_norm(q.float(), norms[0], c.norm_eps), rms_norm(k.float(), norms[1], c.norm_eps)
    return rope(q, cos, sin).to(S.low), rope(k, cos, sin).to(S.low), v


def feed_forward(x, norm, wide, down, lora, c):
    gate, up = adapted(rms_norm(x, norm, c.norm_eps), wide, lora and lora[0], True).chunk(2, -1)
    return adapted(F.silu(gate) * up, down, lora and lora[1], False)


def layer(x, delta, weights, lora, cos, sin, c, cache):
    """x: [batch, time, dim]. The sum x + delta is left to the next layer, where it fuses with its norm. cache: keys and values to fill, or None."""
    attn_norm, mlp_norm, q_norm, k_norm, qkv, o, wide, down = weights
    if lora is not None:
        lora = [factors(g, c.alpha / c.rank) for g in lora]
    x = x if delta is None else x + delta
    b, t, d = x.shape
    u = rms_norm(x, attn_norm, c.norm_eps).flatten(0, 1)
    table = lambda y: y.repeat(b, 1).unsqueeze(1)
    q, k, v = (y.view(b, t, -1, c.head_dim).transpose(1, 2) for y in project(u, (q_norm, k_norm), qkv, lora and lora[0], table(cos), table(sin), c))
    if cache is not None:
        for place, y in zip(cache, (k, v)):
            place[:, :, :t].copy_(y.repeat_interleave(len(place) // b, 0))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + adapted(a.transpose(1, 2).reshape(b * t, -1), o, lora and lora[1], False).view(b, t, d)
    return x, feed_forward(x.flatten(0, 1), mlp_norm, wide, down, lora and lora[2:], c).view(b, t, d)


def last_norm(x, delta, weight, eps):
    return rms_norm(x + delta, weight, eps)


def hidden(base, ids, cos, sin, lora=True, cache=None, layers=None, norm=True):
    """Plain causal attention: rows have no padding."""
    x, delta = F.embedding(ids, base.table), None
    for i, weights in enumerate(layers or base.layers):
        x, delta = compiled(layer)(x, delta, weights, base.lora[i] if lora else None, cos, sin, base.c, None if cache is None else cache[i])
    return compiled(last_norm)(x, delta, base.norm, base.c.norm_eps) if norm else (x, delta)


def supervised_loss(base, ids, targets):
    """Rows with a target alone enter the head: the loader knows them."""
    rows = (targets.flatten() >= 0).nonzero().flatten()
    wanted, weight = targets.flatten()[rows], torch.full((len(rows),), 1 / len(rows), device=S.device)
    cos, sin = rope_table(ids.shape[1], base.c.head_dim, base.c.rope_theta)
    return lambda: LinearCrossEntropy.apply(hidden(base, ids, cos, sin).flatten(0, 1), None, base.head, wanted, weight, rows)


def polychromic_step(base, ids, targets):
    loss_of = supervised_loss(base, ids, targets)
    def backward():
        loss = loss_of()
        loss.backward()
        return loss.detach()
    return backward


def polychromic_data(c, batch=16):
    ids = torch.randint(2, c.vocab, (batch, c.seq), device=S.device)
    targets = ids.roll(-1, 1)
    targets[:, :128] = -1
    return ids, targets


def decoder():
    c = polychromic.Config()
    m = polychromic.Decoder(c).to(S.device); m.init(None)
    base = merged_base(m)
    for p in m.parameters():   # adapters stay, the f32 base goes
        if not p.requires_grad:
            p.data = p.data.new_empty(0)
    return c, m, base


def bench_polychromic():
    c, m, base = decoder()
    ids, targets = polychromic_data(c)
    return training(m, polychromic_step(base, ids, targets)), ids.numel(), "tokens"


def decode_layer(x, delta, weights, cos, sin, keys, values, at, c):
    """One token of every row. x: [rows, dim]; keys, values: [rows, kv_heads, places, head_dim]; at: [1], the token's place."""
    attn_norm, mlp_norm, q_norm, k_norm, qkv, o, wide, down = weights
    x = x if delta is None else x + delta
    table = lambda y: y.index_select(0, at).unsqueeze(1)
    q, k, v = project(rms_norm(x, attn_norm, c.norm_eps), (q_norm, k_norm), qkv, None, table(cos), table(sin), c)
    keys.index_copy_(2, at, k.unsqueeze(2))
    values.index_copy_(2, at, v.unsqueeze(2))
    q = q.view(len(x), c.kv_heads, -1, 1, c.head_dim).float()
    s = (q * keys.unsqueeze(2).float()).sum(-1) / math.sqrt(c.head_dim)
    p = torch.softmax(torch.where(torch.arange(keys.shape[2], device=x.device) <= at, s, -math.inf), -1)
    a = (p.unsqueeze(-1) * values.unsqueeze(2).float()).sum(3)
    x = x + a.reshape(len(x), -1).to(S.low) @ o.t()
    return x, feed_forward(x, mlp_norm, wide, down, None, c)


def nucleus(p, top_p):
    """The bits of a threshold: the tokens whose p has more bits are those before which less than top_p lies. No sort: a search by four bits at a time
    (a positive float's order is its bits'), seven passes over p. Tokens that tie at the threshold are all kept."""
    bits, low = p.view(torch.int32), torch.zeros(len(p), 1, dtype=torch.int32, device=p.device)
    for shift in range(26, -1, -4):
        reached = [torch.where(bits > low + (j << shift), p, 0.0).sum(-1, keepdim=True) >= top_p for j in range(1, 16)]
        low = low + (sum(r.to(torch.int32) for r in reached) << shift)
    return bits > low


def next_token(x, delta, norm, head, token, alive, ids, reply, at, eos, c):
    """Top-p by exponential races (the smallest of Exp(1) / p wins: as multinomial draws). Writes column `at`; all on the device."""
    logits = rms_norm(x + delta, norm, c.norm_eps) @ head.t()
    p = torch.softmax(logits.float() / c.temperature, -1)
    drawn = torch.where(nucleus(p, c.top_p), p / -torch.rand_like(p).log(), -1.0).argmax(-1)
    drawn = torch.where(alive, drawn, eos)
    ids.index_copy_(1, at, drawn.unsqueeze(1))
    reply.index_copy_(1, at, alive.unsqueeze(1))
    token.copy_(drawn)
    alive.copy_(alive & (drawn != eos))


class Writer:
    """Static buffers, and two pieces to capture: prefill (once; each prompt once, its keys copied to all its replies) and decode (once a token)."""
    def __init__(self, base, prompts, layers=None, eos=-7):
        c, n, p = base.c, len(prompts) * base.c.replies, prompts.shape[1]
        self.base, self.prompts, self.layers, self.eos, self.places = base, prompts, layers or base.layers, eos, p + base.c.new_tokens
        self.cos, self.sin = rope_table(self.places, c.head_dim, c.rope_theta)
        self.cache = [tuple(torch.zeros(n, c.kv_heads, self.places, c.head_dim, device=S.device, dtype=S.low) for _ in "kv") for _ in base.layers]
        self.ids = F.pad(prompts.repeat_interleave(c.replies, 0), (0, c.new_tokens))
        self.token, self.at = torch.zeros(n, dtype=torch.long, device=S.device), torch.zeros(1, dtype=torch.long, device=S.device)
        self.alive, self.reply = torch.ones(n, dtype=torch.bool, device=S.device), torch.zeros_like(self.ids, dtype=torch.bool)

    def emit(self, x, delta):
        b = self.base
        compiled(next_token)(x, delta, b.norm, b.head, self.token, self.alive, self.ids, self.reply, self.at, self.eos, b.c)

    @torch.no_grad()
    def prefill(self):
        t, c = self.prompts.shape[1], self.base.c
        x, delta = hidden(self.base, self.prompts, self.cos[:t], self.sin[:t], False, self.cache, self.layers, False)
        self.alive.fill_(True)
        self.at.fill_(t)
        self.emit(x[:, -1].repeat_interleave(c.replies, 0), delta[:, -1].repeat_interleave(c.replies, 0))

    @torch.no_grad()
    def decode(self):
        x, delta = F.embedding(self.token.clamp_min(0), self.base.table), None
        for weights, (keys, values) in zip(self.layers, self.cache):
            x, delta = compiled(decode_layer)(x, delta, weights, self.cos, self.sin, keys, values, self.at, self.base.c)
        self.at.add_(1)
        self.emit(x, delta)

    def pieces(self):
        return [(self.prefill, 1), (self.decode, self.base.c.new_tokens - 1)]


def bench_generate(prompt=64):
    c, m, base = decoder()
    writer = Writer(base, torch.randint(2, c.vocab, (c.prompts, prompt), device=S.device))
    return writer.pieces(), c.prompts * c.replies * c.new_tokens, "tokens"


def merge_lora(layers, base, out):
    """Adapters inside the weights that write replies, once a step: no product more in decoding."""
    for weights, lora, place in zip(layers, base.lora, out):
        for group, w, to in zip(lora, weights[4:], place[4:]):
            a, b = factors(group, base.c.alpha / base.c.rank)
            torch.addmm(w, b, a, out=to)


def diversity(e):
    """Mean distance of a set's pairs in closed form: (|sum u|^2 - sum |u|^2) / (n (n - 1)) is their mean cosine. Reply by reply, so that one kernel reads e once."""
    n = e.shape[1]
    u = [e[:, i].float() for i in range(n)]
    u = [x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in u]
    return 1 - (sum(u).pow(2).sum(-1) - sum(x.pow(2).sum(-1) for x in u)) / (n * (n - 1))


def policy_step(base, writer, ids, targets):
    """The replies' embeddings (the frozen base's mean hidden state), their diversity, the baseline, the policy gradient and the supervised loss: one backward."""
    c, supervised = base.c, supervised_loss(base, ids, targets)
    n, t, p = len(writer.ids), writer.places, writer.prompts.shape[1]
    rows = (torch.arange(n, device=S.device)[:, None] * t + torch.arange(p - 1, t - 1, device=S.device)).flatten()
    baseline, started = torch.zeros((), device=S.device), torch.zeros((), dtype=torch.bool, device=S.device)

    def advantage(h, reply, baseline, started):
        count = reply.sum(1).clamp_min(1)
        e = (h.float() * reply.unsqueeze(-1)).sum(1) / count.unsqueeze(-1)
        score = diversity(e.view(-1, c.replies, h.shape[-1]))
        now = torch.where(started, baseline, score.mean())
        weight = ((score - now).repeat_interleave(c.replies) / count).unsqueeze(1) * reply[:, p:] * (c.weight / n)
        return weight.flatten(), c.baseline_decay * now + (1 - c.baseline_decay) * score.mean()

    def backward():
        seen = writer.ids.clamp_min(0)
        with torch.no_grad():
            h = hidden(base, seen, writer.cos, writer.sin, lora=False)
            weight, new = compiled(advantage)(h, writer.reply, baseline, started)
            baseline.copy_(new)
            started.fill_(True)
        # log p of what was written, weighted: cross-entropy of those rows
        policy = LinearCrossEntropy.apply(hidden(base, seen, writer.cos, writer.sin).flatten(0, 1), None, base.head, seen[:, p:].flatten(), weight, rows)
        loss = supervised() + policy
        loss.backward()
        return loss.detach()
    return backward


def bench_polychromic_step(prompt=64):
    """Writes 12 replies with the adapted model, embeds them, and learns from both losses: three graphs, the second replayed 99 times."""
    c, m, base = decoder()
    own = [w[:4] + tuple(y.clone() for y in w[4:]) for w in base.layers]
    writer = Writer(base, torch.randint(2, c.vocab, (c.prompts, prompt), device=S.device), own)
    backward, update = policy_step(base, writer, *polychromic_data(c)), trainer(trainable(m))

    @torch.no_grad()
    def begin():
        merge_lora(base.layers, base, own)
        writer.prefill()

    def learn():
        backward()
        update()
    return [(begin, 1), (writer.decode, c.new_tokens - 1), (learn, 1)], 1, "steps"


def bench_diversity(sets=4096, replies=10, width=384, calls=16):
    """Sixteen calls in one graph, the time is one call's. The input stays in the L2 cache, as it does in `kiln bench ops`."""
    e = torch.randn(sets, replies, width, device=S.device).to(S.low)
    def step():
        for _ in range(calls):
            compiled(diversity)(e)
    return [(step, 1)], sets, "sets", calls
