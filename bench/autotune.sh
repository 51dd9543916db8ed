#!/bin/sh
# Whether max-autotune would be the stronger opponent, on the five largest rows: bench/autotune.sh [FILE]
#
# Each row has a part of MINUTES (9) of its own, in which the usual step is compiled with max-autotune and timed beside kiln; then one for the expert's. A call is one part;
# it ends with 3 where parts are left, and the same command goes on. What is not ready in its part is noted, too. bench/results.csv has a line for each, with the mode as
# its opponent; README's table takes no notice, unless the mode is put into bench/rows.toml.
#
# KILN, KILN_COMMIT, DEVICE, MACHINE, PYTHON: as in bench/all.sh. ROWS: other rows and modes.
set -u
cd "$(dirname "$0")/.." || exit 1
file=${1:-bench/measured.jsonl}
rows=${ROWS:-"qwen2.5-1.5b:usual+COMPILE=autotune qwen2.5-0.5b:usual+COMPILE=autotune gpt2-124m:usual+COMPILE=autotune hydra:autotune polychromic:autotune
qwen2.5-1.5b:tuned-autotune qwen2.5-0.5b:tuned-autotune gpt2-124m:tuned-autotune hydra:tuned-autotune polychromic:tuned-autotune"}
for row in $rows; do
    said=$("${PYTHON:-python3}" peers/compare.py "$row" --kiln "${KILN:-target/release/kiln}" --device "${DEVICE:-cuda}" --pass bf16=auto --file "$file" --minutes "${MINUTES:-9}")
    ended=$?
    echo "$said"
    [ $ended -eq 0 ] || break
    case $said in *"measured already"*) ;; *) ended=3; break ;; esac
done
machine=${MACHINE:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)}
"${PYTHON:-python3}" peers/table.py "$file" --machine "${machine:?MACHINE names this machine}" || exit 1
exit $ended
