#!/usr/bin/env python3
"""What people have today: transformers' own decoders, and torchao's FP8, under torch.compile.

    python3 peers/today.py [gpt2-124m qwen2.5-0.5b qwen2.5-1.5b] [--modes transformers,transformers-autotune,torchao,torchao-autotune] [--json out.json]

transformers: its class with SDPA and its loss. torchao: a plain module whose products in the layers are torchao's float8, tensor-wise (`pip install torchao`; the head stays
bf16). A step is forward, backward, clipping to norm 1, fused AdamW; f32 masters, bf16 autocast, no dropout; random weights, random data. -autotune: compiled with
max-autotune-no-cudagraphs, which takes minutes. Sizes are those of tuned/plain.py.
"""
import time
STARTED = time.time()
import os, sys  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "tuned")]
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import plain, serve  # noqa: E402
from common import S, option, rope_table  # noqa: E402

RECIPES = {name: plain.SIZES[name.removesuffix("-fp8")] for name in ("gpt2-124m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-1.5b-fp8")}


def transformers_loss(s):
    """-> the model, and a function of ids that gives its loss"""
    import transformers
    if s.kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=s.vocab, n_positions=s.seq, n_embd=s.dim, n_layer=s.layers, n_head=s.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        make = transformers.GPT2LMHeadModel
    else:
        config = transformers.Qwen2Config(vocab_size=s.vocab, hidden_size=s.dim, intermediate_size=s.hidden, num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=s.kv,
                                          tie_word_embeddings=s.tied)
        make = transformers.Qwen2ForCausalLM
    config._attn_implementation = "sdpa"
    config.use_cache = False
    model = make(config).to(S.device).train()
    return model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


class Layer(nn.Module):
    """As plain.py's, of modules."""
    def __init__(self, s):
        super().__init__()
        self.s, gpt2 = s, s.kind == "gpt2"
        norm = nn.LayerNorm if gpt2 else nn.RMSNorm
        self.attn_norm, self.mlp_norm = norm(s.dim, eps=s.eps), norm(s.dim, eps=s.eps)
        self.qkv = nn.Linear(s.dim, (s.heads + 2 * s.kv) * s.head, bias=s.qkv_bias)
        self.o = nn.Linear(s.heads * s.head, s.dim, bias=gpt2)
        self.up = nn.Linear(s.dim, s.hidden if gpt2 else 2 * s.hidden, bias=gpt2)
        self.down = nn.Linear(s.hidden, s.dim, bias=gpt2)

    def forward(self, x, cos, sin):
        a = plain.attend(*plain.heads(self.qkv(self.attn_norm(x)), None, None, cos, sin, self.s), self.s)
        x = x + self.o(a)
        return x + self.down(plain.activation(self.up(self.mlp_norm(x)), self.s))


class Decoder(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, self.embedding = s, nn.Embedding(s.vocab, s.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(torch.zeros(s.seq, s.dim)) if s.kind == "gpt2" else None
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = (nn.LayerNorm if s.kind == "gpt2" else nn.RMSNorm)(s.dim, eps=s.eps)

    def forward(self, ids, cos, sin):
        x = self.embedding(ids).bfloat16()
        x = x if self.position is None else x + self.position.bfloat16()
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def torchao_loss(s):
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        sys.exit("torchao is not installed: its row is left out")
    model = Decoder(s).to(S.device)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    cos, sin = (y.unsqueeze(1) for y in rope_table(s.seq, s.head, s.theta))
    return model, lambda ids: model(ids, cos, sin)


def build(recipe, mode):
    what, _, how = mode.partition("-")
    S.device = option("DEVICE", "cuda")
    torch.set_float32_matmul_precision("high")
    s = RECIPES[recipe] if option("TINY", "0") != "1" else plain.tiny(RECIPES[recipe])
    model, loss_of = dict(transformers=transformers_loss, torchao=torchao_loss)[what](s)
    ids = torch.randint(0, s.vocab, (s.batch, s.seq), device=S.device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(loss_of, mode="max-autotune-no-cudagraphs" if how == "autotune" else None)

    def step():
        with torch.autocast(S.device, torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()
    return step, s.batch * s.seq, "tokens", 1, None


if __name__ == "__main__":
    serve.run(os.path.abspath(__file__), RECIPES, "transformers", build, STARTED)
