#!/usr/bin/env python3
"""The strongest PyTorch that we know how to write for plain decoders on one GPU: full training steps (forward, backward, clip to norm 1, AdamW), bf16, f32 masters and moments.

    python3 peers/decoder.py [gpt2-124m qwen2.5-0.5b qwen2.5-1.5b qwen3-0.6b] [--modes graphs,autotune+LOSS=whole] [--budget 345] [--json out.json]
    python3 peers/decoder.py --device cpu --tiny            # small sizes; shows only that it runs
    python3 peers/decoder.py --check GOLDEN.safetensors ..  # against golden files: CPU, f32

A mode is eager, compile (torch.compile, one compilation for all layers), graphs (compile, and the whole step captured as one CUDA graph) or autotune (graphs, with
max-autotune-no-cudagraphs; minutes to set up), with options behind it: SDPA=cudnn|flash, BLAS=cublas|cublaslt and those that tuned/plain.py describes. `usual` is a careful user's
code: compile (usual+COMPILE=autotune: max-autotune), weights cast at each use, all logits through autograd, clip_grad_norm_ and fused AdamW. One line of JSON for each model and mode, each in a process of
its own; a mode that fails or has no time left says so in its line. Then the best mode of each model.

tokens/s: the median of the windows of --steps steps that --seconds hold, after as long a warm-up. peak_gib: torch.cuda.max_memory_allocated of steps after warm-up, what a capture takes included.
MFU = tokens/s * (6 * parameters + 6 * layers * heads * head_dim * time) / 989.4e12: causal attention is counted half, a tied head once, the lookup not.
"""
import time
STARTED = time.time()
import argparse, json, os, statistics, sys, threading  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "tuned")]
import serve  # noqa: E402

MODELS = ["gpt2-124m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b"]
KINDS = ["eager", "compile", "graphs", "autotune", "usual"]
MODES = "graphs,graphs+LOSS=whole,graphs+SDPA=flash"
PEAK = 989.4e12   # dense bf16 FLOP/s of an H200


def set_option(name, value):
    """Options of tuned/ are environment variables."""
    os.environ.pop("TUNED_" + name, None)
    if value is not None:
        os.environ["TUNED_" + name] = value


def window(step, steps, cuda):
    """Milliseconds a step."""
    import torch
    if not cuda:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) * 1e3 / steps
    a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    a.record()
    for _ in range(steps):
        step()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / steps


def captured(step):
    """The step as one CUDA graph, after two steps on a side stream (where cuBLAS and cuDNN take their workspaces)."""
    import torch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph, out = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph):
        out["loss"] = step()
    def replay():
        graph.replay()
        return out["loss"]
    return replay


def child(model, mode):
    """Sets a row up, says so, and answers each line of its input: `time`, or `attention` for the kernels it launches."""
    if mode == "usual":
        set_option("WEIGHTS", "cast"), set_option("LOSS", "plain")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from common import S, option
    import plain
    torch.manual_seed(0)
    S.device, S.mode = option("DEVICE", "cuda"), option("COMPILE", "compile") if mode == "usual" else mode
    cuda = S.device == "cuda"
    s = plain.SIZES[model]
    if option("TINY", "0") == "1":
        s = plain.tiny(s)
        set_option("CHUNK", "32")
    if option("BLAS", ""):
        torch.backends.cuda.preferred_blas_library(option("BLAS", ""))
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order = order[:-1] if cuda else order
    with sdpa_kernel(order if option("SDPA", "cudnn") == "cudnn" else order[1:], set_priority=True):
        training = plain.random_training(s)
        step = training.step
        first = step().item()
        ready = dict(setup_s=round(time.time() - STARTED, 1), torch=torch.__version__, gpu=torch.cuda.get_device_name() if cuda else "none")
        capture = cuda and mode in ("graphs", "autotune")
        if capture:
            step = captured(step)
        for _ in range(3 if capture else 5):   # six steps in all, so that the loss of the last is comparable
            last = step()
        last = last.item()
        if cuda and not capture:   # a capture's own pool stays counted
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(ready), flush=True)
        for line in sys.stdin:
            what, *seconds = line.split()
            if what == "attention":
                print(json.dumps(dict(attention=serve.attention(step) if cuda else "none")), flush=True)
                continue
            steps, seconds, times, began = int(option("STEPS", "4")), float(seconds[0]), [], time.time()
            while not times or time.time() - began < seconds:
                times.append(window(step, steps, cuda))
            ms, tokens = statistics.median(times), s.batch * s.seq
            per_s = tokens / ms * 1e3
            memory = dict(peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), reserved_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2)) if cuda else {}
            print(json.dumps(dict(ready, ms=round(ms, 3), per_s=round(per_s, 1), unit="tokens", mfu=round(per_s * plain.flops_per_token(s) / PEAK, 4), spread=round((max(times) - min(times)) / ms, 4),
                                  **memory, total_s=round(time.time() - STARTED, 1), batch=s.batch, seq=s.seq, parameters=plain.parameters(s), head=training.head.ways() if training.head else "autograd",
                                  loss=[round(first, 4), round(last, 4)])), flush=True)


def measure(model, mode, seconds):
    """One row, ended after so many seconds; what goes wrong is its answer."""
    if seconds < 20:
        return dict(recipe=model, mode=mode, error="no time left (--budget)")
    try:
        row = serve.Row(os.path.abspath(__file__), model, mode)
    except (ValueError, OSError) as e:
        return dict(recipe=model, mode=mode, error=f"{e} (a mode is KIND+OPTION=VALUE)")
    limit = threading.Timer(seconds, row.kill)
    limit.start()
    found = row.answer()
    if "error" not in found:
        row.ask(f"time {option('SECONDS', '5')}")   # clocks and power as under its own load
        found = row.ask(f"time {option('SECONDS', '5')}")
    if "error" not in found:   # last: a profiler that fails costs no figure
        found["attention"] = row.ask("attention").get("attention")
    limit.cancel()
    code = row.process.wait(5) if "error" in found else 0
    row.end()
    if code < 0:
        found["error"] = f"ended by signal {-code} (9 where it took longer than {seconds:.0f} s): " + found["error"][-300:]
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="*", metavar="MODEL", help="of " + ", ".join(MODELS))
    p.add_argument("--modes", default=MODES)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--seconds", type=float, default=5, help="that are timed, after as long that does not count")
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--budget", type=float, default=345, help="seconds for all rows together")
    p.add_argument("--row", type=float, default=200, help="seconds for one row at most")
    p.add_argument("--json")
    p.add_argument("--check", nargs="+", metavar="GOLDEN")
    a = p.parse_args()
    if a.check:
        import decoder_golden
        sys.exit(not decoder_golden.check(a.check, set_option))
    unknown = [m for m in a.models if m not in MODELS] + [m for m in a.modes.split(",") if m.split("+")[0] not in KINDS]
    if unknown:
        p.error(f"unknown: {', '.join(unknown)}; models are {', '.join(MODELS)}; modes begin with {', '.join(KINDS)}")
    if os.environ.get("BENCH_ROW") == "1":
        return child(a.models[0], a.modes)
    for name, value in (("DEVICE", a.device), ("TINY", str(int(a.tiny))), ("SECONDS", str(a.seconds)), ("STEPS", str(a.steps))):
        set_option(name, value)
    if a.device == "cpu":   # virtual machines may announce AMX and not have it
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    rows, end = [], time.time() + a.budget
    for mode in a.modes.split(","):   # every model's first mode first: a budget that ends early leaves none out
        for model in a.models or MODELS[:3]:
            rows.append(measure(model, mode, min(a.row, end - time.time())))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'model':14} {'best mode':28} {'tok/s':>9} {'MFU':>6} {'GiB':>6} {'reserved':>8}   others, tok/s (GiB)")
    for model in a.models or MODELS[:3]:
        good = sorted((r for r in rows if r["recipe"] == model and "per_s" in r), key=lambda r: -r["per_s"])
        failed = [r["mode"] + " failed" for r in rows if r["recipe"] == model and "per_s" not in r]
        if good:
            b, gib = good[0], lambda r: r.get("peak_gib", "-")
            others = [f"{r['mode']} {r['per_s']:,.0f} ({gib(r)})" for r in good[1:]] + failed
            print(f"{model:14} {b['mode']:28} {b['per_s']:>9,.0f} {b['mfu']:>6.1%} {gib(b):>6} {b.get('reserved_gib', '-'):>8}   {'; '.join(others)}")
        else:
            print(f"{model:14} {'; '.join(failed)}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
