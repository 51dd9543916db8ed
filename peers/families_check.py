#!/usr/bin/env python3
"""A table of decoder families: what kiln makes of a small random folder, against the package transformers.

    python3 peers/families_check.py --kiln target/release/kiln [--family qwen2 ..]

For each family, transformers writes a folder with random weights and a byte-level BPE tokenizer, in which weights are split into several files. Then:

    logits        of three prompts, kiln's and transformers' (largest difference, as a part of the largest logit)
    tokens        kiln's logits of texts, by its own tokens, against transformers' by AutoTokenizer's
    chat          `kiln data preview` of a conversation against apply_chat_template; - where the family's folder has no template
    fine-tuned    three steps of all weights on prepared text, exported: kiln's logits of the exported folder and transformers'
    in shards     the same exported with --shard-size 20KB: transformers loads it to the same logits, bit for bit
    tokenizer     AutoTokenizer of the exported folder has the base's ids
    resumed       the run stopped after two steps and resumed has the same bytes
    moved         the exported model has other logits than the base (so that the columns before could fail)

Needs torch and transformers; exit status 1 where a cell is off.
"""
import argparse, json, shutil, subprocess, sys, tempfile
from pathlib import Path
import torch
from decoder_check import IDS, fail, load, numbers, read_safetensors

SMALL = dict(vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "gpt2": ("gpt2", dict(vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, bos_token_id=0, eos_token_id=0), False),
    "llama": ("llama", dict(SMALL, tie_word_embeddings=False), True),
    "llama3": ("llama", dict(SMALL, tie_word_embeddings=True, rope_theta=500000.0, head_dim=16, rope_scaling=LLAMA3), True),
    "qwen2": ("qwen2", dict(SMALL, tie_word_embeddings=True, rope_theta=1e6), True),
    "qwen3": ("qwen3", dict(SMALL, tie_word_embeddings=True, rope_theta=1e6, head_dim=16), True),
    "mistral": ("mistral", dict(SMALL, tie_word_embeddings=False, sliding_window=7, head_dim=16), True),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["The mill turns when the water is high.", "Zwölf  Boxer\n\tjagen 3.14 <|im_start|>x", "don't; 1234567 \u4f60\u597d \U0001f600"]
TEMPLATE = ("{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}")
CHAT = [dict(role="system", content="Be brief."), dict(role="user", content=" Name a colour. "), dict(role="assistant", content="Blue."),
        dict(role="user", content="Another."), dict(role="assistant", content="Red; or green.")]
TOLERANCE = 1e-4


def text():
    """Words of our own to learn merges and weights from."""
    words = "the a water mill turns high low when if and not stone river wheel slow fast grain bread".split()
    return "\n".join(" ".join(words[(i * i + 3 * j * j + i * j) % len(words)] for j in range(12)) + "." for i in range(400))


def tokenizer(folder, chat):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([text()], trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:])
    if chat:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


class Kiln:
    def __init__(self, binary, work):
        self.binary, self.work = str(Path(binary).resolve()), work

    def run(self, *args):
        done = subprocess.run([self.binary, *map(str, args)], capture_output=True, text=True, cwd=self.work)
        if done.returncode != 0:
            fail(f"kiln {' '.join(map(str, args))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def logits(self, folder, flag, prompts):
        out = self.work / "logits.safetensors"
        out.unlink(missing_ok=True)
        self.run("check", "model", folder, *[x for p in prompts for x in (flag, p)], "--write", out, "--device", "cpu")
        return [y for _, y in read_safetensors(out, prompts)]


@torch.no_grad()
def theirs(model, ids):
    return [model(torch.tensor([i])).logits[0].float() for i in ids]


def difference(ours, others):
    """The largest difference, as a part of the largest logit; infinite where the shapes differ."""
    if any(a.shape != b.shape for a, b in zip(ours, others)):
        return float("inf")
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item() for a, b in zip(ours, others))


def chat_is_the_same(kiln, folder, work):
    from transformers import AutoTokenizer
    data = work / "chat.jsonl"
    data.write_text(json.dumps(dict(messages=CHAT)) + "\n")
    said = kiln.run("data", "preview", "--data", data, "--base", folder)
    t = AutoTokenizer.from_pretrained(folder)
    whole = t.apply_chat_template(CHAT, tokenize=False)
    ids = t(whole, add_special_tokens=False)["input_ids"]
    shown = said.replace("\u27e6", "").replace("\u27e7", "")
    return whole in shown and f"{len(ids)} tokens" in said


def row(kiln, name, work):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    model_type, fields, chat = FAMILIES[name]
    torch.manual_seed(1)
    base = work / f"{name}-base"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(base, max_shard_size="60KB")
    tokenizer(base, chat)
    ids = [numbers(i) for i in IDS]
    there = load(base, "float32", "cpu")
    before = theirs(there, ids)
    cells = {"logits": difference(kiln.logits(base, "--ids", [" ".join(map(str, i)) for i in ids]), before)}
    t = AutoTokenizer.from_pretrained(base)
    escaped = [x.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t") for x in TEXTS]
    encoded = [t(x, add_special_tokens=False)["input_ids"] for x in TEXTS]
    cells["tokens"] = difference(kiln.logits(base, "--prompt", escaped), theirs(there, encoded))
    cells["chat"] = chat_is_the_same(kiln, base, work) if chat else None

    (work / "text.txt").write_text(text())
    data = work / f"{name}-data"
    kiln.run("data", "prepare", work / "text.txt", "--tokenizer", base / "tokenizer.json", "--out", data)
    train = ["--set", f"model.base={base}", "--data", data, "--set", "seq=32", "--set", "batch=2", "--set", "learning_rate=0.01", "--set", "horizon=3", "--device", "cpu"]
    kiln.run("train", "decoder", *train, "--steps", 3, "--out", work / f"{name}-run")
    kiln.run("train", "decoder", *train, "--steps", 2, "--out", work / f"{name}-parts")
    kiln.run("train", "--out", work / f"{name}-parts", "--resume", "--steps", 3, "--device", "cpu")
    kiln.run("export", work / f"{name}-run", "--out", work / f"{name}-one")
    kiln.run("export", work / f"{name}-run", "--out", work / f"{name}-many", "--shard-size", "20KB")
    one, many = work / f"{name}-one", work / f"{name}-many"
    after = theirs(load(one, "float32", "cpu"), ids)
    cells["fine-tuned"] = difference(kiln.logits(one, "--ids", [" ".join(map(str, i)) for i in ids]), after)
    files = sorted(p.name for p in many.glob("*.safetensors"))
    split = theirs(load(many, "float32", "cpu"), ids)
    cells["in shards"] = len(files) > 2 and all(torch.equal(a, b) for a, b in zip(after, split)) and len(list(one.glob("*.safetensors"))) == 1
    exported = AutoTokenizer.from_pretrained(one)
    kept = exported.chat_template == t.chat_template and exported.eos_token_id == t.eos_token_id and (one / "generation_config.json").exists()
    cells["tokenizer"] = kept and [exported(x, add_special_tokens=False)["input_ids"] for x in TEXTS] == encoded
    states = [[(work / f"{name}-{run}/checkpoints/step-00000003" / f).read_bytes() for f in ("model.safetensors", "state.safetensors")] for run in ("run", "parts")]
    cells["resumed"] = states[0] == states[1]
    cells["moved"] = difference(before, after) > 100 * TOLERANCE
    return cells


def shown(cell):
    return "-" if cell is None else ("yes" if cell else "NO") if isinstance(cell, bool) else f"{cell:.1e}"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kiln", required=True)
    p.add_argument("--family", action="append", choices=FAMILIES)
    p.add_argument("--keep", type=Path, help="a folder to work in, which stays")
    a = p.parse_args()
    work = Path(tempfile.mkdtemp()) if a.keep is None else a.keep.resolve()
    work.mkdir(parents=True, exist_ok=True)
    off, first = [], True
    for name in a.family or FAMILIES:
        cells = row(Kiln(a.kiln, work), name, work)
        if first:
            print("| family | " + " | ".join(cells) + " |\n|---" * 1 + "|---" * len(cells) + "|", flush=True)
            first = False
        print(f"| {name} | " + " | ".join(map(shown, cells.values())) + " |", flush=True)
        off += [f"{name}: {c}" for c, v in cells.items() if (v is False if isinstance(v, bool) or v is None else not v <= TOLERANCE)]
    if a.keep is None:
        shutil.rmtree(work)
    sys.exit("off: " + ", ".join(off) if off else 0)


if __name__ == "__main__":
    main()
