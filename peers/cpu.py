#!/usr/bin/env python3
"""hydra's step on the CPU: the reference in eager fp32 PyTorch beside kiln, alternately, on the same threads.

    pip install torch
    cargo build --release
    python3 peers/cpu.py [--preset small] [--threads 2] [--rounds 3] [--repeat 5] [--kiln target/release/kiln] [--json out.json]

A step is forward, backward, clip to norm 1, AdamW, on random tokens. Speed is the median over all rounds of a side's own median;
memory is the peak resident size of the whole process, PyTorch's own code included (also printed: what it has before the model).
"""
import argparse, json, os, resource, statistics, subprocess, sys, tempfile, time, tomllib

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..")


def peer(preset, threads, repeat):
    """One round of PyTorch, in this process."""
    sys.path.insert(0, os.path.join(ROOT, "reference"))
    import torch
    import hydra
    torch.set_num_threads(threads)
    with open(os.path.join(ROOT, "train", "configs", f"hydra-{preset}.toml"), "rb") as f:
        toml = tomllib.load(f)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    c = hydra.Config(**toml["model"])
    m = hydra.Hydra(c)
    m.init(None)
    t = toml["train"]
    params = list(m.parameters())
    opt = torch.optim.AdamW(params, lr=1e-4, betas=(t["beta1"], t["beta2"]), weight_decay=t["weight_decay"])
    times = []
    for i in range(2 + repeat):
        ids = torch.randint(0, c.vocab, (t["batch"], c.seq + 1))
        start = time.perf_counter()
        loss, _ = m(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, t["clip"])
        opt.step()
        opt.zero_grad(set_to_none=True)
        if i >= 2:
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(dict(per_s=t["batch"] * c.seq / statistics.median(times), peak=peak * 1024, base=base * 1024, torch=torch.__version__)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--preset", default="small")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--kiln", default=os.path.join(ROOT, "target", "release", "kiln"))
    p.add_argument("--json")
    p.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.peer:
        return peer(a.preset, a.threads, a.repeat)
    ours, theirs = [], []
    for r in range(a.rounds):
        with tempfile.NamedTemporaryFile(suffix=".json") as f:
            subprocess.run([a.kiln, "bench", "hydra", "--preset", a.preset, "--threads", str(a.threads), "--repeat", str(a.repeat), "--json", f.name],
                           check=True, stdout=subprocess.DEVNULL)
            ours.append(json.load(open(f.name)))
        out = subprocess.run([sys.executable, os.path.abspath(__file__), "--peer", "--preset", a.preset, "--threads", str(a.threads), "--repeat", str(a.repeat)],
                             check=True, capture_output=True, text=True).stdout
        theirs.append(json.loads(out.splitlines()[-1]))
        print(f"round {r + 1}: kiln {ours[-1]['per_s']:.0f} tok/s, PyTorch {theirs[-1]['per_s']:.0f}", flush=True)
    speed = lambda rows: statistics.median(x["per_s"] for x in rows)
    memory = lambda rows, key: max(x[key] for x in rows)
    k, t = speed(ours), speed(theirs)
    km, tm = memory(ours, "resident_bytes"), memory(theirs, "peak")
    mib = lambda b: f"{b / 2**20:.0f} MiB"
    print(f"hydra {a.preset}, {a.threads} threads, torch {theirs[0]['torch']}")
    print(f"speed:  kiln {k:.0f} tok/s, PyTorch {t:.0f} tok/s, ratio {k / t:.2f}")
    print(f"memory: kiln {mib(km)} (planned {mib(memory(ours, 'peak_bytes'))}), PyTorch {mib(tm)} (of which {mib(memory(theirs, 'base'))} before the model), ratio {km / tm:.2f}")
    if a.json:
        json.dump(dict(preset=a.preset, threads=a.threads, kiln=ours, pytorch=theirs, speed_ratio=k / t, memory_ratio=km / tm), open(a.json, "w"), indent=1)


main()
