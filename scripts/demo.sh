#!/usr/bin/env bash
# Runs the main job, with all set-up. Arguments go to scripts/demo.py.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

setup demo
if ((GPU_COUNT == 1)); then
  command=("$PY" "$ROOT/scripts/demo.py" --in-process 2)
else
  ranks=$((GPU_COUNT == 0 ? 4 : GPU_COUNT < 8 ? GPU_COUNT : 8))
  command=("${MPIRUN[@]}" -n "$ranks" "$PY" "$ROOT/scripts/demo.py")
fi
say "running: ${command[*]} $*"
status=0
limited 600 "${command[@]}" "$@" || status=$?
if ((status != 0)); then die "the demo failed with status $status"; fi
say "all held"
