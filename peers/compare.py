#!/usr/bin/env python3
"""kiln and PyTorch on the same GPU, in turn, with the ratios. bench/all.sh calls it for every row of bench/rows.toml.

    python3 peers/compare.py [ROW[:MODES] ..] [--rounds 3] [--seconds 5] [--kiln target/release/kiln] [--file measured.jsonl] [--minutes 9]
    python3 peers/compare.py [ROW ..] --against OLDER_KILN        # is this kiln slower than another build of it?
    python3 peers/compare.py [ROW ..] --alone                     # kiln's own sides

There are two opponents. The usual one (bench.py; decoder.py) is the reference in a careful user's hands: bf16 autocast, SDPA, fused AdamW, torch.compile. The expert's
(tuned/) is rewritten by hand for speed. Their modes are `compile`, `graphs`, `autotune` and `eager` of the first, the same behind `tuned-` of the second, with options
behind a plus (`tuned-graphs+CONV=cudnn`). A row has the modes that bench/rows.toml names, unless they follow its name.

Sides are loaded one after another, so that each compiles and tunes alone. In every round they take turns, in an order that rotates; in its turn a side runs for
--warm-up seconds that do not count, so that clocks and power are those of its own work, and is then timed for --seconds. The ratio is the median of the rounds' ratios,
with the lowest and the highest; an opponent's is its best mode's. Memory: all that kiln takes from the card beyond its CUDA context, measured, against PyTorch's peak.

With --file every side is noted as soon as a round of it is measured. The same command goes on where the last one ended, on this machine or on another of the same card:
a side that is there is measured again only if kiln's plan of the row (`kiln bench --fingerprint`) or the side's own code has changed (with --against: one of the two
programs). After --minutes the call ends with 3. A side that fails is noted, too, and is tried again with --retry.
"""
import argparse, datetime, functools, json, os, signal, subprocess, sys, time
import records, rows


class Left(Exception):
    """The call's time is over."""


class Part:
    """A call: what it may take, and what it has noted."""

    def __init__(self, a, table):
        self.a, self.table, self.card, self.name = a, table, rows.Card(), rows.Card.name()
        self.end = time.time() + 60 * a.minutes if a.minutes else float("inf")
        self.found = records.read(a.file)
        self.fresh = self.untimed = True   # no opponent was loaded, no round was timed: a call makes some progress, however short
        self.commit = commit()

    @functools.cache
    def identity(self, name, mode):
        """What a figure is of. Of other code it is another figure."""
        row = self.table[name]
        it = {"row": row["name"], "mode": mode, "is": row["is"], "card": self.name, "turn": [self.a.warm_up, self.a.seconds]}
        if mode == "older":
            return dict(it, builds=[records.hash_of(path) for path in (self.a.kiln, self.a.against)])
        return dict(it, fingerprint=rows.fingerprint(self.a.kiln, row["kiln"], tuple(self.a.extra)), code=None if mode == "alone" else rows.code(row, mode))

    def of_now(self, row, mode):
        """The record of a side, where it is of what is here."""
        old = self.found.get((row["name"], mode))
        same = old and all(old.get(k) == v for k, v in self.identity(row["name"], mode).items())
        return old if same and not (self.a.retry and "error" in old) else None

    def missing(self, row, mode):
        """How many rounds."""
        old = self.of_now(row, mode)
        return 0 if old and "error" in old else self.a.rounds - len(old["turns"] if old else [])

    def note(self, row, mode, **fields):
        old = self.of_now(row, mode) or dict(self.identity(row["name"], mode), unit=row["unit"], turns=[])
        modes = [mode] if mode not in ("older", "alone") else []
        command = " ".join(["python3 peers/compare.py", ":".join([row["name"], *modes]), "--rounds", str(self.a.rounds), "--seconds", f"{self.a.seconds:g}", *self.a.extra])
        it = dict(old, rounds=self.a.rounds, date=datetime.date.today().isoformat(), commit=self.commit, command=command, **fields)
        self.found[row["name"], mode] = it
        records.append(self.a.file, it)

    def room(self, sides):
        """Seconds that are left beside the rounds of so many sides."""
        return self.end - time.time() - 1.2 * self.a.rounds * sides * (self.a.warm_up + self.a.seconds)


def commit():
    """What is measured: the checkout's commit, with a plus where the engine was changed since."""
    if given := os.environ.get("KILN_COMMIT"):
        return given[:10]
    git = lambda *args: subprocess.run(["git", "-C", rows.ROOT, *args], capture_output=True, text=True).stdout.strip()
    head = git("rev-parse", "--short=10", "HEAD")
    return head + "+" * bool(git("status", "--porcelain", "--", "engine", "train", "peers", "Cargo.lock")) if head else None


def patience(row, mode, a):
    """Seconds for a side to be loaded. A mode that times every kernel it could use gets all that a part of nine minutes has beside its rounds."""
    return a.patience or (450 if "autotune" in mode else row.get("patience", 240))


def load(row, wanted, part, processes):
    """Loads kiln and the modes one after another, as far as the time reaches. -> kiln's error, and whether all are loaded"""
    a = part.a

    def ready(name, limit):
        answer = processes[name].answer(limit)
        print(json.dumps(dict(answer, mode=name)), flush=True)
        return answer
    processes["kiln"] = rows.Kiln(a.kiln, row, a.device, a.extra)
    answer = ready("kiln", min(patience(row, "kiln", a), max(part.room(2), 60)))
    if "error" in answer:
        return answer["error"], False
    for mode in wanted:
        if mode == "alone":
            continue
        longest = patience(row, mode, a)
        least, limit = min(20, longest), min(longest, part.room(len(processes) + 1))
        if limit < least and not part.fresh:
            return None, False
        processes[mode] = rows.Kiln(a.against, row, a.device, a.extra) if mode == "older" else rows.opponent(row, mode)
        answer = ready(mode, max(limit, least))
        if "error" in answer:
            processes.pop(mode).end()
            if answer.get("late") and limit < longest and not part.fresh:
                return None, False   # the next call has more time for it
            part.note(row, mode, error=answer["error"])
        elif mode != "older":
            part.note(row, mode, setup_s=answer.get("setup_s"))
        part.fresh = False
    return None, True


def turns(row, wanted, part, processes):
    """Rounds until no side misses one. -> kiln's error"""
    a, limit = part.a, 120 + 20 * (part.a.warm_up + part.a.seconds)
    while wanted := [mode for mode in wanted if mode in (*processes, "alone") and part.missing(row, mode) > 0]:
        r = a.rounds - max(part.missing(row, mode) for mode in wanted)
        names = ["kiln", *(mode for mode in wanted if mode != "alone")]
        if part.end - time.time() < 1.2 * len(names) * (a.warm_up + a.seconds) and not part.untimed:
            raise Left
        answers = {}
        for name in names[r % len(names):] + names[:r % len(names)]:
            processes[name].ask(f"time {a.warm_up:g}", limit)
            part.card.since()
            answers[name] = dict(processes[name].ask(f"time {a.seconds:g}", limit), **part.card.since())
            print(json.dumps(dict(answers[name], mode=name, round=r)), flush=True)
        part.fresh = part.untimed = False
        if "error" in answers["kiln"]:
            return answers["kiln"]["error"]
        for mode in wanted:
            theirs = answers.get(mode)
            if theirs and "error" in theirs:
                processes.pop(mode).end()
                part.note(row, mode, error=theirs["error"])
                continue
            old = part.of_now(row, mode)
            part.note(row, mode, turns=(old["turns"] if old else []) + [[records.trimmed(answers["kiln"]), records.trimmed(theirs)]])
    return None


def measure(row, wanted, part):
    """These modes of a row. -> kiln's error; raises Left where the time is over before all of them are measured."""
    processes = {}
    try:
        error, all_loaded = load(row, wanted, part, processes)
        error = error or turns(row, wanted, part, processes)
        for mode, process in processes.items():   # last: a profiler that fails costs no figure
            if mode not in ("kiln", "older") and not error and part.end - time.time() > 20:
                part.note(row, mode, attention=process.ask("attention", 60).get("attention"))
        if not all_loaded and not error:
            raise Left
        return error
    finally:
        for process in processes.values():
            process.end()


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("rows", nargs="*", metavar="ROW[:MODES]", help="all, where none is named")
    p.add_argument("--table", default=os.path.join(rows.ROOT, "bench", "rows.toml"), help="the file of rows")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=5, help="of each turn that count")
    p.add_argument("--warm-up", type=float, default=5, help="seconds of each turn, before those that count")
    p.add_argument("--kiln", default=os.path.join(rows.ROOT, "target", "release", "kiln"))
    p.add_argument("--against", metavar="KILN", help="another build of kiln, instead of PyTorch: fails where this one is slower")
    p.add_argument("--alone", action="store_true", help="kiln's own sides, without opponents")
    p.add_argument("--device", default="cuda")
    p.add_argument("--patience", type=float, help="seconds after which a side that is not loaded is left out: 240, or what bench/rows.toml says, or 450 for max-autotune, if not given")
    p.add_argument("--minutes", type=float, help="of this call, at most")
    p.add_argument("--file", help="JSON lines, a side each: what is there already and current is not measured again")
    p.add_argument("--retry", action="store_true", help="tries sides again that have failed")
    p.add_argument("--json", help="writes the figures of these rows")
    p.add_argument("--list", action="store_true", help="prints the rows and what each is for `kiln bench`, as JSON, and ends")
    p.add_argument("--pass", action="append", default=[], dest="passes", metavar="NAME=VALUE", help="for kiln, with any number of others")
    a = p.parse_args()
    a.extra = [word for value in a.passes for word in ("--pass", value)]
    table = rows.read(a.table)
    asked = [(name, modes.split(",") if modes else None) for name, _, modes in (row.partition(":") for row in a.rows or table)]
    unknown = [name for name, _ in asked if name not in table]
    if unknown:
        p.error(f"unknown: {', '.join(unknown)}; rows are {', '.join(table)}")
    if a.rounds < 1 or a.seconds <= 0 or a.warm_up < 0 or a.against and a.alone:
        p.error("--rounds is 1 at least, --seconds is more than 0, --warm-up is not negative; --against and --alone exclude each other")
    if own := ["older"] if a.against else ["alone"] if a.alone else None:
        asked = [(name, own) for name, _ in asked if "peer" not in table[name]]   # a row with other peers is the same step of kiln's
    return a, table, [(name, modes or table[name]["usual"] + table[name]["expert"]) for name, modes in asked]


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))   # the sides end with it
    a, table, asked = arguments()
    if a.list:
        steps = {name: row["kiln"].split() for name, row in table.items()}
        return print(json.dumps([(name, args) for name, args in steps.items() if args[0] not in ("ops", "generate") and "--pass" not in args and "peer" not in table[name]]))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(os.cpu_count() or 4))
    part, left, failed = Part(a, table), [], []
    for name, modes in asked:
        row = table[name]
        try:
            wanted = [mode for mode in modes if part.missing(row, mode) > 0]
            if not wanted:
                print(f"{name}: measured already", flush=True)
            elif not part.untimed and part.room(2) < min(30, a.patience or 30):
                left.append(name)
            elif error := measure(row, wanted, part):
                failed.append(f"{name}: {error}")
        except Left:
            left.append(name)
        except rows.NoPlan as e:
            failed.append(f"{name}: {e}")
    part.card.end()
    if a.against:
        failed += [s for name, _ in asked if (s := records.slower(name, part.of_now(table[name], "older")))]
    else:
        known = [name for name, _ in asked if not any(f.startswith(f"{name}: ") for f in failed)]
        every = [(name, mode) for name, modes in asked if name in known for mode in modes]
        every += [(of, mode) for name in known for of in table[name].get("parts", []) for mode in table[of]["usual"]]
        now = {key: rec for key in every if (rec := part.of_now(table[key[0]], key[1]))}
        records.show(table, asked, now)
    if a.json and not a.against:
        with open(a.json, "w") as f:
            json.dump({name: records.figures(table[name], modes, now) for name, modes in asked}, f, indent=1)
    if left:
        print(f"not yet: {', '.join(left)} (--minutes {a.minutes:g} are over; the same command goes on)")
    for line in failed:
        print("FAILED, " + line)
    sys.exit(1 if failed else 3 if left else 0)


if __name__ == "__main__":
    main()
