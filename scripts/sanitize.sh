#!/usr/bin/env bash
# Runs every kernel on the GPU under the tools of compute-sanitizer: memcheck, racecheck, synccheck
# and initcheck. Two ranks are threads of one process; a tool that runs kernels one after the other,
# so that ranks wait for each other in vain, gets one rank, and the last line says so.
#
#     scripts/sanitize.sh [LOG]      default: sanitize.log
#
# Takes three minutes at most. The last line has the errors of each tool; status 0: there are none,
# and every tool came to its end. Settings: PYTHON (default python3), and SANITIZE_S, the seconds
# that one run may take (40).
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PY=${PYTHON:-python3}
LOG=${1:-sanitize.log}
LIMIT=${SANITIZE_S:-40}
TOTAL=170
SERIAL=3 # of sanitize.py: ranks waited in vain
command -v compute-sanitizer >/dev/null || die 'compute-sanitizer is not on PATH'
: >"$LOG"

# Appends to the log what a command prints in at most $1 seconds.
logged() {
  local status=0 limit=$1 left=$((TOTAL - SECONDS))
  shift
  if ((left < 5)); then return 124; fi
  say "$*" | tee -a "$LOG"
  limited $((left < limit ? left : limit)) "$@" >>"$LOG" 2>&1 || status=$?
  say "status $status after $SECONDS s" | tee -a "$LOG"
  return "$status"
}

# Prints the errors that a tool has counted in the lines of the log from $1 on; nothing if it did
# not come to its summary.
errors() {
  tail -n "+$1" "$LOG" | sed -nE \
    -e 's/^=+ ERROR SUMMARY: ([0-9]+) errors?.*/\1/p' \
    -e 's/^=+ RACECHECK SUMMARY: .*\(([0-9]+) errors?.*/\1/p' | tail -n 1
}

# Without a tool: compiles the kernels, and shows that a failure is the tool's finding.
logged 90 "$PY" "$ROOT/scripts/sanitize.py" --ranks 2 || die "fails without a tool, see $LOG"

results=()
failed=0
for tool in memcheck racecheck synccheck initcheck; do
  options=()
  # cuda-bindings asks the driver for functions that it may not have.
  [[ $tool != memcheck ]] || options=(--report-api-errors no)
  for ranks in 2 1; do
    begin=$(($(wc -l <"$LOG") + 1))
    status=0
    logged "$LIMIT" compute-sanitizer --tool "$tool" "${options[@]}" \
      "$PY" "$ROOT/scripts/sanitize.py" --ranks "$ranks" || status=$?
    count=$(errors "$begin")
    # Found something, or ended well; else the next number of ranks may fare better.
    if [[ ${count:-0} != 0 ]] || { ((status == 0)) && [[ -n $count ]]; }; then break; fi
    ((status == SERIAL || status == 124 || status == 137)) || break
  done
  if ((status != 0)) || [[ $count != 0 ]]; then failed=1; fi
  results+=("$tool ${count:-unknown} errors on $ranks ranks, status $status")
done
say "$(printf '%s; ' "${results[@]}")" | tee -a "$LOG"
exit "$failed"
