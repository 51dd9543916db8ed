"""AdamW and Muon over f32 masters, bf16 copies and bf16 gradients: every parameter is read and written once a step, by compiled kernels.

The clip's factor, the rate and the step count are tensors on the device: nothing waits for the host, and a step can be captured.
"""
import math
import torch
from common import S, compiled, option

HYPER = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, flat_decay=0.0, clip=1.0, momentum=0.95)   # flat_decay: of the parameters that lie together


class Parameters:
    """`leaf[name]` is what the model reads and differentiates. Matrices have a bf16 copy, made by the optimizer once a step. 1-D parameters, others of at most
    `small` numbers and those that must stay `full` lie in two buffers, each updated by one kernel: what is full is read as f32, the rest as bf16.
    WEIGHTS=cast keeps masters alone, which the model casts at each use."""
    def __init__(self, start, small=0, full=lambda name: name.endswith("norm"), narrow=()):
        """start: name -> f32 tensor. narrow: names whose copies are somebody else's; their leaves hold nothing and take the gradient."""
        self.cast = option("WEIGHTS", "once") == "cast"
        self.grads = {}   # gradients that were not made by autograd, by name
        self.shape = {name: p.shape for name, p in start.items()}
        together = [] if self.cast else [name for name, p in start.items() if p.dim() == 1 or p.numel() <= small or full(name)]
        self.master = {name: p for name, p in start.items() if name not in together}
        if self.cast:
            self.flat, self.copy, self.leaf = {}, {}, {name: p.requires_grad_() for name, p in self.master.items()}
            return
        self.flat = {kind: names for kind, names in (("full", [n for n in together if full(n)]), ("low", [n for n in together if not full(n)])) if names}
        self.master.update((kind, torch.cat([start[name].flatten() for name in names])) for kind, names in self.flat.items())
        self.copy = {name: p.to(S.low, copy=True) for name, p in self.master.items() if name not in narrow}
        read = self.named({name: self.master[name] if name == "full" else low for name, low in self.copy.items()})
        read.update((name, torch.zeros((), device=S.device, dtype=S.low).expand(self.shape[name])) for name in narrow)
        self.leaf = {name: read[name].detach().requires_grad_() for name in start}

    def named(self, found):
        """One tensor per master -> one per parameter."""
        out = {name: p for name, p in found.items() if name not in self.flat}
        for kind, names in self.flat.items():
            parts = found[kind].split([self.shape[name].numel() for name in names])
            out.update((name, part.view(self.shape[name])) for name, part in zip(names, parts))
        return out

    def gradients(self):
        """One per master."""
        of = lambda name: self.grads[name] if name in self.grads else self.leaf[name].grad
        found = {name: of(name) for name in self.master if name not in self.flat}
        found.update((kind, torch.cat([of(name).flatten() for name in names])) for kind, names in self.flat.items())
        return found

    def forget(self):
        self.grads.clear()
        for p in self.leaf.values():
            p.grad = None

    def value(self, name):
        """The master of one parameter."""
        return self.named({name: p.detach() for name, p in self.master.items()})[name]


def clip_scale(grads, clip):
    kinds = [[g for g in grads if g.dtype == dtype] for dtype in {g.dtype for g in grads}]   # lists of one type take the fused kernel
    norm = torch.linalg.vector_norm(torch.stack([n for kind in kinds for n in torch._foreach_norm(kind, 2, torch.float32)]))
    return (clip / (norm + 1e-6)).clamp_max(1.0), norm


def adamw_one(p, m, v, low, g, scale, rate, c1, c2, decay, beta1, beta2, eps):
    g = g.float() * scale
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    p.mul_(1 - rate * decay).sub_(rate * (m / c1) / ((v / c2).sqrt() + eps))
    low.copy_(p)


def momentum_one(m, g, scale, momentum, out):
    g = g.float() * scale
    m.lerp_(g, 1 - momentum)
    out.copy_(g.lerp(m, momentum))


def to_unit_norm(x):
    x.copy_(x.float() / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-7))


def muon_one(p, low, x, rate, decay):
    p.mul_(1 - rate * decay).sub_(rate * (0.2 * math.sqrt(max(p.shape))) * x.float())
    low.copy_(p)


def newton_schulz(x):
    """x: [matrices, rows, columns], rows <= columns"""
    for _ in range(5):
        a = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class Optimizer:
    """kind: adamw, or muon: the matrices of `split` (name -> rows of each matrix inside that parameter) by Muon, batched over those of one shape; the rest by AdamW.
    fp8: what updates the narrow matrices."""
    def __init__(self, params, kind="adamw", split=(), fp8=None, **hyper):
        self.params, self.fp8, self.h = params, fp8, dict(HYPER, **hyper)
        zeros = lambda p: torch.zeros_like(p, requires_grad=False)
        self.rate = torch.tensor(self.h["lr"], device=S.device)
        self.count = torch.zeros((), device=S.device)
        muon = dict(split) if kind == "muon" else {}
        self.adamw = [(name, p, zeros(p), zeros(p), params.copy[name]) for name, p in params.master.items() if name not in muon and name in params.copy]
        batches = {}   # (rows, columns) -> [(name, slice of it)]
        for name, rows in muon.items():
            start = 0
            for n in rows:
                batches.setdefault(tuple(sorted((n, params.master[name].shape[1]))), []).append((name, slice(start, start + n)))
                start += n
        self.muon = [(shape, [(name, s, zeros(params.master[name][s])) for name, s in part]) for shape, part in batches.items()]

    @torch.no_grad()
    def step(self):
        h, params, grads = self.h, self.params, self.params.gradients()
        scale, self.norm = clip_scale(list(grads.values()), h["clip"])
        self.count += 1
        c1, c2 = 1 - h["beta1"] ** self.count, 1 - h["beta2"] ** self.count
        for name, p, m, v, low in self.adamw:
            decay = h["flat_decay" if name in params.flat else "weight_decay"]
            compiled(adamw_one)(p, m, v, low, grads[name], scale, self.rate, c1, c2, decay, h["beta1"], h["beta2"], h["eps"])
        for shape, part in self.muon:
            x = torch.empty(len(part), *shape, device=S.device, dtype=S.low)
            place = [y if s.stop - s.start == shape[0] else y.t() for y, (_, s, _) in zip(x, part)]
            for out, (name, s, m) in zip(place, part):
                compiled(momentum_one)(m, grads[name][s], scale, h["momentum"], out)
            compiled(to_unit_norm)(x)
            place = [y.t() if out.shape != y.shape else y for out, y in zip(place, newton_schulz(x))]
            for y, (name, s, _) in zip(place, part):
                compiled(muon_one)(params.master[name][s], params.copy[name][s], y, self.rate, h["weight_decay"])
        if self.fp8:
            self.fp8.step(grads, scale, self.rate, c1, c2, h)
        params.forget()


class Fused:
    """What a careful user writes: clip_grad_norm_ and fused AdamW over the f32 masters (WEIGHTS=cast)."""
    def __init__(self, params, **hyper):
        h = dict(HYPER, **hyper)
        self.params, self.clip = params, h["clip"]
        leaves = list(params.leaf.values())
        groups = [dict(params=[p for p in leaves if p.dim() > 1], weight_decay=h["weight_decay"]), dict(params=[p for p in leaves if p.dim() == 1], weight_decay=0.0)]
        self.opt = torch.optim.AdamW(groups, lr=torch.tensor(h["lr"], device=S.device), betas=(h["beta1"], h["beta2"]), eps=h["eps"], fused=True, capturable=S.device != "cpu")

    def step(self):
        for name, g in self.params.grads.items():
            self.params.leaf[name].grad = g
        self.norm = torch.nn.utils.clip_grad_norm_(self.params.leaf.values(), self.clip, foreach=True)
        self.opt.step()
        self.params.forget()
