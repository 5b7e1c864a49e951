#!/usr/bin/env bash
# What a change of a kernel must show on GPUs, one step after the other, each with a limit:
#
#     scripts/prove.sh FOLDER [STEP ...]     default: all of them, about 25 minutes on two GPUs
#
# tests     under mpirun with a GPU a rank, with 4 and 8 ranks, and what else of the suite uses GPUs
# stress    100,000 launches and more with as many ranks
# kill      a rank that is killed
# sanitize  compute-sanitizer
# bench     times beside floors and what users would run instead
# sweep     every token count from 1 to 300
#
# More ranks than GPUs run under CUDA MPS, which is started for them. Nothing runs beside anything
# else: jobs whose kernels wait for peers must not share GPUs. FOLDER gets logs and results; the
# last line names the steps that failed.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -ge 1 ]] || die 'which folder shall the results go to?'
mkdir -p "$1"
FOLDER=$(cd "$1" && pwd)
shift
STEPS=("$@")
if (($# == 0)); then STEPS=(tests stress kill sanitize bench sweep); fi
setup test
cd "$ROOT"
failed=()
pair=$((GPU_COUNT > 1 ? GPU_COUNT : 2))

# Runs a command for at most $2 seconds; its output goes to FOLDER/$1.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  limited "$limit" "$@" >"$FOLDER/$name.log" 2>&1 || status=$?
  say "$name: status $status after $((SECONDS - begin)) s: $(tail -n 1 "$FOLDER/$name.log")"
  if ((status != 0)); then failed+=("$name"); fi
}

# Runs the rest of the line under CUDA MPS if $1 ranks have no GPU each.
crowded() {
  local ranks=$1
  shift
  if ((GPU_COUNT == 0 || ranks <= GPU_COUNT)); then
    "$@"
    return
  fi
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d
  "$@"
  echo quit | timeout 30 nvidia-cuda-mps-control || true
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

for name in "${STEPS[@]}"; do
  case $name in
    tests)
      for ranks in 2 4 8; do
        crowded "$ranks" step "tests-$ranks" 400 "${MPIRUN[@]}" -n "$ranks" "$PY" -m pytest -q
      done
      alone=(tests/test_{arrays,checkpoint,dead_peers,flashinfer,leaks}.py
        tests/test_{planned,quant,sharing,streams,torch}.py)
      step tests-alone 400 "$PY" -m pytest -q "${alone[@]}"
      ;;
    stress)
      rm -f "$FOLDER/skew.json"
      for ranks in 2 4 8; do
        crowded "$ranks" step "stress-$ranks" 300 "$PY" scripts/stress.py --ranks "$ranks" \
          --launches 300 --record "$FOLDER/skew.json"
      done
      ;;
    kill) step kill 60 "$PY" scripts/stress.py --ranks "$pair" --kill 1 --seconds 5 ;;
    sanitize) step sanitize 180 env PYTHON="$PY" scripts/sanitize.sh "$FOLDER/sanitizers.log" ;;
    bench)
      bench=("${MPIRUN[@]}" -n "$pair" "$PY" scripts/bench.py "$FOLDER/bench.json" --append --floor)
      small=(--tokens 1 4 16 32 64 128)
      large=(--tokens 1 4 16 32 64 128 256 512 1024 2048 8192 --capacity 8192 --hidden 7168)
      rm -f "$FOLDER/bench.json"
      step bench-finalize 120 "${bench[@]}" "${large[@]}" --baselines --host --prefill 2048
      step bench-finalize-6144 60 "${bench[@]}" "${small[@]}" --hidden 6144 --baselines
      step bench-finalize-twoshot 60 "${bench[@]}" "${large[@]}" --protocol twoshot
      for protocol in oneshot twoshot; do
        step "bench-allreduce-$protocol" 60 "${bench[@]}" "${large[@]}" --op allreduce \
          --protocol "$protocol" --baselines
      done
      step bench-reduction 60 "${bench[@]}" "${small[@]}" --hidden 7168 --op moe_reduction
      step bench-quantised 120 "${bench[@]}" "${small[@]}" --hidden 7168 \
        --quant fp8_static fp8_per_token_group nvfp4 mxfp8 fp8_per_token
      ;;
    sweep) step sweep 90 "${MPIRUN[@]}" -n "$pair" "$PY" scripts/sweep.py "$FOLDER/sweep.json" ;;
    *) die "no step is named $name" ;;
  esac
done
if ((${#failed[@]} > 0)); then die "FAILED: $(IFS=,; echo "${failed[*]}")"; fi
say "all held in $SECONDS s"
