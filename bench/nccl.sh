#!/bin/sh
# Ranks on GPUs: checks, then times, on a machine with one GPU: bench/nccl.sh [FOLDER]. Everything is written into FOLDER (bench/nccl); the last lines are a
# table of what passed. It takes about five minutes, and goes on where something fails or hangs.
#
# NCCL: a folder with libnccl.so.2 or libnccl.so.2.gz, version 2.30.3 or later, which lets several ranks share a GPU. KILN: the program, target/release/kiln if not
# set. PYTHON: python3; its own libnccl (PyTorch's) is tried with one rank. ONLY: names of parts (ranks more killed cost overlap torch), all if not set.
set -u
folder=${1:-bench/nccl}
kiln=$(realpath "${KILN:-target/release/kiln}")
python=${PYTHON:-python3}
only=${ONLY:-ranks more killed cost overlap torch}
nccl=${NCCL:?name a folder with libnccl.so.2 or libnccl.so.2.gz}
rm -rf "$folder" && mkdir -p "$folder/lib" || exit 1
folder=$(realpath "$folder")
if [ -f "$nccl/libnccl.so.2" ]; then ln -sf "$(realpath "$nccl/libnccl.so.2")" "$folder/lib/libnccl.so.2"; else gunzip -c "$nccl/libnccl.so.2.gz" > "$folder/lib/libnccl.so.2" || exit 1; fi
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
: > "$folder/table.txt"
began=$(date +%s)

note() { printf '%-34s %-6s %s\n' "$1" "$2" "${3:-}" | tee -a "$folder/table.txt"; }

# try NAME SECONDS COMMAND..: its output in NAME.txt, a line of the table unless it passed. NCCL waits for ever where resources run out.
try() {
    tried=$1 seconds=$2 start=$(date +%s)
    shift 2
    timeout -k 5 "$seconds" "$@" > "$folder/$tried.txt" 2>&1
    status=$?
    took=$(($(date +%s) - start))
    [ $status -eq 0 ] && return 0
    mps_again
    note "$tried" FAIL "status $status after ${took}s: $(tail -n 2 "$folder/$tried.txt" | tr '\n' ' ' | cut -c1-300)"
    return $status
}

has() { case " $only " in *" $1 "*) return 0 ;; *) return 1 ;; esac }

# Several ranks of this one card: MPS lets their kernels run at the same time. Its folder has a short name, as sockets need.
pipes=$(mktemp -d /tmp/mps.XXXXXX)
export CUDA_MPS_PIPE_DIRECTORY="$pipes" CUDA_MPS_LOG_DIRECTORY="$pipes"
mps_ends() { echo quit | timeout 20 nvidia-cuda-mps-control > /dev/null 2>&1; }
with_mps=no
nvidia-cuda-mps-control -d > "$folder/mps.txt" 2>&1 && with_mps=yes
trap 'mps_ends; rm -rf "$pipes"' EXIT
# A client that was killed may leave it unusable.
mps_again() { [ $with_mps = yes ] && mps_ends && sleep 1 && nvidia-cuda-mps-control -d > /dev/null 2>&1; }
note mps "$with_mps" "$(head -n 1 "$folder/mps.txt")"
export LD_LIBRARY_PATH="$folder/lib:${LD_LIBRARY_PATH:-}" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1 NCCL_DEBUG=WARN
"$kiln" doctor 2>&1 | grep -E 'libnccl|^gpu|^versions' | tee "$folder/doctor.txt"

steps="--device cuda --steps 20 --set train.log_every=1 --set train.eval_every=20 --set train.save_every=20 --pass cuda-graph=require"

# The greatest relative difference of two runs' losses, step by step.
cat > "$folder/losses.py" <<'PY'
import json, sys
def losses(run):
    found = {}
    for line in open(run + "/metrics.jsonl"):
        row = json.loads(line)
        found[row["step"]] = row["loss"]
    return found
a, b = map(losses, sys.argv[1:3])
assert len(a) >= 20 and a.keys() == b.keys(), (len(a), len(b), sorted(a)[:3], sorted(b)[:3])
worst = max(abs(a[s] - b[s]) / abs(a[s]) for s in a)
print(f"{len(a)} losses, {a[min(a)]:.5f} to {a[max(a)]:.5f}, differ by {worst:.1e} at most")
sys.exit(worst > 1e-4)
PY

# train NAME RECIPE ARGS..: decoder and hrm in their smallest preset, hydra in `small`. hydra's routers choose tokens by rank, and with the default seed two of
# them are so close in step 8 that the order of sums decides (with one rank too: --optimize none); from there, losses differ by 1e-3.
train() {
    run=$1 recipe=$2
    shift 2
    preset=tiny
    [ "$recipe" = hydra ] && preset="small --seed ${SEED:-1}"
    try "$run" 60 "$kiln" train "$recipe" --preset $preset $steps --out "$folder/$run" "$@"
}

# Whether a run had so many ranks: what trained alone would pass every comparison.
over_nccl() { grep -q "^$2 ranks (data .* over NCCL" "$folder/$1.txt"; }

same_bits() {
    for file in "$folder/$1/checkpoints/step-00000020"/*.safetensors; do
        cmp "$file" "$folder/$2/checkpoints/step-00000020/$(basename "$file")" || return 1
    done
}

if has ranks; then
    for recipe in decoder hydra; do
        train "$recipe-1" "$recipe" || continue
        for ranks in "2" "2 --pass zero=auto" "2 --tensor 2" "2 --pass overlap-gradients=off" "4" "4 --tensor 2" "4 --tensor 2 --pass zero=auto" "2 --pass zero=auto --pass zero-weights=auto" "2 --tensor 2 --pass tensor-parallel=auto,sequence=divided"; do
            name="$recipe-$(echo "$ranks" | sed 's/--pass //g; s/--//g; s/[ =,]/-/g')"
            train "$name" "$recipe" --ranks $ranks || continue
            if ! over_nccl "$name" "${ranks%% *}"; then note "$name" FAIL "it did not train on ${ranks%% *} ranks over NCCL"; continue; fi
            if said=$("$python" "$folder/losses.py" "$folder/$recipe-1" "$folder/$name" 2>&1); then note "$name" ok "$said"; else note "$name" FAIL "$(echo "$said" | tail -n 1)"; fi
        done
        for ranks in "2" "4 --tensor 2"; do
            first="$recipe-$(echo "$ranks" | sed 's/--//g; s/[ =,]/-/g')"
            over_nccl "$first" "${ranks%% *}" || continue
            train "$first-again" "$recipe" --ranks $ranks && over_nccl "$first-again" "${ranks%% *}" || continue
            if same_bits "$first" "$first-again" > "$folder/$first-bits.txt" 2>&1; then note "$first twice" ok "bit for bit"; else note "$first twice" FAIL "$(head -n 1 "$folder/$first-bits.txt")"; fi
        done
        # Two terms add up to the same whatever the order: buckets on a stream of their own change no bit.
        over_nccl "$recipe-2" 2 && over_nccl "$recipe-2-overlap-gradients-off" 2 || continue
        if same_bits "$recipe-2" "$recipe-2-overlap-gradients-off" > "$folder/$recipe-overlap-bits.txt" 2>&1; then note "$recipe overlap off/on" ok "bit for bit"; else note "$recipe overlap off/on" FAIL "$(head -n 1 "$folder/$recipe-overlap-bits.txt")"; fi
    done
fi

# Micro-batches, whose gradients are exchanged once a step; weights that make queries, keys and values at once, divided by heads.
if has more; then
    more() {
        base=$1 recipe=$2 settings=$3
        shift 3
        train "$base-1" "$recipe" $settings || return
        for ranks in "$@"; do
            name="$base-$(echo "$ranks" | sed 's/--pass //g; s/--//g; s/[ =,]/-/g')"
            train "$name" "$recipe" $settings --ranks $ranks || continue
            if ! over_nccl "$name" "${ranks%% *}"; then note "$name" FAIL "it did not train on ${ranks%% *} ranks over NCCL"; continue; fi
            if said=$("$python" "$folder/losses.py" "$folder/$base-1" "$folder/$name" 2>&1); then note "$name" ok "$said"; else note "$name" FAIL "$(echo "$said" | tail -n 1)"; fi
        done
    }
    more accumulate decoder "--set train.accumulate=4" "2" "2 --pass zero=auto" "2 --pass zero=auto --pass zero-weights=auto" "4 --tensor 2"
    more accumulate-hydra hydra "--set train.accumulate=2" "2" "2 --pass zero=auto"
    more gpt2 decoder "--set family=\"gpt2\" --set dim=128 --set head_dim=32 --set heads=4 --set kv_heads=4" "2 --tensor 2" "4 --tensor 2" "2 --tensor 2 --pass tensor-parallel=auto,sequence=divided"
    more hrm hrm "--set train.eval_batches=1" "2" "2 --tensor 2"
fi

profile_ms() { "$python" -c "import json,sys; d=json.load(open(sys.argv[1]+'/profile.json')); print('%.3f' % min(d['plain_ms']))" "$1"; }

if has cost; then
    # One rank through NCCL, inside of the captured step, against none. In turns.
    for round in 1 2; do
        try "alone-$round" 90 "$kiln" profile hydra --preset 100m --pass bf16=auto --device cuda --steps 10 --out "$folder/alone-$round"
        try "through-$round" 90 env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 "$kiln" profile hydra --preset 100m --pass bf16=auto --device cuda --steps 10 --ranks 1 --out "$folder/through-$round"
    done
    if alone=$(for r in 1 2; do profile_ms "$folder/alone-$r"; done | sort -n | head -n 1) && through=$(for r in 1 2; do profile_ms "$folder/through-$r"; done | sort -n | head -n 1) && [ -n "$alone" ] && [ -n "$through" ]; then
        cost=$("$python" -c "print('%.2f' % (100 * ($through / $alone - 1)))")
        if "$python" -c "import sys; sys.exit($cost > 1)"; then result=ok; else result=FAIL; fi
        note "cost of one rank's NCCL" $result "$alone ms alone, $through ms through NCCL: $cost%"
    else
        note "cost of one rank's NCCL" FAIL "not measured"
    fi
fi

if has overlap; then
    port=$(( 20000 + $$ % 20000 ))
    pair() {
        for rank in 1 0; do
            out=$folder/$1-$rank
            RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout -k 5 90 "$kiln" profile decoder --preset gpt2-124m --set train.batch=16 --pass bf16=auto --device cuda --steps 5 --out "$out" $2 > "$folder/$1-$rank.txt" 2>&1 &
        done
        wait
    }
    for how in "overlap" "in-turn --pass overlap-gradients=auto,stream=same" "one-by-one --pass overlap-gradients=off"; do
        name=${how%% *}
        pair "$name" "${how#"$name"}"
        if said=$("$python" -c "
import json, sys
d = json.load(open('$folder/$name-0/profile.json'))
print('%.1f ms a step; exchanges beside it %.0f us, while kernels ran %.0f us' % (min(d['plain_ms']), 1e3 * d['exchange_ms'], 1e3 * d['hidden_ms']))
sys.exit('$name' == 'overlap' and d['hidden_ms'] <= 0)" 2>&1); then note "$name, 2 ranks" ok "$said"; else note "$name, 2 ranks" FAIL "$(echo "$said" | tail -n 1) $(tail -n 1 "$folder/$name-0.txt")"; fi
    done
fi

if has torch; then
    theirs=$("$python" -c "import nvidia.nccl as n; print(list(n.__path__)[0] + '/lib')" 2> /dev/null)
    if [ -n "$theirs" ]; then
        unset NCCL_MULTI_RANK_GPU_ENABLE NCCL_MAX_CTAS
        if try torch-nccl 60 env LD_LIBRARY_PATH="$theirs" RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 "$kiln" train decoder $steps --ranks 1 --out "$folder/torch-nccl"; then note "PyTorch's NCCL, one rank" ok "$(grep -m 1 'over NCCL' "$folder/torch-nccl.txt")"; fi
        # Two ranks of one card are refused, with NCCL's version or its own words.
        timeout -k 5 60 env LD_LIBRARY_PATH="$theirs" NCCL_MULTI_RANK_GPU_ENABLE=1 "$kiln" train decoder $steps --ranks 2 --out "$folder/torch-two" > "$folder/torch-two.txt" 2>&1
        status=$?
        if [ $status -eq 1 ]; then note "PyTorch's NCCL, two ranks" ok "$(grep -m 1 error "$folder/torch-two.txt" | cut -c1-160)"; else note "PyTorch's NCCL, two ranks" FAIL "status $status"; fi
    else
        note "PyTorch's NCCL" skip "not found"
    fi
fi

# Last, since MPS may not survive it.
if has killed; then
    "$kiln" train decoder --device cuda --steps 1000000 --set train.eval_every=1000000 --set train.save_every=1000000 --ranks 2 --out "$folder/killed" > "$folder/killed.txt" 2>&1 &
    parent=$!
    sleep 15
    rank=$(pgrep -P $parent | tail -n 1)
    kill -9 "$rank"
    start=$(date +%s)
    (sleep 30; kill -9 $parent) 2> /dev/null &
    wait $parent
    status=$?
    took=$(($(date +%s) - start))
    if [ $status -eq 137 ] && [ $took -lt 12 ] && grep -q 'was ended by signal 9' "$folder/killed.txt"; then note "a rank is killed" ok "the run ended after ${took}s"; else note "a rank is killed" FAIL "status $status after ${took}s: $(tail -n 1 "$folder/killed.txt")"; fi
fi

echo
cat "$folder/table.txt"
echo "$(grep -c ' ok ' "$folder/table.txt") ok, $(grep -c FAIL "$folder/table.txt") failed, $(($(date +%s) - began)) s"
rm -rf "$folder/lib"
! grep -q FAIL "$folder/table.txt"
