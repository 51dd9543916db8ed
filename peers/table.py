#!/usr/bin/env python3
"""What compare.py measured, as lines for bench/results.csv and as README's table.

    python3 peers/table.py --date 2026-11-16 --machine 'B (H200)' a.json b.json

Both are written by this one script, and a test compares them with each other.
"""
import argparse, csv, json, sys

UNITS = {"tokens": "tok/s", "tok": "tok/s", "images": "img/s", "img": "img/s", "examples": "puzzles/s", "windows": "ms", "steps": "ms", "sets": "ms"}


def number(v):
    return f"{v:,.0f}" if v >= 1000 else f"{v:.3g}"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("files", nargs="+")
    p.add_argument("--date", required=True)
    p.add_argument("--machine", required=True)
    a = p.parse_args()
    found = {name: row for file in a.files for name, row in json.load(open(file)).items()}
    out = csv.writer(sys.stdout, lineterminator="\n")
    lines = ["| row | a step is | kiln | usual PyTorch | expert's PyTorch | GiB: kiln, usual, expert's |", "|---|---|---|---|---|---|"]
    for name, row in found.items():
        kiln, unit = row["kiln"], UNITS[(row["usual"] or row["expert"])["unit"]]
        value = lambda side: side["ms"] if unit == "ms" else side["per_s"]
        cells, memory = [], [f"{kiln['measured_bytes'] / 2**30:.3g}" if kiln.get("measured_bytes") else "-"]
        for who in ("usual", "expert"):
            side = row[who]
            ratio = side["ms"] / kiln["ms"] if unit == "ms" else side and kiln["per_s"] / side["per_s"]
            command = f"python3 peers/compare.py {name}:{side['mode']} --rounds {len(kiln['rounds'])}"
            out.writerow([a.date, a.machine, command, f"{name}: {row['conditions']}, {unit}", number(value(kiln)).replace(",", ""), number(value(side)).replace(",", ""), f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}", who])
            cells.append(f"{number(value(side))} ({ratio:.2f}x)" if ratio < 100 else f"{number(value(side))} ({ratio:.0f}x)")
            memory.append(f"{side['peak_gib']:.3g}")
        lines.append(f"| {name} | {row['conditions']} | {number(value(kiln))} {unit} | {cells[0]} | {cells[1]} | {', '.join(memory)} |")
    print("\n".join(lines))


main()
