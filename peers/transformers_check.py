#!/usr/bin/env python3
"""Checks kiln's model folders and adapters against the packages whose layout they are in.

    python3 peers/transformers_check.py [--kiln target/debug/kiln] [--keep FOLDER]

Needs torch (CPU), transformers and peft from PyPI. Writes small random models with transformers and adapters with peft, and compares logits to 1e-4:
every folder read by both; adapters of peft's read by kiln; adapters that kiln trained read by peft; both merged by kiln and read by transformers.
"""
import argparse, os, subprocess, sys, tempfile
from pathlib import Path
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4
PROMPTS = [[5, 1, 99, 250, 7, 7, 31, 12, 90, 3, 2], [17], [200, 100, 50, 25]]
SIZES = dict(vocab_size=259, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, initializer_range=0.3)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
# name: class, config, type on disk, largest file
MODELS = {
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True), torch.float32, "1GB"),
    "qwen3-untied-bf16-sharded": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=20, tie_word_embeddings=False), torch.bfloat16, "40KB"),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3), torch.float32, "1GB"),
    "llama-linear-tied-f16-sharded": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=10, tie_word_embeddings=True,
                                      rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)), torch.float16, "60KB"),
    "llama-many-heads": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 4}), torch.bfloat16, "1GB"),
}
failures = []


def check(what, ok, note=""):
    print(("ok    " if ok else "FAIL  ") + what, note)
    if not ok:
        failures.append(what)


def kiln(*args, fails=False):
    p = subprocess.run([KILN, *map(str, args)], capture_output=True, text=True)
    if (p.returncode != 0) != fails:
        sys.exit(f"kiln {' '.join(map(str, args))}: exit {p.returncode}\n{p.stdout}{p.stderr}")
    return p.stdout + p.stderr


def kiln_logits(folder, adapter=None):
    """One tensor [tokens, vocab] a prompt, all prompts in one padded batch."""
    out = Path(folder).with_suffix(".logits")
    ids = [x for p in PROMPTS for x in ("--ids", " ".join(map(str, p)))]
    kiln("check", "model", folder, *ids, "--write", out, "--device", "cpu", *(("--adapter", adapter) if adapter else ()))
    all = load_file(out)
    return [all[str(i)] for i in range(len(PROMPTS))]


@torch.no_grad()
def torch_logits(model):
    model.eval()
    return [model(torch.tensor([p])).logits[0].float() for p in PROMPTS]


@torch.no_grad()
def padded_logits(model):
    """The same in a batch, padded in front and masked."""
    time = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (time - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (time - len(p)) + [1] * len(p) for p in PROMPTS])
    position = (mask.cumsum(1) - 1).clamp_min(0)
    all = model(ids, attention_mask=mask, position_ids=position).logits
    return [all[i, time - len(p):] for i, p in enumerate(PROMPTS)]


def compare(what, ours, theirs):
    error = max((a - b).abs().max().nan_to_num(nan=float("inf")).item() for a, b in zip(ours, theirs))
    size = max(b.abs().max().item() for b in theirs)
    check(what, error <= TOLERANCE, f"largest difference {error:.1e} of logits up to {size:.1f}")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapters(model, seed, **settings):
    """peft's adapter, away from the zeros it begins with."""
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    g = torch.Generator().manual_seed(seed)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data = 0.2 * torch.randn(p.shape, generator=g)
    return adapted


def main():
    global KILN
    a = argparse.ArgumentParser()
    a.add_argument("--kiln", default="target/debug/kiln")
    a.add_argument("--keep")
    a = a.parse_args()
    KILN = os.path.abspath(a.kiln)
    root = Path(a.keep or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    logging.disable_progress_bar()

    for name, (cls, config, dtype, shard) in MODELS.items():
        model = cls(config)
        for n, p in model.named_parameters():
            if "norm" in n:
                p.data = 1 + 0.2 * torch.randn_like(p)
        folder = root / name
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        check(f"{name} has {'several files' if 'sharded' in name else 'one file'}", (len(files) > 1) == ("sharded" in name), str(len(files)))
        base = load(folder)
        ours = kiln_logits(folder)
        compare(f"{name}: logits", ours, torch_logits(base))
        compare(f"{name}: logits, padded there too", ours, padded_logits(base))

        # peft's adapter, read here
        peft_dir = root / (name + "-peft")
        settings = dict(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj", "gate_proj"], lora_dropout=0.1)
        adapted = adapters(load(folder), 1, **settings)
        adapted.save_pretrained(peft_dir)
        compare(f"{name}: logits with peft's adapter", kiln_logits(folder, peft_dir), torch_logits(adapted))

        # trained here from scratch, on all targets, read by peft
        train = ["train", "polychromic", "--set", f"model.base={folder}", "--set", "seq=48", "--set", "batch=2", "--set", "eval_batches=1", "--device", "cpu"]
        run, out, whole = root / (name + "-run"), root / (name + "-kiln"), root / (name + "-merged")
        kiln(*train, "--set", "rank=3", "--set", "alpha=7.5", "--set", "learning_rate=0.05", "--steps", 4, "--out", run)
        kiln("export", run, "--out", out)
        kiln("export", run, "--out", whole, "--merge")
        trained = PeftModel.from_pretrained(load(folder), out)
        compare(f"{name}: logits with an adapter trained here", kiln_logits(folder, out), torch_logits(trained))
        moved = max((x - y).abs().max().item() for x, y in zip(torch_logits(trained), ours))
        check(f"{name}: and it learned something", moved > 0.01, f"{moved:.2f}")
        compare(f"{name}: merged here, read by both", kiln_logits(whole), torch_logits(load(whole)))
        if dtype == torch.float32:
            compare(f"{name}: merged here and by peft", torch_logits(load(whole)), torch_logits(trained.merge_and_unload()))

        # peft's adapter as a start: after a step that hardly moves it, it goes out as it came in
        again, back = root / (name + "-again"), root / (name + "-back")
        kiln(*train, "--set", "rank=4", "--set", "alpha=12", "--set", 'targets=["q", "v", "down", "gate"]', "--set", "learning_rate=1e-30",
             "--steps", 1, "--init-from", peft_dir, "--out", again)
        kiln("export", again, "--out", back)
        was, now = load_file(peft_dir / "adapter_model.safetensors"), load_file(back / "adapter_model.safetensors")
        check(f"{name}: an adapter goes through unchanged", was.keys() == now.keys() and all(torch.equal(was[k].float(), now[k]) for k in was))

    # A base that was drawn here, written with the adapters merged: config.json is kiln's own.
    for kind, more in (("qwen3", ["--set", "tied=false"]), ("llama", ["--set", "qk_norm=false"])):
        run, whole = root / f"drawn-{kind}-run", root / f"drawn-{kind}"
        kiln("train", "polychromic", "--set", "pretrain=0", "--set", "rope_theta=700.0", "--set", "layers=2", "--set", "seq=48", "--set", "batch=2", "--set", "eval_batches=1",
             "--set", "learning_rate=0.3", *more, "--steps", 3, "--out", run, "--device", "cpu")
        kiln("export", run, "--out", whole, "--merge")
        compare(f"{kind} drawn here, merged, read by both", kiln_logits(whole), torch_logits(load(whole)))

    # What is not plain LoRA is refused by its name.
    name = "qwen3-tied"
    for setting in (dict(use_rslora=True), dict(use_dora=True), dict(rank_pattern={"q_proj": 2}), dict(layers_to_transform=[0]),
                    dict(bias="all"), dict(modules_to_save=["lm_head"]), dict(alpha_pattern={"q_proj": 2})):
        key = next(iter(setting))
        folder = root / ("refused-" + key)
        get_peft_model(load(root / name), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **setting)).save_pretrained(folder)
        said = kiln("check", "model", root / name, "--adapter", folder, fails=True)
        check(f"{key} is refused by name", key in said, said.strip())
    print("everything passed" if not failures else f"{len(failures)} failed: {failures}")
    sys.exit(bool(failures))


main()
