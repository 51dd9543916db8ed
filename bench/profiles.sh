#!/bin/sh
# The digest of a step of every recipe on a GPU, to look back at when a row has become slower: bench/profiles.sh [FOLDER]
#
# Writes FOLDER/NAME.md and FOLDER/NAME.toml (bench/profiles): the digest, whose first lines say the card and the commit, and the config that was profiled. One that
# fails does not stop the others, but the exit code says so.
#
# KILN: the program, target/release/kiln if not set. DEVICE: cuda. STEPS: 10. COMMIT: what the program was built from; git is asked if it is not set.
# ROWS: other rows than those below, in the same form: a name, and what follows `kiln profile`.
set -u
folder=${1:-bench/profiles}
kiln=${KILN:-target/release/kiln}
device=${DEVICE:-cuda}
steps=${STEPS:-10}
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

rows=${ROWS:-"vision_bdh vision_bdh --preset cifar10
lior lior --preset production --set batch=8 --set nudge_every=1
gpt2-124m decoder --preset gpt2-124m --set batch=64
qwen2.5-0.5b decoder --preset qwen2.5-0.5b --set batch=32
hydra hydra --preset 100m --set batch=64
hrm hrm --preset sudoku-moe
hrm_lm hrm_lm --preset base
polychromic polychromic --preset qwen3-0.6b --set model.dropout=0"}

mkdir -p "$folder" || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
failed=
while read -r name args; do
    echo "== $name"
    # The arguments are words. shellcheck disable=SC2086
    if "$kiln" profile $args --device "$device" --steps "$steps" --out "$scratch/$name" </dev/null; then
        { echo "commit $commit: kiln profile $args --device $device --steps $steps"; echo; cat "$scratch/$name/digest.md"; } >"$folder/$name.md"
        cp "$scratch/$name/config.toml" "$folder/$name.toml"
    else
        failed="$failed $name"
    fi
done <<EOF
$rows
EOF
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
