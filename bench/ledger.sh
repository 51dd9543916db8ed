#!/bin/sh
# The ledger of every recipe on a GPU, as data: bench/ledger.sh [MINUTES] [FOLDER]
#
# MINUTES (25) are for all of them together; one whose variants take long to load has three rounds all the same. Each writes FOLDER/NAME.json (bench/ledger)
# as soon as it is measured. One that fails does not stop the others, but the exit code says so.
#
# KILN: the program, target/release/kiln if not set. DEVICE: cuda. PAGES: a folder for pages with charts, none if not set.
# ROWS: other rows than those below, in the same form.
#
# Then: kiln bench --picture docs/img/ledger.svg --ledgers bench/ledger
set -u
minutes=${1:-25}
folder=${2:-bench/ledger}
kiln=${KILN:-target/release/kiln}
device=${DEVICE:-cuda}

# A name, the share of the time that it gets, and what follows `kiln bench`. The steps are those of peers/compare.py.
rows=${ROWS:-"hydra 4 hydra --preset 100m --set batch=64 --pass bf16=auto --also fp8
gpt2-124m 4 decoder --preset gpt2-124m --set batch=64 --pass bf16=auto --also fp8,sparse-2:4,adam8bit
gpt2-124m-blocks 1 decoder --preset gpt2-124m --set batch=64 --pass bf16=auto --pass recompute=auto,what=blocks --only recompute
vision_bdh 3 vision_bdh --preset cifar10 --pass bf16=auto
hrm 3 hrm --preset sudoku-moe --pass bf16=auto
polychromic 4 polychromic --preset qwen3-0.6b --set model.dropout=0 --set objective.weight=0 --pass bf16=auto
lior 2 lior --preset production --set batch=8 --pass bf16=auto"}

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
