"""The expert's decoder against golden files that transformers computed: losses of all steps, gradients of the first, parameters after the last. CPU, f32."""
import json
import torch
from common import S
from plain import Size, Training, shapes


def size_of(c, batch, time):
    """The model of a config.json; families and settings that the decoder here does not have are refused."""
    kind = c["model_type"]
    if kind == "gpt2":
        return Size(c["vocab_size"], c["n_embd"], c["n_layer"], c["n_head"], c["n_head"], c["n_embd"] // c["n_head"], c.get("n_inner") or 4 * c["n_embd"], batch,
                    c["n_positions"], kind="gpt2", qkv_bias=True, tied=c["tie_word_embeddings"], eps=c["layer_norm_epsilon"])
    rope = c.get("rope_parameters") or {}
    if kind not in ("llama", "qwen2", "qwen3", "mistral") or rope.get("rope_type", "default") != "default":
        raise NotImplementedError(f"{kind} with RoPE {rope.get('rope_type')}")
    if c.get("sliding_window") and (kind == "mistral" or c.get("use_sliding_window")) and c["sliding_window"] < time:
        raise NotImplementedError(f"a window of {c['sliding_window']}")
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return Size(c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"], head, c["intermediate_size"], batch, time,
                qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3", tied=c["tie_word_embeddings"], theta=rope.get("rope_theta", c.get("rope_theta")), eps=c["rms_norm_eps"])


def ours(s, theirs):
    """Tensors by transformers' names -> by ours: GPT-2's matrices turned, q, k, v and gate, up one behind another."""
    if s.kind == "gpt2":
        outer = {"embedding": ["transformer.wte.weight"], "position": ["transformer.wpe.weight"], "last_norm": ["transformer.ln_f.weight"], "last_bias_norm": ["transformer.ln_f.bias"]}
        inner, prefix = {"attn_norm": ["ln_1.weight"], "attn_bias_norm": ["ln_1.bias"], "mlp_norm": ["ln_2.weight"], "mlp_bias_norm": ["ln_2.bias"]}, "transformer.h."
        for name, part in (("qkv", "attn.c_attn"), ("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            inner[name], inner[name + "_bias"] = [part + ".weight"], [part + ".bias"]
    else:
        outer, prefix = {"embedding": ["model.embed_tokens.weight"], "last_norm": ["model.norm.weight"]}, "model.layers."
        inner = {"attn_norm": ["input_layernorm.weight"], "mlp_norm": ["post_attention_layernorm.weight"], "q_norm": ["self_attn.q_norm.weight"], "k_norm": ["self_attn.k_norm.weight"],
                 "qkv": [f"self_attn.{n}_proj.weight" for n in "qkv"], "qkv_bias": [f"self_attn.{n}_proj.bias" for n in "qkv"], "o": ["self_attn.o_proj.weight"],
                 "up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "down": ["mlp.down_proj.weight"]}
    outer["head"] = ["lm_head.weight"]
    def one(name):
        i, _, rest = name.rpartition(".")
        parts = [theirs[f"{prefix}{i}.{n}"] for n in inner[rest]] if i else [theirs[n] for n in outer[name]]
        turned = s.kind == "gpt2" and bool(i) and parts[0].dim() == 2
        return torch.cat([p.t() if turned else p for p in parts]).contiguous().clone()
    return {name: one(name) for name in shapes(s)}


def worst(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).item()


def check_file(path, set_option):
    from safetensors import safe_open
    with safe_open(path, "pt") as f:
        meta, all = f.metadata(), {k: f.get_tensor(k) for k in f.keys()}
    part = lambda key: {k.removeprefix(key + "/"): v for k, v in all.items() if k.startswith(key + "/")}
    o, ids = json.loads(meta["optimizer"]), all["input/ids"]
    s = size_of(json.loads(meta["config"]), *ids.shape)
    set_option("OPTIMIZER", o.pop("kind"))
    start = ours(s, part("param"))
    if s.kind == "gpt2":   # a step uses as many positions as the rows are long; the others have no gradient, and decay
        start["position"] = start["position"][:ids.shape[1]].clone()
    t = Training(s, start, ids, all["input/targets"], **o)
    wanted, errors, losses = ours(s, part("grad")), {}, []
    for step in range(int(meta["steps"])):
        losses.append(t.backward())
        if step == 0:
            grads = t.p.named(t.p.gradients())
            errors["grad"] = max(worst(g, wanted[n][:len(g)]) for n, g in grads.items())
        t.optimizer.step()
        if step == 0:
            errors["norm"] = worst(t.optimizer.norm, all["metric/grad_norm"][0])
    errors["loss"] = worst(torch.stack(losses), all["loss"])
    after = ours(s, part("after"))
    errors["after"] = max(worst(t.p.value(n), after[n][:len(t.p.value(n))]) for n in start)
    return errors


def check(files, set_option):
    """Prints a line for each file and each way of computing it; false when one differs or none could be checked."""
    S.device, S.low, S.mode = "cpu", torch.float32, "compile"
    ok, checked = True, 0
    for path in files:
        for options in ({}, {"LOSS": "whole", "BLOCKS": "whole"}, {"LOSS": "plain", "WEIGHTS": "cast"}):
            line = dict(check=path, **options)
            for name in ("LOSS", "BLOCKS", "WEIGHTS"):
                set_option(name, options.get(name))
            set_option("CHUNK", "16")
            try:
                errors = check_file(path, set_option)
                good = all(e == e and e < 1e-4 for e in errors.values())
                ok &= good
                line.update(ok=good, **{k: float(f"{e:.1e}") for k, e in errors.items()})
                checked += 1
            except (NotImplementedError, ValueError) as e:   # a family that is not here; Muon with WEIGHTS=cast
                line["left_out"] = str(e)
            print(json.dumps(line), flush=True)
    return ok and checked > 0
