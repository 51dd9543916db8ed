#!/usr/bin/env python3
"""kiln and PyTorch on the same GPU, alternately, with the ratios.

    python3 peers/compare.py hydra hydra-4 [--modes compile,graphs,autotune] [--rounds 1] [--kiln target/release/kiln] [--json out.json]

PyTorch's side is peers/bench.py, its best mode counts; kiln's is `kiln bench`, everything on. Memory: PyTorch's peak allocation against all that
kiln holds on the device beyond the CUDA context.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
# recipe in bench.py -> arguments of `kiln bench`
OURS = {
    "hydra": ["hydra", "--preset", "100m", "--set", "batch=64"],
    "hydra-4": ["hydra", "--preset", "100m", "--set", "batch=4"],
    "vision_bdh": ["vision_bdh", "--preset", "cifar10"],
    "hrm": ["hrm", "--preset", "sudoku-moe"],
    "lior": ["lior", "--preset", "production", "--set", "batch=8"],
    "lior-1": ["lior", "--preset", "production", "--set", "batch=1"],
    "lior-64": ["lior", "--preset", "production", "--set", "batch=64"],
    # As the peer: no dropout; every step of polychromic-step writes replies to prompts of 64 tokens.
    "polychromic": ["polychromic", "--preset", "qwen3-0.6b", "--set", "model.dropout=0", "--set", "objective.weight=0"],
    "polychromic-step": ["polychromic", "--preset", "qwen3-0.6b", "--set", "model.dropout=0", "--set", "every=1", "--set", "prompt_tokens=64"],
    "generate": ["generate", "--preset", "qwen3-0.6b", "--set", "prompt_tokens=64"],
    "diversity": ["ops", "--only", "diversity"],
}


def kiln(binary, name, extra):
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        done = subprocess.run([binary, "bench", *OURS[name], "--device", "cuda", "--pass", "bf16=auto", "--warmup", "5", "--repeat", "20", "--json", f.name, *extra], capture_output=True, text=True)
        if done.returncode != 0:
            return dict(error=done.stderr.strip()[-300:])
        if name == "diversity":
            return mean_distance(done.stdout)
        found = json.load(open(f.name))
        if name == "generate":   # the base alone, as the peer's
            return next(g for g in found["generate"] if not g["adapters"])
        return dict(found, per_s=1e3 / found["ms"]) if name == "polychromic-step" else found


def mean_distance(table):
    """The line of `kiln bench ops` at the peer's shape."""
    line = next(line.split() for line in table.splitlines() if line.startswith("diversity ") and " peers " in line and "pairs" not in line)
    ms = float(line[line.index("forward") + 1])
    return dict(ms=ms, per_s=4096 / ms * 1e3, peak_bytes=0)


def peer(name, mode):
    out = subprocess.run([sys.executable, os.path.join(HERE, "bench.py"), name, "--modes", mode], capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows[-1] if rows else dict(error="no answer")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("recipes", nargs="+", choices=list(OURS))
    p.add_argument("--modes", default="compile,graphs,autotune")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--kiln", default=os.path.join(HERE, "..", "target", "release", "kiln"))
    p.add_argument("--json")
    a, extra = p.parse_known_args()
    results = {}
    for name in a.recipes:
        ours, theirs = [], []
        for r in range(a.rounds):
            for mode in a.modes.split(","):
                ours.append(kiln(a.kiln, name, extra))
                print(json.dumps(dict(kiln=name, **{k: ours[-1].get(k) for k in ("ms", "per_s", "peak_bytes", "setup_s", "error")})), flush=True)
                theirs.append(peer(name, mode))
                print(json.dumps(theirs[-1]), flush=True)
        good, best = [o for o in ours if "per_s" in o], [t for t in theirs if "per_s" in t]
        if name == "polychromic-step":   # a minute and more each: bench.py's figure has too few digits
            best = [dict(t, per_s=1e3 / t["ms"]) for t in best]
        if not good or not best:
            print(f"{name}: no comparison")
            continue
        speed = statistics.median(o["per_s"] for o in good)
        top = max(best, key=lambda t: t["per_s"])
        gib = good[-1]["peak_bytes"] / 2**30
        # A CUDA graph's pool is not in PyTorch's figure for that mode: the largest of its modes is what it needs.
        whole = [t["peak_gib"] for t in best if t["mode"] != "graphs"]
        top = dict(top, peak_gib=max(whole) if whole else None)
        results[name] = dict(kiln=speed, pytorch=top["per_s"], mode=top["mode"], speed_ratio=speed / top["per_s"], kiln_gib=gib, pytorch_gib=top["peak_gib"])
        memory = f"{gib / top['peak_gib']:.2f}x of {top['peak_gib']:.2f} GiB" if whole else "PyTorch's is not known from graphs alone, add compile to --modes"
        digits = lambda v: f"{v:.0f}" if v >= 100 else f"{v:.4g}"
        print(f"{name}: kiln {digits(speed)}/s, PyTorch {digits(top['per_s'])}/s ({top['mode']}): {speed / top['per_s']:.2f}x; memory {gib:.2f} GiB, {memory}")
    if a.json:
        json.dump(results, open(a.json, "w"), indent=1)


main()
