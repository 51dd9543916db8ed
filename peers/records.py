"""What compare.py has measured: a record a side, as lines of JSON, and the figures that are made of them.

A record has `turns`, a pair of answers for each round: kiln's, and the side's (none where kiln was timed alone).
"""
import hashlib, json, os, statistics
import rows

SLOWER = 0.01   # a build that takes more than this much longer is slower, if every round says so


def hash_of(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()[:16]


def read(path):
    """Records by row and mode, the last of each."""
    found = {}
    if path and os.path.exists(path):
        with open(path) as f:
            for line in f:
                try:
                    rec = json.loads(line)
                except ValueError:   # a call was killed while it wrote
                    continue
                found[rec["row"], rec["mode"]] = rec
    return found


def append(path, rec):
    if not path:
        return
    with open(path, "a+b") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(size - 1, 0))
        cut = f.read(1) not in (b"", b"\n")
        f.write(b"\n" * cut + json.dumps(rec).encode() + b"\n")


def trimmed(answer):
    """What is kept of an answer."""
    if answer is None:
        return None
    gib = answer["measured_bytes"] / 2**30 if answer.get("measured_bytes") else answer.get("peak_gib")
    return dict(gib=gib, **{key: answer[key] for key in ("ms", "per_s", "unit", "mhz", "watts") if answer.get(key) is not None})


def side(answers):
    """Medians over the rounds."""
    median = lambda key: statistics.median(x[key] for x in answers if x.get(key) is not None) if any(x.get(key) is not None for x in answers) else None
    return dict({key: median(key) for key in ("ms", "per_s", "mhz", "watts")}, unit=answers[-1].get("unit"), gib=answers[-1].get("gib"))


def figures_of(rec):
    """-> kiln's side, the other's with its ratio: how many times kiln's speed is the other's, the median of the rounds, the lowest, the highest."""
    ours, theirs = zip(*rec["turns"])
    other = None
    if theirs[0]:
        each = sorted(t["ms"] / o["ms"] for o, t in rec["turns"])
        other = dict(side(theirs), mode=rec["mode"], setup_s=rec.get("setup_s"), attention=rec.get("attention"), ratio=spread(each))
    return side(ours), other


def spread(each):
    return {"median": round(statistics.median(each), 4), "low": round(min(each), 4), "high": round(max(each), 4)}


def is_whole(rec):
    return bool(rec) and "error" not in rec and len(rec["turns"]) >= rec["rounds"]


def best(row, modes, found):
    """(the record, kiln's side, the other's) of the fastest of some modes; none where none was measured."""
    all_of = [(rec, *figures_of(rec)) for mode in modes if mode != "alone" and is_whole(rec := found.get((row["name"], mode)))]
    return min(all_of, key=lambda x: x[2]["ratio"]["median"], default=None)


def together(row, table, found):
    """The usual opponent that is several rows one after the other: beside kiln's step as it was timed against the expert."""
    own = best(row, row["expert"], found)
    parts = [best(table[part], table[part]["usual"], found) for part in row["parts"]]
    if not own or not all(parts):
        return None
    rec, ours, _ = own
    each = [sum(of_round) for of_round in zip(*([turn[1]["ms"] for turn in part[0]["turns"]] for part in parts))]
    kiln = [turn[0]["ms"] for turn in rec["turns"]]
    ms, sides = sum(part[2]["ms"] for part in parts), [part[2] for part in parts]
    # The rounds are not the same: the lowest is that of the slowest of kiln's beside the fastest of theirs.
    ratio = dict(median=round(ms / ours["ms"], 4), low=round(min(each) / max(kiln), 4), high=round(max(each) / min(kiln), 4))
    other = dict(ms=ms, per_s=1e3 / ms, unit="steps", gib=max(s["gib"] or 0 for s in sides) or None, mode="+".join(s["mode"] for s in sides), ratio=ratio)
    return dict(rec, code="+".join(part[0]["code"] for part in parts), command="; ".join(part[0]["command"] for part in parts)), ours, other


def usual(row, modes, table, found):
    return together(row, table, found) if row.get("parts") else best(row, modes, found)


def of_expert(row, mode):
    return mode in row["expert"] or rows.program(mode) == "tuned"


def digits(v):
    return "-" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}"


def show(table, asked, found):
    """A table for the screen."""
    print(f"\n{'row':17} {'kiln':>10}   {'opponent':>10} ratio (of the rounds)")
    for name, modes in asked:
        row = table[name]
        both = [usual(row, [m for m in modes if not of_expert(row, m)], table, found), best(row, [m for m in modes if of_expert(row, m)], found)]
        alone = found.get((name, "alone"))
        for own in [(alone, figures_of(alone)[0], None)] if is_whole(alone) else [x for x in both if x]:
            _, ours, x = own
            cells = [f"{name:17} {digits(ours['per_s']):>10}"]
            if x:
                r = x["ratio"]
                cells.append(f"{digits(x['per_s']):>10} {r['median']:.2f}x ({r['low']:.2f} to {r['high']:.2f}) {x['mode']}")
            print("   ".join(cells) + f"   GiB {digits(ours['gib'])}" + (f", {digits(x['gib'])}" if x else ""))
        for mode in modes:
            if "error" in found.get((name, mode), {}):
                print(f"{name:17} {mode}: {found[name, mode]['error'].splitlines()[-1]}")


def figures(row, modes, found):
    """For `kiln bench --against pytorch`."""
    of = lambda mine: best(row, mine, found)
    both = of([m for m in modes if not of_expert(row, m)]), of([m for m in modes if of_expert(row, m)])
    ours = next((x[1] for x in reversed(both) if x), {})
    return dict(conditions=row["is"], kiln=ours, usual=both[0][2] if both[0] else {}, expert=both[1][2] if both[1] else {})


def slower(name, rec):
    """Why this build counts as slower than the older one; none if it does not, or is not measured yet."""
    if rec and "error" in rec:
        return f"{name}: not compared: {rec['error']}"
    if not is_whole(rec):
        return None
    ours, x = figures_of(rec)
    r = x["ratio"]
    print(f"{name:17} {digits(ours['ms'])} ms, before {digits(x['ms'])} ms: {r['median']:.3f}x as fast ({r['low']:.3f} to {r['high']:.3f})", flush=True)
    is_slower = r["median"] < 1 / (1 + SLOWER) and r["high"] < 1
    return f"{name}: {1 / r['median'] - 1:.1%} slower ({1 / r['high'] - 1:.1%} to {1 / r['low'] - 1:.1%})" if is_slower else None
