#!/bin/bash
# What lior's geometry settles at and what it is worth, on a CPU (about half an hour on one core): bench/lior.sh KILN OUT [KEY=VALUE ..]
# Writes OUT/long (20,000 windows) and OUT/DATA-ENCODER-SEED, and prints the probe's means with intervals of 95% (three seeds). Further settings are those of
# all these runs.
set -euo pipefail
kiln=$(realpath "$1") out=$2
shift 2
mkdir -p "$out" && cd "$out"
# Eight topics: each has an order of frequency of its own over the same 96 words. A document is as long as a window and what follows it, and the token after a
# window is the name of its topic: what finds the next token has found the topic.
python3 - <<'END'
import json, random
g = random.Random(7)
syllables = ["ka", "lo", "mi", "ne", "ru", "sa", "te", "vo", "zi", "pa"]
words = [a + b for a in syllables for b in syllables][:96]
names = ["north", "south", "east", "west", "spring", "summer", "autumn", "winter"]
orders = [g.sample(words, len(words)) for _ in names]
weights = [1 / (k + 1) for k in range(len(words))]
with open("topics.jsonl", "w") as f:
    for _ in range(2000):
        t = g.randrange(8)
        w = g.choices(orders[t], weights, k=39)
        f.write(json.dumps({"text": " ".join(w[:32] + [names[t]] + w[32:])}) + "\n")
vocab = {w: i for i, w in enumerate(["[unk]"] + words + names)}
json.dump({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
           "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[unk]"}}, open("tokenizer.json", "w"))
END
"$kiln" data prepare topics.jsonl --tokenizer tokenizer.json --eos none --bos none --val-share 0.2 --out topics --force
"$kiln" data prepare --generated 12000 --val-share 0.1 --out text --force
sets=()
for set in "$@"; do sets+=(--set "$set"); done
shape=(--set dim=32 --set heads=2 --set seq=32 --threads 1)
small=("${shape[@]}" --set 'field=[4,4,8,8]' --set model.steps=8 --set eval_batches=0 "${sets[@]}")
"$kiln" train lior --data topics "${small[@]}" --steps 20000 --set log_every=200 --set eval_every=1000 --set save_every=5000 --out long
for data in topics text; do
    for seed in 0 1 2; do
        "$kiln" train lior --preset encoder --data $data "${shape[@]}" --steps 2000 --seed $seed --out "encoder-$data-$seed"
        run=("$kiln" train lior --data $data "${small[@]}" --steps 2000 --seed $seed --set log_every=100 --set eval_every=500)
        "${run[@]}" --out "$data-random-$seed"
        "${run[@]}" --set "model.encoder=encoder-$data-$seed" --out "$data-trained-$seed"
    done
done
python3 - <<'END'
import json, statistics
def mean(numbers):  # and the half of its interval: Student's t with two degrees of freedom
    return f"{100 * statistics.mean(numbers):.1f} ± {100 * 4.303 * statistics.stdev(numbers) / 3 ** 0.5:.1f}%"
for data in ("topics", "text"):
    for encoder in ("random", "trained"):
        runs = [[r for r in map(json.loads, open(f"{data}-{encoder}-{seed}/metrics.jsonl")) if "val_found" in r][-1] for seed in range(3)]
        learned, initial, chance = ([r["val_found" + end] for r in runs] for end in ("", "_initial", "_chance"))
        gain = mean([a - b for a, b in zip(learned, initial)])
        print(f"{data}, {encoder} encoder: learned {mean(learned)}, initial {mean(initial)}, learned - initial {gain}, chance {mean(chance)}")
END
