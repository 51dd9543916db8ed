"""Writing a token with few rows, in Triton: five kernels a layer, and the nucleus in two passes over the logits.

`product` is y = norm(x + delta) W^T for at most 16 rows: the norm's scale is a factor of each row of the result, so one loop sums squares and products; gate and up
are multiplied together in it. `attention` norms and turns q and k, keeps k and v in the cache, and reads the cache once for all heads of a group.
"""
import functools
import torch
import triton
import triton.language as tl
from choose import fastest
from common import S


@triton.jit
def product_kernel(x, delta, total, norm, w, y, rows, n, eps, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr):
    """NORM: x + delta is written to total by the first program. GATED: w has the gate's n rows, then up's."""
    low = x.dtype.element_ty
    row, out, k = tl.arange(0, 16), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    here, there = row[:, None] < rows, out[:, None] < n
    first, second, squares = tl.zeros((16, BN), tl.float32), tl.zeros((16, BN), tl.float32), tl.zeros((16,), tl.float32)
    for start in range(0, K, BK):
        at = row[:, None] * K + start + k[None, :]
        a = tl.load(x + at, mask=here, other=0.0)
        if NORM:
            a = (a.to(tl.float32) + tl.load(delta + at, mask=here, other=0.0).to(tl.float32)).to(low)
            if tl.program_id(0) == 0:
                tl.store(total + at, a, mask=here)
            f = a.to(tl.float32)
            squares += tl.sum(f * f, 1)
            a = (f * tl.load(norm + start + k)[None, :]).to(low)
        place = w + out[:, None].to(tl.int64) * K + start + k[None, :]
        first = tl.dot(a, tl.trans(tl.load(place, mask=there, other=0.0)), first, input_precision="ieee")
        if GATED:
            second = tl.dot(a, tl.trans(tl.load(place + n * K, mask=there, other=0.0)), second, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        first, second = first * scale, second * scale
    if GATED:
        first = first / (1 + tl.exp(-first)) * second
    tl.store(y + row[:, None] * n + out[None, :], first.to(low), mask=here & (out[None, :] < n))


def product(x, w, tile, delta=None, norm=None, eps=0.0, gated=False):
    """x: [rows, k] -> [rows, n], with x + delta where there is a norm"""
    (rows, k), n, (bn, bk, warps, stages) = x.shape, len(w) // 2 if gated else len(w), tile
    y, total = x.new_empty(rows, n), None if norm is None else torch.empty_like(x)
    product_kernel[(triton.cdiv(n, bn),)](x, delta, total, norm, w, y, rows, n, eps, k, bk, bn, norm is not None, gated, num_warps=warps, num_stages=stages)
    return y if norm is None else (total, y)


@triton.jit
def unit(a, b, norm, half, eps, HALF: tl.constexpr):
    """A head's two halves, normed."""
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return a * scale * tl.load(norm + half)[None, :], b * scale * tl.load(norm + HALF + half)[None, :]


@triton.jit
def attention_kernel(qkv, q_norm, k_norm, cos, sin, keys, values, at, out, places, eps, factor, KV: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """One program has one row's group of heads. keys, values: [rows, KV, places, 2 HALF]"""
    low = qkv.dtype.element_ty
    row, kv = tl.program_id(0) // KV, tl.program_id(0) % KV
    HEAD: tl.constexpr = 2 * HALF
    half, head, one, now = tl.arange(0, HALF), tl.arange(0, GROUP), tl.arange(0, 1), tl.load(at)
    base = qkv + row * (GROUP + 2) * KV * HEAD
    q = base + (kv * GROUP + head[:, None]) * HEAD + half[None, :]
    k = base + (GROUP * KV + kv + one[:, None]) * HEAD + half[None, :]
    qa, qb, ka, kb = tl.load(q).to(tl.float32), tl.load(q + HALF).to(tl.float32), tl.load(k).to(tl.float32), tl.load(k + HALF).to(tl.float32)
    if NORM:
        qa, qb = unit(qa, qb, q_norm, half, eps, HALF)
        ka, kb = unit(ka, kb, k_norm, half, eps, HALF)
    c, s = tl.load(cos + now * HALF + half)[None, :], tl.load(sin + now * HALF + half)[None, :]
    qa, qb = (qa * c - qb * s).to(low).to(tl.float32), (qb * c + qa * s).to(low).to(tl.float32)
    ka, kb = (ka * c - kb * s).to(low), (kb * c + ka * s).to(low)
    cache = (row * KV + kv).to(tl.int64) * places * HEAD
    mine = cache + now * HEAD + one[:, None] * HEAD + half[None, :]
    v = base + ((GROUP + 1) * KV + kv + one[:, None]) * HEAD + half[None, :]
    va, vb = tl.load(v), tl.load(v + HALF)
    tl.store(keys + mine, ka), tl.store(keys + mine + HALF, kb)
    tl.store(values + mine, va), tl.store(values + mine + HALF, vb)
    # the token itself first; then what was there before it, as far as the cache is filled
    best = (tl.sum(qa * ka.to(tl.float32), 1) + tl.sum(qb * kb.to(tl.float32), 1)) * factor
    total = tl.full((GROUP,), 1.0, tl.float32)
    oa, ob = va.to(tl.float32) + tl.zeros((GROUP, HALF), tl.float32), vb.to(tl.float32) + tl.zeros((GROUP, HALF), tl.float32)
    for start in range(0, now, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < now
        p = cache + place[:, None] * HEAD + half[None, :]
        xa, xb = tl.load(keys + p, mask=there[:, None], other=0.0).to(tl.float32), tl.load(keys + p + HALF, mask=there[:, None], other=0.0).to(tl.float32)
        score = tl.sum(qa[:, None, :] * xa[None, :, :], 2) + tl.sum(qb[:, None, :] * xb[None, :, :], 2)
        score = tl.where(there[None, :], score * factor, -float("inf"))
        top = tl.maximum(best, tl.max(score, 1))
        weight, old = tl.exp(score - top[:, None]), tl.exp(best - top)
        xa, xb = tl.load(values + p, mask=there[:, None], other=0.0).to(tl.float32), tl.load(values + p + HALF, mask=there[:, None], other=0.0).to(tl.float32)
        oa = oa * old[:, None] + tl.sum(weight[:, :, None] * xa[None, :, :], 1)
        ob = ob * old[:, None] + tl.sum(weight[:, :, None] * xb[None, :, :], 1)
        total, best = total * old + tl.sum(weight, 1), top
    to = out + (row * KV * GROUP + kv * GROUP + head[:, None]) * HEAD + half[None, :]
    tl.store(to, (oa / total[:, None]).to(low))
    tl.store(to + HALF, (ob / total[:, None]).to(low))


def attention(qkv, norms, cos, sin, keys, values, at, c, tile=(32, 4)):
    """qkv: [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim]; the token's key and value enter the cache."""
    rows, (block, warps) = len(qkv), tile
    out = qkv.new_empty(rows, c.heads * c.head_dim)
    attention_kernel[(rows * c.kv_heads,)](qkv, *norms, cos, sin, keys, values, at, out, keys.shape[2], c.norm_eps, c.head_dim ** -0.5, c.kv_heads, c.heads // c.kv_heads, c.head_dim // 2, block,
                                           norms[0] is not None, num_warps=warps)
    return out


# ---------------------------------------------------------------- the next token
PART = 128   # logits at a time: with more the one-hot matrices do not fit into registers


@triton.jit
def order(z, BITS: tl.constexpr):
    """Logits as numbers of BITS bits, without sign, in the same order."""
    if BITS == 16:
        b = z.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return tl.where(b >= 0x8000, 0xFFFF - b, b + 0x8000).to(tl.uint32)
    else:
        b = z.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        return tl.where(b >= 0x80000000, 0xFFFFFFFF - b, b + 0x80000000).to(tl.uint32)


@triton.jit
def boundary(sums, top, row, level: tl.constexpr, chunks, top_p, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """After `level` passes: the prefix of the bucket in which the nucleus ends, the mass above it, all mass, and the largest logit. sums: [rows, LEVELS, chunks, 256]"""
    chunk, bucket = tl.arange(0, CHUNKS), tl.arange(0, 256)
    tops = tl.load(top + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    best = tl.max(tops, 0)
    factor = tl.where(chunk < chunks, tl.exp(tops - best), 0.0)
    prefix, above, all = tl.zeros((), tl.uint32), 0.0, 0.0
    for i in tl.static_range(level):
        at = ((row * LEVELS + i) * chunks + chunk[:, None]) * 256 + bucket[None, :]
        mass = tl.sum(tl.load(sums + at, mask=chunk[:, None] < chunks, other=0.0) * factor[:, None], 0)
        if i == 0:
            all = tl.sum(mass, 0)
        higher = above + tl.cumsum(mass, 0, reverse=True) - mass
        # the lowest bucket above which less than top_p lies
        found = tl.min(tl.where((higher < top_p * all) & (mass > 0), bucket, 255), 0)
        above = tl.sum(tl.where(bucket == found, higher, 0.0), 0)
        prefix = prefix * 256 + found.to(tl.uint32)
    return prefix, above, all, best


@triton.jit
def mass_kernel(logits, sums, top, vocab, chunks, heat, top_p, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
                PART: tl.constexpr):
    """The mass of each value of the next 8 bits, among the logits that share the bits before. As a product of two one-hot matrices of 16 columns."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    prefix, _, _, _ = boundary(sums, top, row, LEVEL, chunks, top_p, CHUNKS, LEVELS)
    best = -float("inf")
    if LEVEL:
        best = tl.load(top + row * chunks + chunk)
    else:
        for start in range(0, BLOCK, PART):
            at = chunk * BLOCK + start + tl.arange(0, PART)
            best = tl.maximum(best, tl.max(tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat, 0))
        tl.store(top + row * chunks + chunk, best)
    found, sixteen = tl.zeros((16, 16), tl.float32), tl.arange(0, 16).to(tl.uint32)
    for start in range(0, BLOCK, PART):
        at = chunk * BLOCK + start + tl.arange(0, PART)
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf"))
        key = order(z, 8 * LEVELS) >> (8 * (LEVELS - 1 - LEVEL))
        inside = at < vocab
        if LEVEL:
            inside = inside & ((key >> 8) == prefix)
        mass = tl.where(inside, tl.exp(z.to(tl.float32) / heat - best), 0.0)
        high = tl.where(((key >> 4) & 15)[None, :] == sixteen[:, None], 1.0, 0.0)
        low = tl.where((key & 15)[:, None] == sixteen[None, :], mass[:, None], 0.0)
        found = tl.dot(high, low, found, input_precision="tf32x3")
    place = sums + ((row * LEVELS + LEVEL) * chunks + chunk) * 256
    tl.store(place + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], found)


@triton.jit
def race_kernel(logits, sums, top, seed, winner, score, kept, vocab, chunks, heat, top_p, NUCLEUS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The largest p / Exp(1) of a chunk's tokens in the nucleus."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit, _, _, best = boundary(sums, top, row, LEVELS, chunks, top_p, CHUNKS, LEVELS)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf"))
    u = tl.maximum(tl.rand(tl.load(seed), (row * vocab + at).to(tl.uint32)), 1e-10)
    s = tl.where((at < vocab) & (order(z, 8 * LEVELS) >= limit), tl.exp(z.to(tl.float32) / heat - best) / -tl.log(u), -1.0)
    if NUCLEUS:
        tl.store(kept + row * vocab + at, s >= 0, mask=at < vocab)
    tl.store(score + row * chunks + chunk, tl.max(s, 0))
    tl.store(winner + row * chunks + chunk, (chunk * BLOCK + tl.argmax(s, 0)).to(tl.int64))


def draw(logits, seed, temperature, top_p, block=8192, nucleus=False):
    """A token of every row by top-p: two passes for bf16 (four for f32, 8 bits each), and the race. Tokens that tie with the last are all kept. -> [rows], or with
    `nucleus` which tokens were in it"""
    rows, vocab = logits.shape
    block = min(block, max(32, triton.next_power_of_2(vocab)))
    chunks, levels = triton.cdiv(vocab, block), logits.element_size()
    sums, top = logits.new_empty(rows, levels, chunks, 256, dtype=torch.float32), logits.new_empty(rows, chunks, dtype=torch.float32)
    winner, score = logits.new_empty(rows, chunks, dtype=torch.int64), torch.empty_like(top)
    kept = torch.empty_like(logits, dtype=torch.bool) if nucleus else None
    sizes = dict(LEVELS=levels, BLOCK=block, CHUNKS=triton.next_power_of_2(chunks), num_warps=8)
    for level in range(levels):
        mass_kernel[(rows, chunks)](logits, sums, top, vocab, chunks, temperature, top_p, LEVEL=level, PART=min(PART, block), **sizes)
    race_kernel[(rows, chunks)](logits, sums, top, seed, winner, score, kept, vocab, chunks, temperature, top_p, NUCLEUS=nucleus, **sizes)
    return kept if nucleus else winner.gather(1, score.argmax(1, keepdim=True)).squeeze(1)


class Layers:
    """One token of every row through all layers. Tiles are timed at the shapes of the first layer."""
    def __init__(self, c, layers, cache, cos, sin, at, head, last_norm):
        self.c, self.layers, self.cache, self.cos, self.sin, self.at, self.head, self.last_norm = c, layers, cache, cos, sin, at, head, last_norm
        rows, (attn_norm, mlp_norm, _, _, qkv, o, wide, down) = len(cache[0][0]), layers[0]
        make = lambda k: torch.randn(rows, k, device=S.device).to(S.low)
        def best(what, w, **normed):
            k = w.shape[1]
            many = [(bn, bk, warps, stages) for bn, bk, warps, stages in ((16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (32, 32, 4, 2)) if k % bk == 0][:4]
            x, normed = make(k), dict(normed, delta=make(k)) if normed else {}
            name = fastest(what, {" ".join(("own", *map(str, t))): functools.partial(product, x, w, t, **normed) for t in many}, calls=20)
            return tuple(map(int, name.split()[1:]))
        normed = dict(norm=attn_norm, eps=c.norm_eps)
        self.tiles = [best("q, k, v", qkv, **normed), best("o", o), best("gate and up", wide, gated=True, **normed), best("down", down), best("head", head, **normed)]
        x = make(len(qkv))
        name = fastest("attention of a token", {f"own {b} {w}": functools.partial(self.attend, x, 0, (b, w)) for b in (16, 32, 64) for w in (4, 8)}, calls=20)
        self.tile = tuple(map(int, name.split()[1:]))

    def attend(self, qkv, i, tile):
        return attention(qkv, self.layers[i][2:4], self.cos, self.sin, *self.cache[i], self.at, self.c, tile)

    def __call__(self, x):
        """x: [rows, dim] -> the logits"""
        c, tiles, delta = self.c, self.tiles, torch.zeros_like(x)
        for i, (attn_norm, mlp_norm, _, _, qkv, o, wide, down) in enumerate(self.layers):
            x, y = product(x, qkv, tiles[0], delta, attn_norm, c.norm_eps)
            delta = product(self.attend(y, i, self.tile), o, tiles[1])
            x, y = product(x, wide, tiles[2], delta, mlp_norm, c.norm_eps, gated=True)
            delta = product(y, down, tiles[3])
        return self.logits(x, delta)

    def logits(self, x, delta):
        return product(x, self.head, self.tiles[4], delta, self.last_norm, self.c.norm_eps)[1]
