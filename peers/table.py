#!/usr/bin/env python3
"""bench/results.csv: adds what compare.py measured (--file), a line for each opponent of a row; and says which of its figures are of code that has changed.

    python3 peers/table.py measured.jsonl --machine 'B (H200)'    # then `cargo xtask docs` makes README's table of it
    python3 peers/table.py --check [--strict]                     # fails where README shows such a figure as current; with --strict, where there is one

A figure is current if kiln plans its row as it did (`kiln bench --fingerprint`) and, with --strict, if its opponent's code is what it was. Opponents: usual and expert, of
which each is the fastest of its modes in bench/rows.toml; any other mode that was measured has a line of its own, a mode that failed too; `older build` and `alone` are kiln.
"""
import argparse, csv, json, os, sys
import records, rows

COLUMNS = ["date", "machine", "command", "what", "kiln", "peer", "ratio", "opponent", "low", "high", "kiln_gib", "peer_gib", "commit", "fingerprint", "card", "kiln_mhz", "kiln_watts",
           "peer_mhz", "peer_watts", "peer_code"]
RESULTS = os.path.join(rows.ROOT, "bench", "results.csv")
README = os.path.join(rows.ROOT, "README.md")
MARK = "\\*"   # in the README, behind a figure of an earlier commit


def number(v):
    return "" if v is None else f"{v:.0f}" if v >= 1000 else f"{v:.3g}"


def what(row):
    return f"{row['name']}: {row['is']}, {row['unit']}"


def line(row, rec, ours, other, who, machine):
    value = lambda side: number(side["ms"] if row["unit"] == "ms" else side["per_s"])
    ratio = {key: f"{v:.2f}" for key, v in other["ratio"].items()} if other else {}
    cell = lambda side, key: number((side or {}).get(key))
    fields = [rec["date"], machine, rec["command"], what(row), ours and value(ours), other and value(other), ratio.get("median"), who, ratio.get("low"), ratio.get("high"), cell(ours, "gib"), cell(other, "gib"),
              rec["commit"], rec.get("fingerprint"), rec["card"], cell(ours, "mhz"), cell(ours, "watts"), cell(other, "mhz"), cell(other, "watts"), rec.get("code")]
    return [str(v or "") for v in fields]


def lines(row, table, found, machine):
    """Of a row, what was measured of it."""
    for who in ("usual", "expert"):
        if own := records.usual(row, row["usual"], table, found) if who == "usual" else records.best(row, row["expert"], found):
            yield line(row, *own, who, machine)
    for (name, mode), rec in found.items():
        if name == row["name"] and mode not in row["usual"] + row["expert"]:
            if "error" in rec:
                yield line(row, rec, None, None, f"{mode}: {rec['error'].splitlines()[-1]}", machine)
            elif records.is_whole(rec):
                yield line(row, rec, *records.figures_of(rec), "older build" if mode == "older" else mode, machine)


def add(a, table):
    with open(a.results, newline="") as f:
        there = list(csv.reader(f))
    if there[0] != COLUMNS:
        sys.exit(f"{a.results}: its columns are {', '.join(there[0])}")
    found = records.read(a.file)
    with open(a.results, "a", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        for row in table.values():
            out.writerows(it for it in lines(row, table, found, a.machine) if it not in there)


def stale(a, table):
    """By row: the opponents whose newest figure is of code that has changed, or missing."""
    with open(a.results, newline="") as f:
        results = list(csv.DictReader(f))
    found = {}
    for name, row in table.items():
        now = rows.fingerprint(a.kiln, row["kiln"], ("--pass", "bf16=auto"))
        for who in ("usual", "expert"):
            modes = row[who] or [mode for part in row.get("parts", []) for mode in table[part][who]]
            newest = next((x for x in reversed(results) if x["what"] == what(row) and x["opponent"] == who), None)
            if not modes:
                continue
            if not newest:
                found.setdefault(name, {})[who] = "not measured"
            elif newest["fingerprint"] != now:
                found.setdefault(name, {})[who] = "measured at an earlier commit"
            elif a.strict and not codes(row, table, who) & set(newest["peer_code"].split("+")):
                found.setdefault(name, {})[who] = "its opponent's code has changed since"
    return found


def codes(row, table, who):
    owners = [(row, mode) for mode in row[who]] or [(table[part], mode) for part in row.get("parts", []) for mode in table[part][who]]
    return {rows.code(owner, mode) for owner, mode in owners}


def ledgers_of_another_method(folder):
    """Intervals of ledgers cover how loads differ; files from before that was measured do not say it."""
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name)) as f:
            if not json.load(f)["turns"].get("loads"):
                yield f"{name}: its intervals leave out how loads differ: bench/ledger.sh"


def problems(a, table):
    old = stale(a, table)
    if a.strict:
        yield from ledgers_of_another_method(a.ledgers)
        yield from (f"{name}, {who}: {why}" for name, each in old.items() for who, why in each.items())
    with open(a.readme) as f:
        cells = {c[1].strip(): c for c in (text.split("|") for text in f) if len(c) == 9}
    for name in table:
        if name not in cells:
            yield f"{a.readme} has no row {name}: cargo xtask docs"
            continue
        for who, shown in zip(("usual", "expert"), cells[name][4:6]):
            is_old = old.get(name, {}).get(who, "").startswith("measured")
            if is_old and MARK not in shown:
                yield f"{a.readme}, {name}, {who}: shown as current, and measured at an earlier commit: cargo xtask docs"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("file", nargs="?")
    p.add_argument("--machine")
    p.add_argument("--results", default=RESULTS)
    p.add_argument("--table", default=os.path.join(rows.ROOT, "bench", "rows.toml"))
    p.add_argument("--readme", default=README)
    p.add_argument("--kiln", default=os.path.join(rows.ROOT, "target", "release", "kiln"))
    p.add_argument("--ledgers", default=os.path.join(rows.ROOT, "bench", "ledger"))
    p.add_argument("--check", action="store_true")
    p.add_argument("--strict", action="store_true")
    a = p.parse_args()
    if bool(a.file) != bool(a.machine) or not a.file and not a.check or a.strict and not a.check:
        p.error("FILE and --machine to add figures, --check [--strict] to check those that are there")
    table = rows.read(a.table)
    if a.file:
        add(a, table)
    if a.check:
        try:
            found = list(problems(a, table))
        except rows.NoPlan as e:
            found = [str(e)]
        for problem in found:
            print(problem)
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
