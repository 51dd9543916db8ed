#!/bin/sh
# Every row of README's tables, measured on this machine's GPU: bench/all.sh [FILE] [--alone | --against KILN]
#
# A part: it lasts MINUTES (9) at most and ends with 3 where something is left. The same command goes on, on this machine or on another of the same card to which FILE
# (bench/measured.jsonl) was brought: every side is noted there as soon as a round of it is measured. A side is measured again only if kiln's plan of the row or the
# side's own code has changed.
#
# --against KILN: the guard. Times kiln's own sides of all rows with that program and this one in turn, and fails where this one is slower. That program is a build of the
# commit that the recorded figures are of: a figure that is only remembered is no judge.
# --alone: kiln's own sides, beside nothing.
#
# bench/results.csv has what was measured. Without --alone and --against, the last part fails if a figure is missing or of other code. Then, where cargo is:
# cargo xtask docs writes README's table.
#
# KILN: the program, target/release/kiln if not set. KILN_COMMIT: its commit, that of the checkout if not set. DEVICE: cuda. MACHINE: what results.csv calls this machine,
# the card's name if not set. PYTHON: python3, with torch. MAMBA_SSM: an unpacked source package of mamba-ssm, where Python cannot import it. ROWS: some rows, not all.
set -u
cd "$(dirname "$0")/.." || exit 1
file=bench/measured.jsonl
options=
while [ $# -gt 0 ]; do
    case $1 in
        --against) options="--seconds 1 --warm-up 1 --rounds 5 --against ${2:?--against names a program}"; shift ;;
        --alone) options="--alone" ;;
        -*) echo "bench/all.sh: there is no option $1" >&2; exit 2 ;;
        *) file=$1 ;;
    esac
    shift
done
kiln=${KILN:-target/release/kiln}
python=${PYTHON:-python3}
machine=${MACHINE:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)}
: "${machine:?MACHINE names this machine}"
# The options and rows are words. shellcheck disable=SC2086
"$python" peers/compare.py ${ROWS:-} --kiln "$kiln" --device "${DEVICE:-cuda}" --pass bf16=auto --file "$file" --minutes "${MINUTES:-9}" $options
ended=$?
"$python" peers/table.py "$file" --machine "$machine" || exit 1
[ $ended -eq 0 ] || exit $ended
[ -n "$options${ROWS:-}" ] || "$python" peers/table.py --check --strict --kiln "$kiln"
