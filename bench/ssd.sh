#!/bin/sh
# Mamba-2 on a GPU: checks, then times: bench/ssd.sh [FOLDER]. Everything is written into FOLDER (bench/ssd); the last line says what failed.
#
# KILN: the program, target/release/kiln if not set. PYTHON: with PyTorch, and mamba-ssm where it runs; python3. DEVICE: cuda.
set -u
folder=${1:-bench/ssd}
kiln=${KILN:-target/release/kiln}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
mkdir -p "$folder" || exit 1
failed=
run() {
    name=$1
    shift
    echo "== $name: $*"
    "$@" > "$folder/$name.txt" 2>&1 || failed="$failed $name"
    tail -n "${LINES_SHOWN:-6}" "$folder/$name.txt"
}

# Right first: every case of the ops against the CPU in three types, the pass off and on, PyTorch's numbers.
run ops-ssd "$kiln" check ops ssd --device "$device"
for shape in "x 900" "x 16k"; do run "ops-ssd-${shape#x }" "$kiln" check ops ssd --case "$shape" --device "$device"; done
run ops-short-conv "$kiln" check ops short_conv --device "$device"
run passes "$kiln" check passes --device "$device"
for file in hrm-mamba2 decoder-mamba2; do
    run "golden-$file" "$kiln" check golden "reference/golden/$file.safetensors" --device "$device"
    run "golden-$file-bf16" "$kiln" check golden "reference/golden/$file.safetensors" --device "$device" --pass bf16=auto
    run "golden-$file-off" "$kiln" check golden "reference/golden/$file.safetensors" --device "$device" --pass chunked-scan=off
done

# Two runs, bit for bit.
rm -rf "$folder/a" "$folder/b"
for name in a b; do
    run "train-$name" "$kiln" train hrm --preset sudoku --device "$device" --steps 200 --pass bf16=auto --pass cuda-graph=require --set 'mixer="mamba2"' --out "$folder/$name"
done
run bitwise cmp "$folder/a/checkpoints/step-00000200/model.safetensors" "$folder/b/checkpoints/step-00000200/model.safetensors"

# How fast: the op forward and backward at 1k, 8k and 64k, chunks of 128 and of 64; our own flash attention; the peers.
LINES_SHOWN=40
run bench-ssd "$kiln" bench ops --only ssd --device "$device"
run bench-short-conv "$kiln" bench ops --only short_conv --device "$device"
run bench-attention "$kiln" bench ops --only attention --device "$device"
run peers "$python" peers/ssd.py --json "$folder/peers.json"
# A step of hrm, with either mixer; what the pass gains.
for mixer in attention mamba2; do
    run "hrm-$mixer" "$kiln" bench hrm --preset sudoku --device "$device" --pass bf16=auto --set "mixer=\"$mixer\""
done
run ledger "$kiln" bench hrm --preset sudoku --device "$device" --pass bf16=auto --set 'mixer="mamba2"' --ledger --only chunked-scan,fuse-pointwise,fuse-norm --rounds 3
# Memory by length: it must double with the length.
for seq in 1024 8192 65536; do
    run "plan-$seq" "$kiln" plan decoder --for-sm 90 --pass bf16=auto --set 'family="mamba2"' --set dim=768 --set layers=24 --set heads=24 --set head_dim=64 --set state=128 --set seq=$seq --set batch=1
done
# A decode step of a model of 130M parameters costs the same wherever it stands.
run generate "$kiln" bench generate --device "$device" --pass bf16=auto --set 'family="mamba2"' --set dim=768 --set layers=24 --set heads=24 --set head_dim=64 --set state=128

echo "failed:${failed:- nothing}"
[ -z "$failed" ]
