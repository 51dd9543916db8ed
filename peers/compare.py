#!/usr/bin/env python3
"""kiln and PyTorch on the same GPU, alternately, with the ratios.

    python3 peers/compare.py [ROW[:MODES] ..] [--rounds 3] [--modes graphs,tuned-graphs] [--kiln target/release/kiln] [--json out.json]

There are two opponents. The usual one (bench.py) is the reference in a careful user's hands: bf16 autocast, SDPA, fused AdamW, torch.compile. The expert's (tuned/) is
rewritten by hand for speed. Their modes are `compile`, `graphs`, `autotune` and `eager` of the first, the same behind `tuned-` of the second, with options behind a plus
(`tuned-graphs+CONV=cudnn`). Without --modes each row has the fastest of the modes that LOG.md says were tried (autotune takes minutes to set up: --patience).

All of PyTorch's processes are set up side by side, and wait. Then every round times kiln and each of them in turn, alone on the card. A side's figure is the median of its rounds;
an opponent's is its best mode's. Memory: all that kiln takes from the card beyond its CUDA context, measured, beside what the plan said, against PyTorch's peak.
"""
import argparse, concurrent.futures, functools, json, os, statistics, subprocess, tempfile
import serve

HERE = os.path.dirname(os.path.abspath(__file__))
# row -> arguments of `kiln bench`; conditions; PyTorch's modes by default
ROWS = {
    "hydra": (["hydra", "--preset", "100m", "--set", "batch=64"], "64 x 1024 tokens, no dropout", "graphs,tuned-graphs"),
    "hydra-4": (["hydra", "--preset", "100m", "--set", "batch=4"], "4 x 1024 tokens, no dropout", "graphs,tuned-graphs"),
    "vision_bdh": (["vision_bdh", "--preset", "cifar10"], "2 x 128 images, dropout 0.1", "autotune,compile,tuned-graphs"),
    "hrm": (["hrm", "--preset", "sudoku-moe"], "384 puzzles of 81 cells, one segment, no dropout", "graphs,tuned-graphs"),
    "lior": (["lior", "--preset", "production", "--set", "batch=8"], "batch 8 of 128 tokens, 2 x 64 steps", "graphs,tuned-graphs"),
    "lior-1": (["lior", "--preset", "production", "--set", "batch=1"], "batch 1 of 128 tokens, 2 x 64 steps", "graphs,tuned-graphs"),
    "lior-64": (["lior", "--preset", "production", "--set", "batch=64"], "batch 64 of 128 tokens, 2 x 64 steps", "graphs,tuned-graphs"),
    # As the peers: no dropout; a quarter of each row is prompt; every step of polychromic-step writes 12 replies of 100 tokens to prompts of 64; its usual opponent is the two rows before it together.
    "polychromic": (["polychromic", "--preset", "qwen3-0.6b", "--set", "model.dropout=0", "--set", "objective.weight=0"], "LoRA 16, 16 x 512 tokens, no dropout", "graphs,tuned-graphs"),
    "generate": (["generate", "--preset", "qwen3-0.6b", "--set", "prompt_tokens=64"], "12 replies of 100 tokens, prompts of 64", "compile,tuned-graphs"),
    "polychromic-step": (["polychromic", "--preset", "qwen3-0.6b", "--set", "model.dropout=0", "--set", "every=1", "--set", "prompt_tokens=64"], "the same with 12 replies of 100 tokens, no dropout", "tuned-graphs"),
    # Plain decoders, every weight trained. Their usual opponent is decoder.py's mode `usual`. Two processes of the larger ones fill the card: one model a call.
    "gpt2-124m": (["decoder", "--preset", "gpt2-124m", "--set", "batch=64"], "64 x 1024 tokens", "usual,tuned-graphs,tuned-graphs+LOSS=whole"),
    "qwen2.5-0.5b": (["decoder", "--preset", "qwen2.5-0.5b", "--set", "batch=32"], "32 x 1024 tokens", "usual,tuned-graphs"),
    "qwen2.5-1.5b": (["decoder", "--preset", "qwen2.5-1.5b", "--set", "batch=16"], "16 x 1024 tokens", "usual,tuned-graphs"),
    "diversity": (["ops", "--only", "diversity"], "4,096 sets of 10 x 384, in L2", "compile,tuned-graphs"),
}


def kiln(binary, name, extra):
    numbers = [] if ROWS[name][0][0] in ("ops", "generate") else ["--steps-for-error", "1"]   # no more than the file needs
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        done = subprocess.run([binary, "bench", *ROWS[name][0], "--device", "cuda", "--pass", "bf16=auto", "--warmup", "5", "--repeat", "20", *numbers, "--json", f.name, *extra], capture_output=True, text=True)
        if done.returncode != 0:
            return dict(error=done.stderr.strip()[-300:])
        found = json.load(open(f.name))
    if name == "diversity":
        found = next(r for r in found if r["op"] == "diversity" and r["case"] == "peers" and r["direction"] == "forward")
        return dict(ms=found["ms"], per_s=4096 / found["ms"] * 1e3, unit="sets")
    if name == "generate":   # the base alone, as the peers'
        found = next(g for g in found["generate"] if not g["adapters"])
    return dict(found, per_s=1e3 / found["ms"], unit="steps") if name == "polychromic-step" else found


def opponent(mode):
    return "tuned" if mode.startswith("tuned-") else "decoder.py" if mode == "usual" else "bench.py"


def median(rows):
    return dict(rows[-1], per_s=statistics.median(r["per_s"] for r in rows), ms=statistics.median(r["ms"] for r in rows), rounds=[round(r["per_s"], 3) for r in rows], set_ups=[r.get("setup_s") for r in rows])


def gib(row, key="measured_bytes"):
    return row[key] / 2**30 if row.get(key) else None


def digits(v):
    return "-" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("rows", nargs="*", metavar="ROW[:MODES]", help="of " + ", ".join(ROWS))
    p.add_argument("--modes")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--kiln", default=os.path.join(HERE, "..", "target", "release", "kiln"))
    p.add_argument("--patience", type=int, default=600, help="seconds after which a process that is not set up is left out")
    p.add_argument("--json")
    p.add_argument("--list", action="store_true", help="prints the rows and what each is for `kiln bench`, as JSON, and ends")
    a, extra = p.parse_known_args()
    if a.list:
        return print(json.dumps([(name, args) for name, (args, _, _) in ROWS.items() if args[0] not in ("ops", "generate")]))
    chosen = [(name, (modes or a.modes or ROWS[name][2]).split(",")) for name, _, modes in (row.partition(":") for row in a.rows or [r for r in ROWS if "decoder" not in ROWS[r][0]])]
    names = [name for name, _ in chosen]
    # Every process compiles with as many threads as the machine has, unless told.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    peers = [(name, mode, serve.Row(os.path.join(HERE, opponent(mode)), name, mode.removeprefix("tuned-"))) for name, modes in chosen for mode in modes]
    measured = {(name, "kiln"): [] for name in names}
    with concurrent.futures.ThreadPoolExecutor(len(peers)) as pool:   # each is waited for by itself: one that is slow ends no other
        for (name, mode, _), ready in zip(peers, pool.map(lambda peer: peer[2].ready(a.patience), peers)):
            print(json.dumps(dict(ready, recipe=name, mode=mode)), flush=True)
            if "error" not in ready:
                measured[name, mode] = []
    for r in range(a.rounds):
        for name in names:
            sides = [("kiln", lambda: kiln(a.kiln, name, extra))] + [(mode, functools.partial(row.ask, "time")) for n, mode, row in peers if n == name and (name, mode) in measured]
            for mode, time in sides:
                found = dict(time(), recipe=name, mode=mode, round=r)
                found.pop("ledger", None), found.pop("nodes", None)
                print(json.dumps(found), flush=True)
                if "per_s" in found:
                    measured[name, mode].append(found)
    for name, mode, row in peers:   # last: a profiler that fails costs no figure
        if measured.get((name, mode)):
            measured[name, mode][-1]["attention"] = row.ask("attention").get("attention")
        row.end()
    results = {}
    print(f"\n{'row':17} {'kiln':>10} {'usual':>10} {'ratio':>6} {'expert':>10} {'ratio':>6}   GiB: kiln (planned), usual, expert   attention, set-up s: kiln, usual, expert")
    for name in names:
        sides = {mode: median(rows) for (n, mode), rows in measured.items() if n == name and rows}
        ours = sides.pop("kiln", None)
        if not ours:
            print(f"{name:17} no figure of kiln's")
            continue
        best = lambda tuned: max((s for mode, s in sides.items() if (opponent(mode) == "tuned") == tuned), key=lambda s: s["per_s"], default={})
        usual, expert = best(False), best(True)
        if name == "polychromic-step" and not usual and {"generate", "polychromic"} <= results.keys():
            # All replies at once, then the supervised step: the two rows together, in favour of PyTorch without the policy gradient.
            parts = [results[n]["usual"] for n in ("generate", "polychromic")]
            ms = sum(p["ms"] for p in parts)
            usual = dict(ms=ms, per_s=1e3 / ms, unit="steps", mode="+".join(p["mode"] for p in parts), peak_gib=max(p["peak_gib"] for p in parts))
        results[name] = dict(conditions=ROWS[name][1], kiln=ours, usual=usual, expert=expert)
        ratio = lambda o: f"{ours['per_s'] / o['per_s']:.2f}" if o else "-"
        print(f"{name:17} {digits(ours['per_s']):>10} {digits(usual.get('per_s')):>10} {ratio(usual):>6} {digits(expert.get('per_s')):>10} {ratio(expert):>6}   "
              f"{digits(gib(ours))} ({digits(gib(ours, 'peak_bytes'))}), {digits(usual.get('peak_gib'))}, {digits(expert.get('peak_gib'))}   "
              f"{usual.get('mode')} {usual.get('attention')}, {expert.get('mode')} {expert.get('attention')}; {digits(ours['set_ups'][0])} then {digits(ours.get('setup_s'))}, {digits(usual.get('setup_s'))}, {digits(expert.get('setup_s'))}")
    if a.json:
        json.dump(results, open(a.json, "w"), indent=1)


main()
