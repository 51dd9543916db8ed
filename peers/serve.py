"""One row (a recipe in one mode) in a process of its own: set up once, then timed whenever asked.

`run` answers the command lines of bench.py and tuned. A child prints a JSON line when it is set up (`setup_s` counts from the start of its process to
the end of its first step) and one for each line that it reads: for `time SECONDS` the median of the steps of so long, by CUDA events. compare.py talks to such
children itself, so that all sides are compiled once and then timed in turn.
"""
import argparse, json, os, signal, statistics, subprocess, sys, threading, time


class Child:
    """A process that answers with lines of JSON. `known` is a part of each of its answers."""
    def __init__(self, command, log, known, env=None):
        self.known, self.log = known, log
        with open(log, "w") as errors:
            # A session of its own, so that what it starts (compilers) ends with it.
            self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def answer(self, seconds=None):
        """Its next answer, or why there is none. One that takes longer than so many seconds is ended."""
        late = threading.Event()
        limit = threading.Timer(seconds or 0, lambda: (late.set(), self.kill()))
        if seconds is not None:
            limit.start()
        found = next((json.loads(line) for line in self.process.stdout if line.startswith("{")), None)
        limit.cancel()
        if found is not None:
            return dict(found, **self.known)
        if late.is_set():
            return dict(self.known, late=True, error=f"no answer within {seconds:.0f} s")
        with open(self.log) as errors:
            return dict(self.known, error="\n".join(errors.read().strip().splitlines()[-12:])[-1500:] or "no answer")

    def ask(self, what, seconds=None):
        """For `time SECONDS` a timing, for `attention` the kernels that a step launches; or why there is none."""
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.answer(seconds)

    def end(self):
        self.kill()
        self.process.wait()


class Row(Child):
    """`program` is bench.py or the folder tuned; `mode` may carry options: graphs+CONV=cudnn sets TUNED_CONV."""
    def __init__(self, program, recipe, mode):
        name, *options = mode.split("+")
        env = dict(os.environ, BENCH_ROW="1", **{"TUNED_" + key: value for key, value in (o.split("=") for o in options)})
        log = f"/tmp/peer-{os.getpid()}-{recipe}-{mode.replace('=', '-')}-{os.path.basename(program)}.log"
        super().__init__([sys.executable, program, recipe, "--modes", name], log, dict(recipe=recipe, mode=mode), env)


def attention(step):
    """Which attention kernels a step launches."""
    import torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        step()
        torch.cuda.synchronize()
    names = " ".join(e.key.lower() for e in p.key_averages())
    kinds = {"cudnn": "cudnn_generated" in names or ("cudnn" in names and "sdpa" in names), "flash": "flash_fwd" in names or "flash::" in names or "pytorch_flash" in names, "efficient": "fmha_cutlass" in names or "attention_kernel" in names}
    return "+".join(k for k, there in kinds.items() if there) or "none"


def child(recipe, mode, build, started, warm_up):
    """`build(recipe, mode)` gives (step, work, unit, how often a step does it, finish); finish, if any, makes the step that is timed (a capture).
    A step may be a list of (part, how often), whose parts are timed one by one."""
    import torch
    step, work, unit, calls, finish = build(recipe, mode)
    parts = step if isinstance(step, list) else [(step, 1)]
    def step():
        for part, _ in parts:
            part()
    step()
    torch.cuda.synchronize()
    ready = dict(setup_s=round(time.time() - started, 1), torch=torch.__version__, gpu=torch.cuda.get_device_name())
    if finish:
        parts = [(finish(), 1)]
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    if not finish:   # a capture's own pool stays counted
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        what, *seconds = line.split()
        if what == "attention":
            print(json.dumps(dict(attention=attention(step))), flush=True)
            continue
        ms, seconds = 0.0, float(seconds[0]) / len(parts)
        for part, often in parts:
            times, began = [], time.time()
            while not times or time.time() - began < seconds:
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(); part(); b.record(); b.synchronize()
                times.append(a.elapsed_time(b) / calls)
            ms += often * statistics.median(times)
        # torch.compile's own graphs keep their memory outside of what counts as allocated
        peak = torch.cuda.max_memory_reserved() if mode == "graphs" and not finish else torch.cuda.max_memory_allocated()
        print(json.dumps(dict(ready, ms=round(ms, 4), per_s=round(work / ms * 1e3, 3), unit=unit, peak_gib=round(peak / 2**30, 2))), flush=True)


def run(program, recipes, modes, build, started, warm_up=lambda recipe: 5, check=None):
    p = argparse.ArgumentParser()
    p.add_argument("recipes", nargs="*", choices=[[], *recipes])
    p.add_argument("--modes", default=modes)
    p.add_argument("--json")
    if check:
        p.add_argument("--check", action="store_true", help="compare with ../reference on the CPU, in fp32 and small")
    a = p.parse_args()
    if check and a.check:
        return check()
    if os.environ.get("BENCH_ROW") == "1":
        return child(a.recipes[0], a.modes, build, started, warm_up(a.recipes[0]))
    rows = []
    for recipe in a.recipes:
        for mode in a.modes.split(","):   # a fresh process for every row: no compiled code, patched function or memory carries over
            row = Row(program, recipe, mode)
            found = row.answer()
            if "error" not in found:
                row.ask("time 5")   # clocks and power as under its own load
            rows.append(found if "error" in found else dict(row.ask("time 5"), attention=row.ask("attention").get("attention")))
            row.end()
            print(json.dumps(rows[-1]), flush=True)
    if a.json:
        json.dump(rows, open(a.json, "w"), indent=1)
