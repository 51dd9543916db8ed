#!/usr/bin/env python3
"""Checks that a folder which kiln exported gives transformers the logits that kiln computed.

    python3 peers/decoder_check.py FOLDER LOGITS.json
    python3 peers/decoder_check.py FOLDER LOGITS.safetensors --ids '5 1 99' --ids '17'   # what `kiln check model FOLDER --ids .. --write` saved
    python3 peers/decoder_check.py FOLDER --kiln target/release/kiln [--ids ..]          # runs that command itself
    python3 peers/decoder_check.py --device cpu --tiny                                   # checks this script: good folders pass, damaged logits fail

LOGITS.json: a list of {"ids": [5, 1, 99], "logits": [[..], ..]}, one row of logits for each token. For each prompt: the largest difference, that difference as a part of the
largest logit, the relative difference of the whole tensor (norms), and how many tokens have another likeliest successor. Needs torch and transformers; exit status 1 where a prompt is off.
"""
import argparse, json, subprocess, sys, tempfile
from pathlib import Path
import torch

IDS = ["5 1 99 25 7 7 31 12 90 3 2", "17", "20 10 50 25 61 3 3 3 3 8 8 8 14 15 16 40 41 42 43 44"]


def fail(why):
    sys.exit("decoder_check: " + why)


def numbers(text):
    try:
        return [int(w) for w in text.replace(",", " ").split()]
    except ValueError:
        fail(f"--ids '{text}': not a list of numbers (for example --ids '5 1 99')")


def read_json(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        fail(f"{path}: {e}")
    rows = found.get("prompts") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and {"ids", "logits"} <= r.keys() for r in rows):
        fail(f'{path}: not a list of {{"ids": [..], "logits": [[..], ..]}}')
    return [(r["ids"], torch.tensor(r["logits"], dtype=torch.float32)) for r in rows]


def read_safetensors(path, ids):
    from safetensors.torch import load_file
    try:
        all = load_file(path)
    except Exception as e:
        fail(f"{path}: {e}")
    names = [str(i) for i in range(len(ids))]
    if sorted(all) != sorted(names):
        fail(f"{path} holds tensors {sorted(all)}; {len(ids)} --ids were given, which are {names} (give --ids as kiln had them)")
    return [(i, all[n].float()) for i, n in zip(ids, names)]


def run_kiln(binary, folder, ids, device):
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "logits.safetensors"
        command = [binary, "check", "model", str(folder), *[x for i in ids for x in ("--ids", " ".join(map(str, i)))], "--write", str(out), "--device", device]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as e:
            fail(f"{binary}: {e}")
        if done.returncode != 0:
            fail(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return read_safetensors(out, ids)


def load(folder, dtype, device):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)
    except Exception as e:
        fail(f"{folder}: transformers does not load it: {type(e).__name__}: {e}")
    strange = {k: sorted(map(str, v)) for k, v in info.items() if k in ("missing_keys", "unexpected_keys", "mismatched_keys") and v}
    if strange:
        fail(f"{folder}: its tensors are not the model's: {strange}")
    return model.eval().to(device)


@torch.no_grad()
def compare(model, prompts, tolerance, quiet=False):
    """How many prompts are off."""
    off = 0
    for i, (ids, ours) in enumerate(prompts):
        theirs = model(torch.tensor([ids], device=model.device)).logits[0].float().cpu()
        line = dict(prompt=i, tokens=len(ids))
        if ours.shape != theirs.shape:
            line.update(ok=False, error=f"logits are {list(ours.shape)}, transformers' {list(theirs.shape)}")
        else:
            largest, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
            relative = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
            line.update(ok=largest <= tolerance * max(1.0, size), largest_difference=largest, of_largest_logit=largest / max(size, 1e-30), relative=relative,
                        largest_logit=size, other_argmax=int((ours.argmax(-1) != theirs.argmax(-1)).sum()))
        off += not line["ok"]
        if not quiet:
            print(json.dumps(line), flush=True)
    return off


def self_test():
    """Small random folders of five families; their logits by another path (eager attention, one padded batch). Then what must fail."""
    from transformers import AutoConfig, AutoModelForCausalLM
    small = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)
    families = dict(gpt2=dict(vocab_size=131, n_embd=48, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, bos_token_id=1, eos_token_id=1), llama=small, qwen2=small,
                    qwen3=dict(small, head_dim=16, tie_word_embeddings=True), mistral=dict(small, sliding_window=7))
    ids, wrong = [numbers(i) for i in IDS], []
    def expect(what, good):
        print("ok   " if good else "FAIL ", what, flush=True)
        wrong.extend([] if good else [what])
    with tempfile.TemporaryDirectory() as work:
        for family, fields in families.items():
            torch.manual_seed(1)
            folder, file = Path(work) / family, Path(work) / (family + ".json")
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), attn_implementation="eager").eval()
            model.save_pretrained(folder, max_shard_size="60KB")
            time = max(map(len, ids))
            padded, mask = torch.tensor([i + [0] * (time - len(i)) for i in ids]), torch.tensor([[1] * len(i) + [0] * (time - len(i)) for i in ids])
            with torch.no_grad():
                logits = model(padded, attention_mask=mask).logits
            rows = [dict(ids=i, logits=y[:len(i)].tolist()) for i, y in zip(ids, logits)]
            file.write_text(json.dumps(rows))
            loaded = load(folder, "float32", "cpu")
            expect(f"{family}: the same logits pass", compare(loaded, read_json(file), 1e-4) == 0)
            rows[2]["logits"][3][7] += 0.01
            file.write_text(json.dumps(rows))
            expect(f"{family}: one logit of one prompt that is 0.01 off fails", compare(loaded, read_json(file), 1e-4, quiet=True) == 1)
            rows[0]["logits"].pop()
            rows[1]["logits"][0][0] = float("nan")
            file.write_text(json.dumps(rows))
            expect(f"{family}: a missing token and no number fail too", compare(loaded, read_json(file), 1e-4, quiet=True) == 3)
    sys.exit(f"{len(wrong)} failed" if wrong else 0)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", nargs="?", type=Path)
    p.add_argument("logits", nargs="?", type=Path)
    p.add_argument("--ids", action="append", default=[])
    p.add_argument("--kiln")
    p.add_argument("--tolerance", type=float, default=1e-4, help="of the largest difference, as a part of the largest logit where that is above 1")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="in which transformers computes")
    p.add_argument("--device", default="cpu")
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        self_test()
    if a.folder is None or (a.logits is None) == (a.kiln is None):
        p.error("give FOLDER and either LOGITS or --kiln")
    ids = [numbers(i) for i in a.ids]
    if a.kiln:
        prompts = run_kiln(a.kiln, a.folder, ids or [numbers(i) for i in IDS], a.device)
    elif a.logits.suffix == ".safetensors":
        prompts = read_safetensors(a.logits, ids)
    else:
        prompts = read_json(a.logits)
    off = compare(load(a.folder, a.dtype, a.device), prompts, a.tolerance)
    print(f"{len(prompts) - off} of {len(prompts)} prompts within {a.tolerance:g}")
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
