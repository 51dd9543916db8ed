"""What the recipes share: settings, norms, RoPE, the optimizer."""
import functools, os, sys
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "reference"))
torch._dynamo.config.recompile_limit = 64   # one layer's code, compiled for each of its shapes and uses


def option(name, default):
    return os.environ.get("TUNED_" + name, default)


class S:
    """Settings. `--check` sets cpu and float32."""
    device, mode = "cuda", "graphs"
    low = torch.bfloat16                       # the type of the stream


@functools.lru_cache(None)
def compiled(fn):
    if S.mode == "eager":
        return fn
    if S.device == "cpu":
        return torch.compile(fn, backend=option("BACKEND", "aot_eager"), fullgraph=True, dynamic=False)
    return torch.compile(fn, mode="max-autotune-no-cudagraphs" if S.mode == "autotune" else None, fullgraph=True, dynamic=False)


def trainer(params):
    """Clip to norm 1 and AdamW. The clip is the optimizer's grad_scale: gradients are read once, and nothing waits for the host."""
    opt = torch.optim.AdamW(params, lr=torch.tensor(1e-4, device=S.device), betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=S.device != "cpu")
    def update():
        opt.grad_scale = (torch.nn.utils.get_total_norm([p.grad for p in params]) + 1e-6).clamp_min(1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return update


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def rms_norm(x, weight, eps):
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f if weight is None else f * weight).to(x.dtype)


def rope_table(t, d, theta):
    angle = torch.arange(t, device=S.device, dtype=torch.float32)[:, None] * theta ** (-torch.arange(0, d, 2, device=S.device, dtype=torch.float32) / d)
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def add_rows(table, ids, g):
    table.index_add_(0, ids, g.to(table.dtype))


def training(model, backward):
    """A step as one piece."""
    update = trainer(trainable(model))
    def step():
        backward()
        update()
    return [(step, 1)]
