"""vision_bdh: an image classifier, one layer applied over and over."""
import functools, math
import torch
import torch.nn.functional as F
from choose import fastest, own_kernels
from common import S, compiled, training
import vision_bdh


class SelfScores(torch.autograd.Function):
    """q q^T. Both gradients are one product."""
    @staticmethod
    def forward(ctx, q):
        ctx.save_for_backward(q)
        return q @ q.mT

    @staticmethod
    def backward(ctx, g):
        q, = ctx.saved_tensors
        return (g + g.mT) @ q


def vision_step(m, images, labels, accumulate):
    """Patches by a product, all heads' encoders in one product. Attention: queries padded with zero rows to a multiple of 8 (there is no softmax: zeros stay zeros), scores times
    values as one product a picture; or kernels of our own, where the whole runs faster with them."""
    c = m.c
    t, pad = c.tokens, -c.tokens % 8
    i = torch.arange(c.neurons, device=S.device, dtype=torch.float64)
    turn = torch.arange(t, device=S.device, dtype=torch.float64)[:, None] * (c.rope_theta ** (-2.0 * torch.floor(i / 2) / c.neurons) / (2 * math.pi))
    phase = (2 * math.pi * (turn - turn.floor())).float()
    cos, sin = phase.cos()[:, None], phase.sin()[:, None]                           # [time, 1, neurons]
    pair = [x[:, 0, ::2].to(torch.float16 if S.low == torch.bfloat16 else S.low).contiguous() for x in (cos, sin)]   # neighbours turn alike
    norm = lambda x: F.layer_norm(x.float(), (x.shape[-1],), eps=c.norm_eps).to(S.low)

    def attention(xn, enc):
        """-> the positive activations [batch, time, heads, neurons], and scores x values [heads, batch, time, dim]"""
        b = len(xn)
        xs = F.relu(xn @ enc).view(b, t, c.heads, c.neurons)
        f = xs.float()
        q = f * cos + torch.stack((-f[..., 1::2], f[..., 0::2]), -1).flatten(-2) * sin
        q = F.pad(q.to(S.low).transpose(1, 2), (0, 0, 0, pad)).contiguous()                            # [batch, heads, padded, neurons]
        scores = SelfScores.apply(q.flatten(0, 1)).view(b, c.heads * (t + pad), t + pad)
        return xs, (scores @ F.pad(xn, (0, 0, 0, pad))).view(b, c.heads, t + pad, c.dim)[:, :, :t].transpose(0, 1)

    def own_attention(xn, enc):
        y, xs = scores_kernel.Scores.apply(xn.flatten(0, 1) @ enc, xn, *pair, c.heads, tiles)
        return xs.view(len(xn), t, c.heads, c.neurons), y

    def loss_of(attention, images, labels):
        b, n = len(images), c.image // c.patch
        enc = m.encoder.permute(1, 0, 2).reshape(c.dim, -1).to(S.low)
        enc_v, dec = m.encoder_v.to(S.low), m.decoder.to(S.low)
        x = images.to(S.low).view(b, 3, n, c.patch, n, c.patch).permute(0, 2, 4, 1, 3, 5).reshape(b, n * n, -1)
        x = x @ m.patch.weight.flatten(1).to(S.low).t() + m.patch.bias.to(S.low)
        x = (torch.cat((m.cls.expand(b, -1, -1).to(S.low), x), 1) + m.position).to(S.low)
        for _ in range(c.loops):
            xn = norm(x)
            xs, y = attention(xn, enc)
            y = norm(y)
            ys = F.relu(torch.bmm(y.reshape(c.heads, b * t, c.dim), enc_v))            # [heads, batch * time, neurons]
            o = F.dropout(xs * ys.view(c.heads, b, t, c.neurons).permute(1, 2, 0, 3), c.dropout, m.training)
            x = norm(x.float() + norm(o.flatten(2) @ dec).float())
        logits = norm(x[:, 0]) @ m.head.weight.to(S.low).t() + m.head.bias.to(S.low)
        return F.cross_entropy(logits.float(), labels)
    ways = {"torch": attention}
    if own_kernels():
        import scores_kernel
        tiles, ways["own"] = scores_kernel.tiles(len(images), *pair, c.heads, c.dim), own_attention
    run = compiled(loss_of)

    def once(way):
        m.zero_grad()
        loss = run(way, images, labels)
        loss.backward()
        return loss.detach()
    way = ways[fastest("vision_bdh", {name: functools.partial(once, way) for name, way in ways.items()}, calls=1)]
    m.zero_grad()

    def backward():
        total = 0.0
        for _ in range(accumulate):
            loss = run(way, images, labels) / accumulate
            loss.backward()
            total = total + loss.detach()
        return total
    return backward


def bench_vision(batch=128, accumulate=2):
    c = vision_bdh.Config()
    m = vision_bdh.VisionBdh(c).to(S.device); m.init(None)
    images, labels = torch.randn(batch, 3, 32, 32, device=S.device), torch.randint(0, 10, (batch,), device=S.device)
    return training(m, vision_step(m, images, labels, accumulate)), batch * accumulate, "images"
