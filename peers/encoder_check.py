#!/usr/bin/env python3
"""Checks kiln's encoders against the package whose layout they are in.

    python3 peers/encoder_check.py [--kiln target/debug/kiln] [--keep FOLDER]

Needs torch (CPU), transformers and sentence-transformers from PyPI. Writes small random encoders as the package does, and as older versions of it did
(as all-MiniLM-L6-v2 is published), and compares embeddings to 1e-5; what is not BERT with mean pooling must be refused.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st
from transformers import BertConfig, BertModel, BertTokenizerFast
from transformers.utils import logging

TOLERANCE = 1e-5
WORDS = "the a cat dog house sat on ran to and of is small red it one two three".split()
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *("##" + c for c in "abcdefghijklmnopqrstuvwxyz"), *".,!?'", *WORDS]
TEXTS = ["The cat sat on a small house.", "", "it is", "Zebras? NO!", "caf\u00e9 \u4e2d\u6587 it's", "the dog ran to the house and the cat " * 6, " \n the\tcat "]
SIZES = dict(vocab_size=len(VOCAB), hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, max_position_embeddings=40, initializer_range=0.3)
# name: config, pooling, normalised, the longest text
MODELS = {
    "normalised": (dict(), "mean", True, 24),
    "plain": (dict(num_attention_heads=6, intermediate_size=80), "mean", False, 40),
    "tanh": (dict(hidden_act="gelu_new", layer_norm_eps=1e-5), "mean", True, 16),
    "relu": (dict(hidden_act="relu", type_vocab_size=1, num_hidden_layers=1), "mean", False, 10),
}
failures = []


def check(what, ok, note=""):
    print(("ok    " if ok else "FAIL  ") + what, note)
    if not ok:
        failures.append(what)


def kiln(*args):
    return subprocess.run([KILN, "check", "encoder", *map(str, args)], capture_output=True, text=True)


def write(folder, sizes, pooling, normalised, longest, kind=BertConfig, model=BertModel):
    raw = Path(str(folder) + "-raw")
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "vocab.txt").write_text("\n".join(VOCAB))
    BertTokenizerFast(str(raw / "vocab.txt")).save_pretrained(raw)
    bert = model(kind(**{**SIZES, **sizes}))
    for name, p in bert.named_parameters():
        if "LayerNorm" in name:
            p.data = (1 if name.endswith("weight") else 0) + 0.2 * torch.randn_like(p)
    bert.save_pretrained(raw)
    parts = [st.Transformer(str(raw), max_seq_length=longest), st.Pooling(SIZES["hidden_size"], pooling)] + ([st.Normalize()] if normalised else [])
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))


def older(folder, normalised, longest):
    """The same folder in the words of earlier versions."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")] + ([("Normalize", "2_Normalize")] if normalised else [])
    (folder / "modules.json").write_text(json.dumps(
        [dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}") for i, (kind, path) in enumerate(kinds)]))
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    (folder / "1_Pooling/config.json").write_text(json.dumps(
        dict(word_embedding_dimension=SIZES["hidden_size"], **{f"pooling_mode_{m}": m == "mean_tokens" for m in modes})))
    (folder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=longest, do_lower_case=False)))


def compare(what, folder, out):
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True).float()
    p = kiln(folder, *(x for t in TEXTS for x in (f"--text={t}",)), "--write", out, "--device", "cpu")
    if p.returncode != 0:
        return check(what, False, p.stderr.strip())
    ours = load_file(out)["embeddings"]
    error, apart = (ours - theirs).abs().max().item(), (theirs[0] - theirs[2]).abs().max().item()
    check(what, error <= TOLERANCE and apart > 0.01, f"largest difference {error:.1e}; texts differ by {apart:.2f}")


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
    logging.set_verbosity_error()

    for name, (sizes, pooling, normalised, longest) in MODELS.items():
        folder = root / name
        write(folder, sizes, pooling, normalised, longest)
        compare(f"{name}: as it is written now", folder, root / "out")
        old = root / (name + "-older")
        shutil.copytree(folder, old, dirs_exist_ok=True)
        older(old, normalised, longest)
        compare(f"{name}: as it was written", old, root / "out")

    # Weights in a narrower type: both compute in f32.
    for dtype in (torch.bfloat16, torch.float16):
        folder = root / f"normalised-{str(dtype).split('.')[-1]}"
        shutil.copytree(root / "normalised-older", folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        save_file({k: v.to(dtype) for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        wide = root / (folder.name + "-wide")
        shutil.copytree(folder, wide, dirs_exist_ok=True)
        save_file({k: v.to(dtype).float() for k, v in weights.items()}, wide / "model.safetensors", metadata={"format": "pt"})
        p = kiln(folder, *(f"--text={t}" for t in TEXTS), "--write", root / "narrow", "--device", "cpu")
        theirs = SentenceTransformer(str(wide), device="cpu").encode(TEXTS, convert_to_tensor=True)
        error = (load_file(root / "narrow")["embeddings"] - theirs).abs().max().item() if p.returncode == 0 else float("inf")
        check(f"{folder.name}: weights of that type", error <= TOLERANCE, f"largest difference {error:.1e} {p.stderr.strip()}")

    for pooling in ("cls", "max", "lasttoken"):
        folder = root / ("refused-" + pooling)
        write(folder, {}, pooling, False, 16)
        p = kiln(folder)
        check(f"pooling by {pooling} is refused by name", p.returncode == 1 and pooling in p.stderr, p.stderr.strip())
    from transformers import MPNetConfig, MPNetModel
    folder = root / "refused-mpnet"
    write(folder, {}, "mean", False, 16, MPNetConfig, MPNetModel)
    p = kiln(folder)
    check("MPNet is refused by name", p.returncode == 1 and "mpnet" in p.stderr, p.stderr.strip())
    print("everything passed" if not failures else f"{len(failures)} failed: {failures}")
    sys.exit(bool(failures))


main()
