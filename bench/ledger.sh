#!/bin/sh
# The ledger of every recipe on a GPU, as data: bench/ledger.sh [MINUTES] [FOLDER]
#
# MINUTES (10) are for all of them together; one whose variants take long to load has three rounds all the same. Each writes FOLDER/NAME.json (bench/ledger)
# as soon as it is measured. One that fails does not stop the others, but the exit code says so.
#
# KILN: the program, target/release/kiln if not set. DEVICE: cuda. PAGES: a folder for pages with charts, none if not set.
# ROWS: other rows than those below, in the same form.
#
# Then: kiln bench --picture docs/img/ledger.svg --ledgers bench/ledger
set -u
minutes=${1:-10}
folder=${2:-bench/ledger}
kiln=${KILN:-target/release/kiln}
device=${DEVICE:-cuda}

# A name, the share of the time that it gets, and what follows `kiln bench`. Batches are smaller than those of peers/compare.py, so that many rounds fit. The last two are
# what guides speak of: CUDA graphs at a small batch, checkpointing of whole blocks.
rows=${ROWS:-"vision_bdh 9 vision_bdh --preset cifar10
lior 8 lior --preset production --set batch=8 --set nudge_every=1 --steps-for-error 10
gpt2-124m 15 decoder --preset gpt2-124m --set batch=16 --also fp8,adam8bit --steps-for-error 10
hydra 14 hydra --preset 100m --set batch=16 --also fp8 --steps-for-error 10
hrm 11 hrm --preset sudoku-moe --set batch=96
polychromic 19 polychromic --preset qwen3-0.6b --set model.dropout=0 --set objective.weight=0 --steps-for-error 5
hydra-4 4 hydra --preset 100m --set batch=4 --only cuda-graph --steps-for-error 5
qwen2.5-1.5b 8 decoder --preset qwen2.5-1.5b --set batch=16 --pass recompute=auto,what=blocks --only recompute --steps-for-error 2"}

mkdir -p "$folder" || exit 1
shares=$(printf '%s\n' "$rows" | awk '{ sum += $2 } END { print sum }')
failed=
while read -r name share args; do
    own=$(awk "BEGIN { print $minutes * $share / $shares }")
    echo "== $name: $own minutes"
    page=
    if [ -n "${PAGES:-}" ]; then
        mkdir -p "$PAGES" && page="--html $PAGES/$name.html"
    fi
    # The arguments are words. shellcheck disable=SC2086
    "$kiln" bench $args --device "$device" --ledger --minutes "$own" --json "$folder/$name.json" $page </dev/null || failed="$failed $name"
done <<EOF
$rows
EOF
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
