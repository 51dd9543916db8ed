"""lior: a window of both phases and the update, without back-propagation."""
import functools, math
import torch
import torch.nn.functional as F
from choose import fastest
from common import S, compiled, option
import lior


def gelu_product(x, w, zero):
    return F.gelu(x @ w.t(), approximate="tanh")


@torch.library.custom_op("peers::gelu_epilogue", mutates_args=())
def gelu_epilogue(x: torch.Tensor, w: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """gelu(x w^T) with the GELU in cuBLASLt's epilogue (on GPUs by its formula with tanh, and only with a bias: zeros). An op of its own, since the compiler takes
    `_addmm_activation` apart."""
    return torch._addmm_activation(zero, x, w.t(), use_gelu=True) if x.is_cuda else gelu_product(x, w, zero)


@gelu_epilogue.register_fake
def _(x, w, zero):
    return x.new_empty(len(x), len(w))


def field_course(field, k, source, c):
    """The field (real and imaginary part) at steps 0..steps. It depends on nothing else, so all its states come first. sines: the Laplacian with zeros outside is diagonal in sines, so each
    mode is a 2x2 matrix of determinant 1, whose powers have a closed form: all steps at once, in f64. steps: one after another, as the reference."""
    if option("FIELD", "sines") == "steps":
        states = [field]
        for _ in range(c.steps):
            re = states[-1][0] + k * lior.laplacian(states[-1][1]) + (0.0 if source is None else source)
            states.append(torch.stack((re, states[-1][1] - k * lior.laplacian(re))))
        return torch.stack(states, 1)
    one = lambda n: torch.arange(1, n + 1, device=S.device, dtype=torch.float64) * (math.pi / (n + 1))
    y, x = one(field.shape[-2]), one(field.shape[-1])
    sines = lambda a: torch.sin(a[:, None] * torch.arange(1, len(a) + 1, device=S.device)) * math.sqrt(2 / (len(a) + 1))
    sy, sx = sines(y), sines(x)
    a = k.double() * (2 * y.cos()[:, None] + 2 * x.cos() - 4)                        # one step: re += a im + source, im -= a re
    turn = lambda f: sy @ f.double() @ sx
    re, im = turn(field[0]), turn(field[1])
    rest = 0.0 if source is None else turn(source.expand(field.shape[1:])) / a            # im = -rest, re = 0 stands still
    im = im + rest
    angle = 2 * torch.asin(a.abs() / 2)
    n = torch.arange(c.steps + 1, device=S.device, dtype=torch.float64).view(-1, 1, 1, 1, 1)
    u, v = torch.sin(n * angle) / torch.sin(angle), torch.sin((n - 1) * angle) / torch.sin(angle)
    states = torch.stack((u * (re + a * im) - v * re, u * ((1 - a * a) * im - a * re) - v * im - rest))
    return (sy @ states @ sx).float()                                                # [2, steps + 1, ...]


def lior_step(e, s, ids, mask, c):
    """The whole window. The encoder runs over all steps of a phase as one batch; of what is found only the first n columns are ever used; the rotor is a matrix;
    counters live on the device, so that a captured window may be replayed for ever. Geometry in f32, the encoder in S.low."""
    low = {n: getattr(e, n).detach().to(S.low) for n in ("qkv", "out", "up", "down")}
    table, position = e.embedding.detach(), e.position.detach()
    filled, windows = torch.tensor(s.filled, device=S.device), torch.tensor(s.windows, device=S.device)
    pair = torch.view_as_real(s.field).movedim(-1, 0)                                # the compiler has no complex numbers
    window, after = ids[:, :c.seq].contiguous(), ids[:, c.seq:].contiguous()
    norm = lambda y: F.layer_norm(y.float(), (c.dim,), eps=c.norm_eps).to(S.low)
    zero = torch.zeros(low["up"].shape[1], device=S.device, dtype=S.low)
    x = torch.randn(c.steps * window.numel(), c.dim, device=S.device).to(S.low)
    ways = {"torch": compiled(gelu_product), "own": gelu_epilogue}
    up = gelu_product if fastest("lior's GELU", {name: functools.partial(way, x, low["up"][0], zero) for name, way in ways.items()}) == "torch" else gelu_epilogue
    del x

    def encode(ids, gain):
        """-> the stream before its last norm, [gains * batch, time, dim], with that norm's mean and scale."""
        x = ((table[ids] + position[:ids.shape[1]]) * gain.view(-1, 1, 1, 1)).to(S.low).flatten(0, 1)
        b, t, _ = x.shape
        for l in range(c.layers):
            q, k, v = (norm(x) @ low["qkv"][l].t()).view(b, t, 3, c.heads, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + a.transpose(1, 2).reshape(b, t, c.dim) @ low["out"][l].t()
            x = x + (up(norm(x).flatten(0, 1), low["up"][l], zero) @ low["down"][l].t()).view_as(x)
        var, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
        return x, mean, torch.rsqrt(var + c.norm_eps)

    def phase(field, g, theta, memory_coord, memory_state, filled, k, nudge):
        b = len(window)
        source = None
        if nudge is not None:
            source = c.dt * nudge.mean(0)[torch.arange(field.shape[1], device=S.device) % c.n].view(-1, 1, 1, 1)
        course = field_course(field, k, source, c)
        r = course.pow(2).sum(0).sqrt().flatten(1).mean(1)[:c.steps]
        x, mean, scale = encode(window, r)
        weight = mask / mask.sum(1, keepdim=True)
        coord = ((x[..., :c.n].float() - mean) * scale).unflatten(0, (c.steps, b))
        q = (coord * weight[..., None]).sum(2)
        q_state = ((x[-b:].float() - mean[-b:]) * scale[-b:] * weight[..., None]).sum(1)
        q = q if nudge is None else q + nudge
        turn = lior.rotor(torch.eye(c.n, device=S.device), theta, c)
        qr = (q @ turn).unsqueeze(2)
        far = torch.cat((lior.speed(coord @ turn - qr, g, c.eps), lior.speed(memory_coord @ turn - qr, g, c.eps)), -1)
        free = (torch.arange(c.memory, device=S.device) >= filled).float() * 1e4
        w = torch.softmax(-c.beta * (r.view(-1, 1, 1) * far + torch.cat(((1 - mask) * 1e4, free.expand(b, -1)), 1)), -1)
        found = (w[..., :c.seq].unsqueeze(-1) * coord).sum(2) + w[..., c.seq:] @ memory_state[:, :c.n]
        v = 0.5 * (q + found) @ turn
        length = lior.speed(v, g, c.eps)
        slope = (r.view(-1, 1, 1) * v * v / (2 * length.unsqueeze(-1))).mean(0)
        return dict(lior=(r[:, None] * length).mean(0), curvature=r.mean(), speed=length.mean(0), velocity=v.mean(0), slope=slope, q=q[-1], q_state=q_state, r=r, field=course[:, c.steps])

    def run(field, g, theta, memory_coord, memory_state, filled, windows):
        drag = (torch.log1p(windows.clamp_max(c.history).float()) * (c.memory_alpha * c.memory_lambda)).clamp_max(1.0)
        state = (field, g, theta, memory_coord, memory_state, filled, c.dt * (1 - drag) / (2 * c.mass))
        free = phase(*state, None)
        x, mean, scale = encode(after, free["r"][:1])
        target = ((x[..., :c.n].float() - mean) * scale).mean(1)
        nudged = phase(*state, c.nudge * (target - free["q"]))
        rate = c.learning_rate / c.nudge_beta
        g = (g - rate * (nudged["slope"] - free["slope"]).mean(0)).clamp(0.01, 100.0)
        delta = (nudged["lior"] - free["lior"]).mean()
        v, i = nudged["velocity"].mean(0), torch.arange(c.planes, device=S.device)
        a = (2 * (i % (c.n // 2)) + i // (c.n // 2)) % c.n
        va, vb = v[a], v[(a + 1) % c.n]
        theta = torch.remainder(theta - rate * c.rotor_rate * delta * torch.atan2(vb, va) * (va ** 2 + vb ** 2).sqrt() + math.pi, 2 * math.pi) - math.pi
        slot = (filled + torch.arange(len(ids), device=S.device)) % c.memory
        return g, theta, free["field"], slot, free["q"], free["q_state"], torch.stack([free[k].mean() for k in ("lior", "curvature", "speed")] + [delta])
    run = compiled(run)

    @torch.no_grad()
    def step():
        g, theta, field, slot, q, q_state, metrics = run(pair, s.g, s.theta, s.memory_coord, s.memory_state, filled, windows)
        for place, value in ((s.g, g), (s.theta, theta), (pair, field)):
            place.copy_(value)
        s.memory_coord.index_copy_(0, slot, q)
        s.memory_state.index_copy_(0, slot, q_state)
        filled.add_(len(ids))
        windows.add_(1)
        return metrics
    return step


def bench_lior(batch=8):
    c = lior.Config()
    e = lior.Encoder(c).to(S.device); e.init(None)
    ids = torch.randint(0, c.vocab, (batch, c.seq + 8), device=S.device)
    return [(lior_step(e, lior.State(c, None).to(S.device), ids, torch.ones(batch, c.seq, device=S.device), c), 1)], 1, "windows"
