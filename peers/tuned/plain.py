"""Plain decoders (gpt2; llama, qwen2, qwen3), every weight trained: sizes, model, loss head, step.

Options: LOSS=chunk|whole|plain  CHUNK=rows  SOFTMAX=compile|triton  WEIGHTS=once|cast  BLOCKS=each|whole  OPTIMIZER=adamw|muon  FP8=tensorwise (fp8.py)
chunk: logits of CHUNK rows at a time, their gradient made at once and written over them.  whole: the same with all rows (more memory, one large GEMM
for each gradient).  SOFTMAX: by default the faster of the two.  plain: cross-entropy of all logits through autograd.  once: bf16 copies of the f32 masters, updated once a step.  cast: masters
cast wherever they are used, and torch's fused AdamW, as autocast does it.
"""
import dataclasses, os
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from common import S, add_rows, compiled, option, rms_norm, rope, rope_table
from loss_head import Head, plain_loss
from optimizers import Fused, Optimizer, Parameters


@dataclass(frozen=True)
class Size:
    vocab: int; dim: int; layers: int; heads: int; kv: int; head: int; hidden: int
    batch: int; seq: int = 1024
    kind: str = "llama"       # or gpt2: LayerNorm, learned positions, GELU, biases
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    theta: float = 1e6
    eps: float = 1e-6


SIZES = {
    "gpt2-124m": Size(50304, 768, 12, 12, 12, 64, 3072, 64, kind="gpt2", qkv_bias=True, eps=1e-5),
    "qwen2.5-0.5b": Size(151936, 896, 24, 14, 2, 64, 4864, 32, qkv_bias=True),
    "qwen3-0.6b": Size(151936, 1024, 28, 16, 8, 128, 3072, 16, qk_norm=True),
    "qwen2.5-1.5b": Size(151936, 1536, 28, 12, 2, 128, 8960, 16, qkv_bias=True),
}


def tiny(s):
    """The same model, small enough for a CPU."""
    ratio = s.heads // s.kv
    return dataclasses.replace(s, vocab=640, dim=64, layers=2, heads=2 * ratio, kv=2, head=16, hidden=96, batch=2, seq=48)


def shapes(s):
    """name -> shape, in the order of the layers. q, k, v lie one behind another, gate and up too."""
    gpt2, qkv = s.kind == "gpt2", (s.heads + 2 * s.kv) * s.head
    out = {"embedding": (s.vocab, s.dim)}
    if gpt2:
        out["position"] = (s.seq, s.dim)
    def norm(name, n):
        out[name + "_norm"] = (n,)
        if gpt2:
            out[name + "_bias_norm"] = (n,)
    def linear(name, o, i, bias):
        out[name] = (o, i)
        if bias:
            out[name + "_bias"] = (o,)
    for i in range(s.layers):
        norm(f"{i}.attn", s.dim)
        linear(f"{i}.qkv", qkv, s.dim, s.qkv_bias)
        if s.qk_norm:
            out[f"{i}.q_norm"] = out[f"{i}.k_norm"] = (s.head,)
        linear(f"{i}.o", s.dim, s.heads * s.head, gpt2)
        norm(f"{i}.mlp", s.dim)
        linear(f"{i}.up", s.hidden if gpt2 else 2 * s.hidden, s.dim, gpt2)
        linear(f"{i}.down", s.dim, s.hidden, gpt2)
    norm("last", s.dim)
    if not s.tied:
        out["head"] = (s.vocab, s.dim)
    return out


def random_start(s):
    def one(name, shape):
        if len(shape) == 2:
            return torch.randn(shape, device=S.device).mul_(0.02)
        return (torch.zeros if "bias" in name else torch.ones)(shape, device=S.device)
    return {name: one(name, shape) for name, shape in shapes(s).items()}


def matrices(s):
    """What Muon updates: name -> rows of each matrix (gpt2's q, k, v are one matrix, the others' three)."""
    qkv = [n * s.head for n in (s.heads, s.kv, s.kv)]
    gpt2 = s.kind == "gpt2"
    each = dict(qkv=[sum(qkv)] if gpt2 else qkv, o=[s.dim], up=[s.hidden] if gpt2 else 2 * [s.hidden], down=[s.dim])
    return {f"{i}.{name}": rows for i in range(s.layers) for name, rows in each.items()}


def parameters(s):
    """How many weights there are."""
    return sum(torch.Size(shape).numel() for shape in shapes(s).values())


def flops_per_token(s):
    """6 a weight (forward 2, backward 4; a tied head once, the lookup not at all), and causal attention: 12 heads head_dim time a layer, halved."""
    return 6 * parameters(s) + 6 * s.layers * s.heads * s.head * s.seq


# ---------------------------------------------------------------- model
NAMES = ["attn_norm", "attn_bias_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm", "mlp_bias_norm", "up", "up_bias", "down", "down_bias"]


def norm(x, weight, bias, s):
    """In f32. As formulas where it is compiled, so that it fuses; eagerly as PyTorch's kernel."""
    n = (x.shape[-1],)
    if s.kind == "gpt2":
        return F.layer_norm(x.float(), n, weight, bias, s.eps).to(x.dtype)
    return F.rms_norm(x.float(), n, weight, s.eps).to(x.dtype) if S.mode == "eager" else rms_norm(x, weight, s.eps)


def linear(x, weight, bias):
    return F.linear(x, weight.to(S.low), None if bias is None else bias.to(S.low))


def layer(x, delta, weights, cos, sin, s):
    """x: [batch, time, dim]. The sum x + delta is left to the next layer, where it fuses with its norm."""
    attn, attn_bias, qkv, qkv_bias, q_norm, k_norm, o, o_bias, mlp, mlp_bias, up, up_bias, down, down_bias = weights
    x = x + delta
    a = attend(*heads(linear(norm(x, attn, attn_bias, s), qkv, qkv_bias), q_norm, k_norm, cos, sin, s), s)
    x = x + linear(a, o, o_bias)
    return x, linear(activation(linear(norm(x, mlp, mlp_bias, s), up, up_bias), s), down, down_bias)


def heads(qkv, q_norm, k_norm, cos, sin, s):
    """q, k, v: [batch, time, heads, head]"""
    q, k, v = (y.unflatten(-1, (-1, s.head)) for y in qkv.split([n * s.head for n in (s.heads, s.kv, s.kv)], -1))
    if q_norm is not None:
        q, k = norm(q, q_norm, None, s), norm(k, k_norm, None, s)
    if s.kind != "gpt2":
        q, k = rope(q, cos, sin).to(S.low), rope(k, cos, sin).to(S.low)
    return q, k, v


def attend(q, k, v, s):
    a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=s.heads != s.kv)
    return a.transpose(1, 2).flatten(2)


def activation(u, s):
    if s.kind == "gpt2":
        return F.gelu(u, approximate="tanh")
    gate, u = u.chunk(2, -1)
    return F.silu(gate) * u


def sum_and_norm(x, delta, weight, bias, s):
    x = x + delta
    return x, norm(x, weight, bias, s)


def layer_of_products(x, delta, weights, cos, sin, s, products):
    """The same with products that the compiler does not see: what is between them is compiled."""
    attn, attn_bias, qkv, qkv_bias, q_norm, k_norm, o, o_bias, mlp, mlp_bias, up, up_bias, down, down_bias = weights
    x, u = compiled(sum_and_norm)(x, delta, attn, attn_bias, s)
    a = attend(*compiled(heads)(products[0](u, qkv, qkv_bias), q_norm, k_norm, cos, sin, s), s)
    x, u = compiled(sum_and_norm)(x, products[1](a, o, o_bias), mlp, mlp_bias, s)
    return x, products[3](compiled(activation)(products[2](u, up, up_bias), s), down, down_bias)


def last_norm(x, delta, weight, bias, s):
    return norm(x + delta, weight, bias, s)


def all_layers(x, delta, layers, cos, sin, s):
    for weights in layers:
        x, delta = layer(x, delta, weights, cos, sin, s)
    return x, delta


def embed(ids, table, position):
    x = F.embedding(ids, table)
    return x if position is None else x + position


# ---------------------------------------------------------------- step
class Training:
    def __init__(self, s, start, ids, targets, **hyper):
        """start: name -> f32 tensor; ids and targets: [batch, time]"""
        self.s, self.ids, self.targets = s, ids, targets.flatten()
        here = self.targets >= 0
        self.weight = here / here.sum()
        narrow = [f"{i}.{name}" for i in range(s.layers) for name in ("qkv", "o", "up", "down")] if option("FP8", "") == "tensorwise" else []
        self.p = p = Parameters(start, narrow=narrow)
        get = lambda name: p.leaf.get(name)
        self.layers = [tuple(get(f"{i}.{name}") for name in NAMES) for i in range(s.layers)]
        self.cos, self.sin = (y.unsqueeze(1) for y in rope_table(ids.shape[1], s.head, s.theta))
        # What the first layer adds: zeros that are differentiated too, so that all layers share one compilation.
        self.zeros = torch.zeros(*ids.shape, s.dim, device=S.device, dtype=S.low, requires_grad=True)
        kind = option("OPTIMIZER", "adamw")
        self.fp8 = None
        if narrow:
            from fp8 import Fp8   # needs Triton
            self.fp8 = Fp8({name: p.master[name] for name in narrow}, ids.numel())
        self.optimizer = Fused(p, **hyper) if p.cast else Optimizer(p, kind, matrices(s), self.fp8, **hyper)
        self.loss = option("LOSS", "chunk")
        if self.loss not in ("chunk", "whole", "plain") or kind not in ("adamw", "muon") or (kind == "muon" or narrow) and p.cast or kind == "muon" and narrow or option("FP8", "") not in ("", "tensorwise"):
            raise ValueError(f"LOSS={self.loss} OPTIMIZER={kind} FP8={option('FP8', '')}: LOSS is chunk, whole or plain; OPTIMIZER adamw, or muon with WEIGHTS=once; FP8 tensorwise, with adamw and WEIGHTS=once")
        self.head = None if self.loss == "plain" else Head(self.loss, ids.numel(), s.vocab)
        for _ in range(2 if self.fp8 else 0):   # the first scales
            self.backward()
            self.p.forget()
            self.fp8.scales(weights=False)

    def hidden(self, x):
        s, p, delta = self.s, self.p, self.zeros
        if self.fp8:
            for i, weights in enumerate(self.layers):
                x, delta = layer_of_products(x, delta, weights, self.cos, self.sin, s, [self.fp8.linear[f"{i}.{name}"] for name in ("qkv", "o", "up", "down")])
        elif option("BLOCKS", "each") == "whole":
            x, delta = compiled(all_layers)(x, delta, self.layers, self.cos, self.sin, s)
        else:
            for weights in self.layers:
                x, delta = compiled(layer)(x, delta, weights, self.cos, self.sin, s)
        return compiled(last_norm)(x, delta, p.leaf["last_norm"], p.leaf.get("last_bias_norm"), s).flatten(0, 1)

    def backward(self):
        """The loss; gradients are left in self.p. The two gradients of a tied table meet in one f32 buffer."""
        s, p, low = self.s, self.p, lambda name: self.p.leaf[name].detach().to(S.low)
        table = low("embedding")
        head = table if s.tied else low("head")
        x = compiled(embed)(self.ids, table, low("position") if "position" in p.leaf else None).requires_grad_()
        h = self.hidden(x)
        if self.loss == "plain":
            head = head.detach().requires_grad_()
            loss = compiled(plain_loss)(h, head, self.targets, self.weight)
            loss.backward()
            dw = head.grad.float()
        else:
            loss, dh, dw = self.head(h.detach(), head, self.targets, self.weight)
            h.backward(dh)
        with torch.no_grad():
            if not s.tied:
                p.grads["head"], dw = dw, torch.zeros(s.vocab, s.dim, device=S.device)
            compiled(add_rows)(dw, self.ids.flatten(), x.grad.flatten(0, 1))
            p.grads["embedding"] = dw
            if "position" in p.leaf:
                p.grads["position"] = x.grad.sum(0, dtype=torch.float32)
        self.zeros.grad = None
        return loss.detach()

    def step(self):
        loss = self.backward()
        self.optimizer.step()
        return loss


def random_training(s):
    ids = torch.randint(0, s.vocab, (s.batch, s.seq), device=S.device)
    return Training(s, random_start(s), ids, ids.roll(-1, 1).contiguous())


def bench_decoder(name, fp8=None):
    s = SIZES[name]
    if fp8:
        os.environ["TUNED_FP8"] = fp8
    return [(random_training(s).step, 1)], s.batch * s.seq, "tokens"
