"""hrm_lm: an encoder with experts or Mamba-2, two modules that think in cycles, and a decoder that reads the memory of every cycle.

Options: CROSS=torch|absorbed  UP=torch|epilogue  SCAN=torch|mamba-ssm  CHUNK=rows (of the loss head). Each of the first three is timed where it is not given.
"""
import functools, math, os, sys
import torch
import torch.nn.functional as F
from choose import fastest
from common import S, add_rows, compiled, option, rms_norm
from language import later
from loss_head import Head
from optimizers import HYPER, Optimizer, Parameters
from plain import linear
from puzzles import Spread, Unsort
import hrm_lm, ssd


# ---------------------------------------------------------------- parts
def norm(x, w, name, c):
    return F.layer_norm(x.float(), (c.dim,), w[name + ".weight"], w[name + ".bias"], c.norm_eps).to(S.low)


def dense(x, w, name):
    return linear(x, w[name + ".weight"], w.get(name + ".bias"))


def heads(x, c, n):
    """[batch, time, n dim] -> n times [batch, heads, time, size]"""
    return x.unflatten(-1, (n, c.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def joined(a):
    return a.transpose(1, 2).flatten(2)


def embed(ids, table, sines):
    return (F.embedding(ids, table).float() + sines).to(S.low)


def attend(x, w, c, **kw):
    return dense(joined(F.scaled_dot_product_attention(*heads(dense(x, w, "qkv"), c, 3), **kw)), w, "out")


def products(flat, up, down, order, place, offsets, k):
    """y of every (token, expert) pair, sorted by expert"""
    h = F.gelu(torch._grouped_mm(Spread.apply(flat, order, place, k), up.mT, offs=offsets))
    return torch._grouped_mm(h, down.mT, offs=offsets)


def experts(x, real, w, c):
    """Pairs are sorted by expert, then by probability: a pair's place among its expert's says whether it is kept. All pairs are multiplied, as so many rows are fewer than
    places; those that are not kept have a weight of 0. Padding stands behind the last expert's own."""
    flat = x.flatten(0, 1)
    p = torch.softmax((flat @ w["experts.router"].t()).float(), -1)
    top, index = p.topk(c.top_k, -1)
    key, probability, here = index.flatten(), top.detach().flatten(), None
    if real is not None:
        here = real.reshape(-1, 1).expand_as(top).flatten()
        key, probability = torch.where(here, key, c.experts - 1), torch.where(here, probability, -1.0)
    order = probability.argsort(descending=True, stable=True)
    order = order[key[order].to(torch.uint8).argsort(stable=True)]
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
    ours = key.unsqueeze(1) == torch.arange(c.experts, device=x.device)
    counts = ours.sum(0)
    ends = counts.cumsum(0)
    kept = place - (ends - counts)[key] < math.ceil(c.capacity * len(flat) * c.top_k / c.experts)
    if here is not None:
        kept, counts = kept & here, (ours & here.unsqueeze(1)).sum(0)
        p = p * real.reshape(-1, 1)
    y = products(flat, w["experts.up"], w["experts.down"], order, place, ends.to(torch.int32), c.top_k)
    weight = torch.where(kept.view_as(top), top, 0.0)
    y = (Unsort.apply(y, order, place).unflatten(0, (-1, c.top_k)).float() * weight.unsqueeze(-1)).sum(1)
    tokens = len(flat) if real is None else real.sum()
    return y.to(x.dtype).view_as(x), c.experts * (p.sum(0) * counts).sum() / tokens ** 2


def block(x, w, c, real=None):
    """Pre-norm: attention, then an MLP, or experts."""
    x = x + attend(norm(x, w, "attn_norm", c), w, c, attn_mask=None if real is None else real[:, None, None, :])
    u = norm(x, w, "mlp_norm", c)
    if "experts.router" in w:
        y, balance = experts(u, real, w, c)
        return x + y, balance
    return x + dense(F.gelu(dense(u, w, "up")), w, "down"), 0.0


# ---------------------------------------------------------------- Mamba-2
def scan_inputs(x, w, c):
    inner = 2 * c.dim
    z, xbc, dt = (norm(x, w, "norm", c) @ w["mamba.inward"].t()).split((inner, inner + 2 * c.state, inner // c.mamba_head), -1)
    xbc = sum(later(xbc, c.conv - 1 - j) * w["mamba.conv"][:, j] for j in range(c.conv)) + w["mamba.conv_bias"]
    x, b, s = F.silu(xbc.float()).to(S.low).split((inner, c.state, c.state), -1)
    dt = F.softplus(dt.float() + w["mamba.dt_bias"])
    return z, x.unflatten(-1, (-1, c.mamba_head)).contiguous(), dt, -w["mamba.log_decay"].exp(), b.unsqueeze(2).contiguous(), s.unsqueeze(2).contiguous()


def scan_outputs(x, z, y, w, c):
    y = rms_norm((y.flatten(2).float() * F.silu(z.float())), w["mamba.norm"], c.norm_eps).to(S.low)
    return x + y @ w["mamba.outward"].t()


def scan_in_chunks(x, dt, rate, b, c, skip):
    return ssd.chunked(x, dt, dt * rate, b, c, skip, 128)


def scan_way(c, batch):
    """SCAN=torch|mamba-ssm, or the faster of both."""
    a = ssd.arguments(["--heads", str(2 * c.dim // c.mamba_head), "--head", str(c.mamba_head), "--state", str(c.state), "--chunk", "128", "--device", S.device])
    ways = {"torch": compiled(scan_in_chunks)}
    if S.device == "cuda":
        try:
            a.mamba_ssm = os.environ.get("MAMBA_SSM")
            if a.mamba_ssm:
                ssd.compile_ahead(a)
            ways["mamba-ssm"] = ssd.mamba_ssm(a)
        except Exception as e:   # whatever an import throws
            print(f"mamba-ssm: {type(e).__name__}: {e}", file=sys.stderr)
    return ways[chosen("SCAN", ways, ssd.inputs(batch, c.source, a, S.low))]


def chosen(what, ways, leaves):
    """The name that an option gives, or that of the fastest of `ways` with its gradients."""
    def once(way):
        y = way(*leaves)
        return y.detach(), torch.autograd.grad(y, leaves, y.detach())[0]
    return option(what, "") or fastest(what, {name: functools.partial(once, way) for name, way in ways.items()})


# ---------------------------------------------------------------- the modules
def module(state, extra, w, c):
    """One step."""
    x = state + extra.unsqueeze(1) + w["position"]
    for layer in w["layers"]:
        x, _ = block(x, layer, c)
    return norm(x, w, "norm", c)


def pool(x, real, w, c):
    """The source's mean -> what is told to the high module, and to the low one"""
    x = norm(x, w, "encoder.norm", c).float()
    pooled = x.mean(1) if real is None else (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
    return dense(dense(pooled.to(S.low), w, "bridge"), w, "core.in").chunk(2, -1)


def told(state, inward, w, name):
    return dense(state.float().mean(1).to(S.low), w, name) + inward


def remember(high, gate_scale, w, c, passes):
    """high: [cycles, batch, slots, dim], after every cycle -> keys and values of all layers, [passes batch, tokens, layers, 2 dim]: of the last cycles' memories, the
    last through the gate."""
    z = dense(norm(high.float().mean(2).to(S.low), w, "core.norm", c), w, "core.out")
    gate = (gate_scale * torch.sigmoid((z[-1].float() * w["gate.weight"]).sum(-1) + w["gate.bias"]) + c.gate_bias).clamp(0.0, 1.0)
    memory = dense(z[-passes:], w, "memory").unflatten(-1, (c.memory_tokens, c.dim))
    memory = torch.cat((memory[:-1], (gate[:, None, None] * memory[-1]).to(S.low).unsqueeze(0)))
    return dense(memory.flatten(0, 1), w, "decoder.cross_kv").unflatten(-1, (c.decoder_layers, 2 * c.dim))


# ---------------------------------------------------------------- the decoder
def cross_torch(x, kv, q_weight, q_bias, out_weight, out_bias, c, copies):
    """Attention of x [batch, time, dim] to memories [copies batch, tokens, 2 dim]."""
    q = heads(linear(x, q_weight, q_bias), c, 1)[0].repeat(copies, 1, 1, 1)
    return linear(joined(F.scaled_dot_product_attention(q, *heads(kv, c, 2))), out_weight, out_bias)


def cross_absorbed(x, kv, q_weight, q_bias, out_weight, out_bias, c, copies):
    """The same for few tokens: the keys take in the query's weights, the values those of `out`, and two products of heads x tokens columns are left of four large ones."""
    k, v = kv.unflatten(-1, (2, c.heads, -1)).unbind(2)   # [batch, tokens, heads, size]
    size = k.shape[-1]
    keys = torch.einsum("bmhs,hsd->bhmd", k, q_weight.view(c.heads, size, -1)).flatten(1, 2)
    shift = (k.float() * q_bias.view(c.heads, size).float()).sum(-1).transpose(1, 2).unsqueeze(1)   # [batch, 1, heads, tokens]
    scores = (x.repeat(copies, 1, 1) @ keys.mT).float().unflatten(-1, (c.heads, -1)) + shift
    share = torch.softmax(scores / math.sqrt(size), -1).to(S.low).flatten(2)
    values = torch.einsum("bmhs,dhs->bhmd", v, out_weight.view(-1, c.heads, size)).flatten(1, 2)
    return share @ values + out_bias


def up_torch(x, weight, bias):
    return F.relu(linear(x, weight, bias))


@torch.library.custom_op("peers::relu_epilogue", mutates_args=())
def relu_epilogue(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """relu(x w^T + bias) with both in cuBLASLt's epilogue. An op of its own, since the compiler takes `_addmm_activation` apart."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=False)


@relu_epilogue.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


def relu_saves(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output)


def relu_back(ctx, g):
    x, weight, h = ctx.saved_tensors
    g = torch.where(h > 0, g, 0.0)
    return g @ weight, g.t() @ x, g.float().sum(0).to(g.dtype)


relu_epilogue.register_autograd(relu_back, setup_context=relu_saves)


def up_epilogue(x, weight, bias):
    return relu_epilogue(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def decoder_layer(x, kv, w, c, copies, cross, up):
    """Post-norm. The first layer's x is one for all memories, up to its queries."""
    x = norm(x + attend(x, w, c, is_causal=True), w, "attn_norm", c)
    y = cross(x, kv, w["cross_q.weight"], w["cross_q.bias"], w["cross_out.weight"], w["cross_out.bias"], c, copies)
    x = norm(x.repeat(copies, 1, 1) + y, w, "cross_norm", c)
    return norm(x + dense(up(x, w["up.weight"], w["up.bias"]), w, "down"), w, "mlp_norm", c)


# ---------------------------------------------------------------- the step
def merged(m, get=lambda p: p.detach()):
    """What is trained, by name: both modules' injections one behind another, and all layers' keys and values of the memory. `get` may ask for the gradients instead."""
    out = {name: get(p) for name, p in m.named_parameters() if p.requires_grad}
    for kind in ("weight", "bias"):
        together = {"core.in": ["core.high_in", "core.low_in"], "decoder.cross_kv": [f"decoder.layers.{i}.cross_kv" for i in range(m.c.decoder_layers)]}
        for name, parts in together.items():
            out[f"{name}.{kind}"] = torch.cat([out.pop(f"{part}.{kind}") for part in parts])
    return out


def full(name):
    return "norm" in name or name.startswith("gate.") or name.split(".")[-1] in ("conv", "conv_bias", "dt_bias", "log_decay", "skip")


class HrmLmTraining:
    """All passes of the decoder are one batch, [passes x rows, time, dim]; one loss head is for all of them. The tables' gradients are f32. Without halting."""
    def __init__(self, m, source, source_mask, tokens, targets, gate_scale, small=1 << 13):
        self.c = c = m.c
        if c.halting:
            raise ValueError("there is no head for halting here")
        self.source, self.tokens, self.gate_scale = source, tokens, gate_scale
        self.real = None if source_mask.bool().all() else source_mask.bool()
        self.p = Parameters(merged(m), small=small, full=full)
        self.optimizer = Optimizer(self.p, flat_decay=HYPER["weight_decay"])
        part = lambda at: {name.removeprefix(at): leaf for name, leaf in self.p.leaf.items() if name.startswith(at)}
        self.w = {name: leaf for name, leaf in self.p.leaf.items() if ".layers." not in name}
        self.encoder = [part(f"encoder.layers.{i}.") for i in range(c.encoder_layers)]
        self.decoder = [part(f"decoder.layers.{i}.") for i in range(c.decoder_layers)]
        layers = lambda at, n: [part(f"{at}layers.{i}.") for i in range(n)]
        self.high, self.low = (dict(position=self.w[f"{at}position"], **{f"norm.{kind}": self.w[f"{at}norm.{kind}"] for kind in ("weight", "bias")}, layers=layers(at, n))
                               for at, n in (("core.high.", c.high_layers), ("core.low.", c.low_layers)))
        self.starts = [self.w.get(name, getattr(m.core, name.removeprefix("core.")).detach().to(S.low)) for name in ("core.high_start", "core.low_start")]
        zeros = torch.zeros(1, c.dim, device=S.device)
        self.sines = [hrm_lm.embed(torch.zeros(1, t, dtype=torch.long, device=S.device), zeros)[0] for t in (c.source, c.seq)]
        # The loss is that of the last cycle's memory, and the mean of the others' by its weight.
        self.passes = c.cycles if c.supervision_weight > 0 else 1
        here = targets.flatten() >= 0
        weight = here / here.sum()
        others = [weight * (c.supervision_weight / max(1, c.cycles - 1))] * (self.passes - 1)
        self.targets, self.weight = targets.flatten().repeat(self.passes), torch.cat([*others, weight])   # passes one behind another
        self.head = Head("chunk", len(self.targets), c.vocab)
        self.choose(len(source))

    def choose(self, rows):
        c, make = self.c, lambda *shape: torch.randn(shape, device=S.device).to(S.low)
        if c.encoder == "mamba2":
            self.scan = scan_way(c, rows)
        leaves = lambda *shapes: [make(*shape).mul_(c.dim ** -0.5).requires_grad_() for shape in shapes]
        x, kv = make(rows * self.passes, c.seq, c.dim).requires_grad_(), make(rows * self.passes, c.memory_tokens, 2 * c.dim).requires_grad_()
        ways = {"absorbed": cross_absorbed, "torch": cross_torch}   # the first must run everywhere
        once = {name: functools.partial(compiled(way), c=c, copies=1) for name, way in ways.items()}
        self.cross = ways[chosen("CROSS", once, [x, kv, *leaves((c.dim, c.dim), (c.dim,), (c.dim, c.dim), (c.dim,))])]
        ways = {"torch": up_torch, "epilogue": up_epilogue}
        once = {name: compiled(way) for name, way in ways.items()}
        self.up = ways[chosen("UP", once, [x, *leaves((c.ff * c.dim, c.dim), (c.ff * c.dim,))])]

    def encode(self, x):
        c, balance = self.c, 0.0
        for w in self.encoder:
            if c.encoder == "mamba2":
                z, *pieces = compiled(scan_inputs)(x, w, c)
                x = compiled(scan_outputs)(x, z, self.scan(*pieces, w["mamba.skip"]), w, c)
            else:
                x, one = compiled(block)(x, w, c, self.real)
                balance = balance + one
        return x, balance

    def think(self, high_in, low_in):
        """The high module's states after every cycle."""
        c, states = self.c, []
        high, low = (start.expand(len(high_in), -1, -1).contiguous() for start in self.starts)
        for cycle in range(c.cycles):
            reached = c.whole or cycle == c.cycles - 1
            with torch.set_grad_enabled(reached):
                if reached and not low.requires_grad:   # differentiated too, so that all of its steps share one compilation
                    low = low.detach().requires_grad_()
                extra = compiled(told)(high, low_in, self.w, "core.to_low")
                for _ in range(c.low_steps):
                    low = compiled(module)(low, extra, self.low, c)
                high = compiled(module)(high, compiled(told)(low, high_in, self.w, "core.to_high"), self.high, c)
            states.append(high)
        return torch.stack(states)

    def backward(self):
        """The loss; gradients are left in self.p."""
        c, w, p = self.c, self.w, self.p
        tables = [w[f"{name}.embedding"].detach() for name in ("encoder", "decoder")]
        x, y = starts = [compiled(embed)(ids, table, sines).requires_grad_() for ids, table, sines in zip((self.source, self.tokens), tables, self.sines)]
        x, balance = self.encode(x)
        high = self.think(*compiled(pool)(x, self.real, w, c))
        kv = compiled(remember)(high, self.gate_scale, w, c, self.passes).unbind(2)
        for i, layer in enumerate(self.decoder):
            y = compiled(decoder_layer)(y, kv[i], layer, c, self.passes if i == 0 else 1, self.cross, self.up)
        h = compiled(norm)(y, w, "decoder.norm", c).flatten(0, 1)
        loss, dh, p.grads["decoder.head"] = self.head(h.detach(), w["decoder.head"].detach(), self.targets, self.weight)
        balance = c.balance_weight * balance
        torch.autograd.backward(*([h, balance], [dh, None]) if isinstance(balance, torch.Tensor) else (h, dh))
        with torch.no_grad():
            for name, ids, start in zip(("encoder", "decoder"), (self.source, self.tokens), starts):
                p.grads[f"{name}.embedding"] = torch.zeros(c.vocab, c.dim, device=S.device)
                compiled(add_rows)(p.grads[f"{name}.embedding"], ids.flatten(), start.grad.flatten(0, 1))
            return loss + balance

    def step(self):
        self.backward()
        self.optimizer.step()


def bench_hrm_lm(batch=32, **other):
    c = hrm_lm.Config(vocab=32768, **other)
    m = hrm_lm.HrmLm(c).to(S.device); m.init(None)
    text = torch.randint(0, c.vocab, (batch, c.source + c.seq), device=S.device)
    fed = [y.contiguous() for y in hrm_lm.window(text, c)]
    return [(HrmLmTraining(m, *fed, torch.ones(1, device=S.device)).step, 1)], batch * (c.source + c.seq), "tokens"
