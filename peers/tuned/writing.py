"""Writing replies: the prompts once, then a token of every row at a time."""
import functools, math
import torch
import torch.nn.functional as F
from adapters import PolicyTraining, decoder, feed_forward, hidden, polychromic_data, project
from choose import fastest, own_kernels
from common import S, compiled, rms_norm, rope_table


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


def logits_of(x, delta, norm, head, eps):
    return rms_norm(x + delta, norm, eps) @ head.t()


def draw(logits, c):
    """Top-p by exponential races (the smallest of Exp(1) / p wins: as multinomial draws)."""
    p = torch.softmax(logits.float() / c.temperature, -1)
    return torch.where(nucleus(p, c.top_p), p / -torch.rand_like(p).log(), -1.0).argmax(-1)


def keep(drawn, token, alive, ids, reply, at, eos):
    """Writes column `at`; all on the device."""
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

        self.seed, self.layers_way, self.draw_way = torch.zeros((), dtype=torch.int64, device=S.device), self.torch_layers, self.torch_draw
        if own_kernels():
            self.choose()

    def choose(self):
        """The faster ways, at a place in the middle of the replies."""
        import decode_kernels
        c, b = self.base.c, self.base
        self.at.fill_(self.places - c.new_tokens // 2 - 1)
        def own_draw(logits):
            self.seed.add_(1)
            return decode_kernels.draw(logits, self.seed, c.temperature, c.top_p)
        x, logits = F.embedding(self.token, b.table), torch.randn(len(self.token), len(b.head), device=S.device).to(S.low)
        ways = {"torch": self.torch_layers}
        if len(self.ids) <= 16:
            ways["own"] = decode_kernels.Layers(c, self.layers, self.cache, self.cos, self.sin, self.at, b.head, b.norm)
        self.layers_way = ways[fastest("layers of a token", {name: functools.partial(way, x) for name, way in ways.items()})]
        ways = {"torch": self.torch_draw, "own": own_draw}
        # what is drawn differs: only that it works is compared
        self.draw_way = ways[fastest("a draw", {name: lambda way=way: (way(logits), self.prompts)[1] for name, way in ways.items()})]

    @torch.no_grad()
    def torch_layers(self, x):
        """One token of every row. x: [rows, dim] -> the logits"""
        delta, b = None, self.base
        for weights, (keys, values) in zip(self.layers, self.cache):
            x, delta = compiled(decode_layer)(x, delta, weights, self.cos, self.sin, keys, values, self.at, b.c)
        return self.torch_logits(x, delta)

    def torch_logits(self, x, delta):
        b = self.base
        return compiled(logits_of)(x, delta, b.norm, b.head, b.c.norm_eps)

    def torch_draw(self, logits):
        return compiled(draw)(logits, self.base.c)

    def emit(self, logits):
        compiled(keep)(self.draw_way(logits), self.token, self.alive, self.ids, self.reply, self.at, self.eos)

    @torch.no_grad()
    def prefill(self):
        t, c = self.prompts.shape[1], self.base.c
        x, delta = hidden(self.base, self.prompts, self.cos[:t], self.sin[:t], False, self.cache, self.layers, False)
        self.alive.fill_(True)
        self.at.fill_(t)
        self.emit(self.torch_logits(x[:, -1].repeat_interleave(c.replies, 0), delta[:, -1].repeat_interleave(c.replies, 0)))

    @torch.no_grad()
    def decode(self):
        x = F.embedding(self.token.clamp_min(0), self.base.table)
        logits = self.layers_way(x)
        self.at.add_(1)
        self.emit(logits)

    def pieces(self):
        return [(self.prefill, 1), (self.decode, self.base.c.new_tokens - 1)]


def bench_generate(prompt=64):
    c, base = decoder()
    writer = Writer(base, torch.randint(2, c.vocab, (c.prompts, prompt), device=S.device))
    return writer.pieces(), c.prompts * c.replies * c.new_tokens, "tokens"


def bench_polychromic_step(prompt=64):
    """Writes 12 replies with the adapted model (its adapters merged into scratch weights), embeds them, and learns from both losses: three graphs, the second
    replayed 99 times."""
    c, base = decoder()
    own = base.merged()
    writer = Writer(base, torch.randint(2, c.vocab, (c.prompts, prompt), device=S.device), own)
    training = PolicyTraining(base, writer, *polychromic_data(c))

    def begin():
        base.merge(own)
        writer.prefill()
    return [(begin, 1), (writer.decode, c.new_tokens - 1), (training.step, 1)], 1, "steps"
