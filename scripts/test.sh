#!/usr/bin/env bash
# Passes the tests, with all set-up: ranks in one process first, then under mpirun. Arguments go to
# every pytest.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

setup test
cd "$ROOT"
[[ -t 1 ]] || export NO_COLOR=1 # Open MPI gives its ranks a terminal

runs=(1)
if ((GPU_COUNT == 0)); then
  runs+=(3)
elif ((GPU_COUNT > 1)); then
  runs+=("$((GPU_COUNT < 8 ? GPU_COUNT : 8))")
fi

# Much of the suite keeps one core busy. On GPUs nothing may run beside it.
beside=()
if ((GPU_COUNT == 0)) && "$PY" -c 'import xdist' 2>/dev/null; then
  beside=(-n "$(($(nproc) < 4 ? $(nproc) : 4))" --dist loadfile)
fi

passed=()
failed=()
for ranks in "${runs[@]}"; do
  command=("$PY" -m pytest -q)
  name='alone'
  if ((ranks > 1)); then
    name="mpirun -n $ranks"
    command=("${MPIRUN[@]}" -n "$ranks" "${command[@]}")
  else
    command+=("${beside[@]}")
  fi
  command+=("$@")
  say "$name: ${command[*]}"
  status=0
  limited 1200 "${command[@]}" || status=$?
  # 5: no test selected, which arguments may bring about.
  if ((status == 0 || (status == 5 && $# > 0))); then
    passed+=("$name")
  else
    failed+=("$name (status $status)")
  fi
done

join() {
  local list
  printf -v list '%s, ' "$@"
  echo "${list%, }"
}
if ((${#failed[@]} > 0)); then
  die "FAILED on $MOE_AR_BACKEND: $(join "${failed[@]}"); passed: $(join "${passed[@]:-none}")"
fi
say "passed on $MOE_AR_BACKEND in $SECONDS s: $(join "${passed[@]}")"
