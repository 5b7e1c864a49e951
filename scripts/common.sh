# shellcheck shell=bash
# Set-up shared by demo.sh, test.sh and .ci/run, which source this file and call `setup LEVEL`.
# LEVEL is demo, test or ci: what the environment must be able to do.
#
# setup leaves behind, exported where Python reads it:
#   PY               interpreter of the environment in use
#   MPIRUN           array: launcher of the MPI that mpi4py loads, with the options it needs
#   MOE_AR_BACKEND   cpu or cuda, with GPU_COUNT usable GPUs
#   CXX              compiler of the CPU backend
#   PYTHONPATH       begins with this checkout, so nothing need be installed
#
# Settings: PYTHON (interpreter), MOE_AR_BACKEND (cpu, cuda, auto), MOE_AR_CUDA (12 or 13: which
# CuPy is installed where one is needed; 12 by default), MPIEXEC (launcher), CXX (compiler).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPT=$(basename "$0")
VENV=$ROOT/.venv
PY=''
MPIRUN=()
GPU_COUNT=0
DRIVER=''
CHILD=''

say() { printf '%s: %s\n' "$SCRIPT" "$*"; }

die() {
  printf '%s: error: %s\n' "$SCRIPT" "$*" >&2
  exit 1
}

# Runs a command for at most $1 seconds, without a terminal. It is a background job so that Ctrl-C
# reaches this script, which ends it: timeout(1) leads a process group of its own.
limited() {
  local seconds=$1 status=0
  shift
  timeout -k 15 "$seconds" "$@" </dev/null &
  CHILD=$!
  wait "$CHILD" || status=$?
  CHILD=''
  if ((status == 124 || status == 137)); then
    say "ended after its limit of $seconds s: $*" >&2
  fi
  return "$status"
}

on_signal() {
  if [[ -n $CHILD ]]; then
    kill -TERM "$CHILD" 2>/dev/null || true
    wait "$CHILD" 2>/dev/null || true
  fi
  exit 130
}
trap on_signal INT TERM

# ---- Python --------------------------------------------------------------------------------------

# Prints the path of the interpreter that $1 starts, if it is Python 3.10 or newer.
python_path() {
  "$1" -c 'import sys
if sys.version_info < (3, 10): sys.exit(1)
print(sys.executable)' 2>/dev/null
}

find_python() {
  local name
  if [[ -n ${PYTHON:-} ]]; then
    python_path "$PYTHON" || die "PYTHON=$PYTHON is not a Python of version 3.10 or newer"
    return
  fi
  for name in python3 python3.{14,13,12,11,10} python; do
    if python_path "$name"; then return; fi
  done
  die "Python 3.10 or newer is needed and none is on PATH (Debian, Ubuntu: apt-get install" \
    "python3 python3-venv); PYTHON=/path/to/python3 names one elsewhere"
}

# Prints what interpreter $1 lacks for LEVEL $2 on the chosen backend, a line each.
lacks() {
  local launch=mpi
  if ((GPU_COUNT == 1)); then launch=in-process; fi
  timeout 120 "$1" - "$2" "$MOE_AR_BACKEND" "$launch" <<'PYTHON' || echo 'an end of this check'
import importlib
import sys

level, backend, launch = sys.argv[1:]


def mpi():
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI


def pytest():
    import pytest

    assert pytest.version_tuple >= (9,), f"version {pytest.__version__} is older than 9"


def cupy():
    import cupy

    cupy.cuda.runtime.getDeviceCount()


def nvrtc():
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()


needs = {"numpy": None, "ml_dtypes": None}
if launch == "mpi":
    needs["mpi4py"] = mpi
if backend == "cuda":
    needs |= {"cupy": cupy, "cuda.bindings.driver": None, "cuda.bindings.nvrtc": nvrtc}
if level != "demo":
    needs |= {"pytest": pytest, "hypothesis": None}
if level == "ci":
    needs |= dict.fromkeys(["ruff", "mypy", "clang_format"]) | {"cuda.bindings.nvrtc": nvrtc}
for name, check in needs.items():
    try:
        check() if check else importlib.import_module(name)
    except ModuleNotFoundError:
        print(name)
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        print(f"{name} ({reason.splitlines()[0]})")
PYTHON
}

create_venv() {
  local base=$1 tools
  say "creating $VENV with $base"
  if "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    limited 300 "$base" -m venv --clear "$VENV" || die "$base could not create it"
    return
  fi
  # Debian keeps ensurepip apart; virtualenv brings a pip of its own.
  tools=$(mktemp -d)
  if ! limited 300 "$base" -m pip install --quiet --target "$tools" virtualenv ||
    ! PYTHONPATH=$tools limited 300 "$base" -m virtualenv --quiet --clear "$VENV"; then
    rm -rf "$tools"
    die "$base can make no virtual environment: it lacks ensurepip, and virtualenv could not be" \
      "installed either (Debian, Ubuntu: apt-get install python3-venv)"
  fi
  rm -rf "$tools"
}

# Prints the extra that brings CuPy for the driver found, or nothing on the CPU backend.
cuda_extra() {
  local major=${DRIVER%%.*} cuda=${MOE_AR_CUDA:-12} least
  if [[ $MOE_AR_BACKEND != cuda ]]; then return; fi
  case $cuda in
    12) least=525 ;;
    13) least=580 ;;
    *) die "MOE_AR_CUDA must be 12 or 13; got $cuda" ;;
  esac
  if ((major < least)); then
    die "CUDA $cuda needs an NVIDIA driver of version $least or newer; this one is $DRIVER" \
      "(update it, or run with MOE_AR_BACKEND=cpu)"
  fi
  echo "cuda$cuda"
}

# Makes .venv fit for LEVEL $1; further arguments name extras to install besides.
use_venv() {
  local level=$1 base=$2 stamp=$VENV/.cupy_moe_ar cuda want extras=()
  shift 2
  PY=$VENV/bin/python
  want=$(sha256sum <"$ROOT/pyproject.toml")
  if ! python_path "$PY" >/dev/null; then create_venv "$base"; fi
  if (($# == 0)) && [[ -f $stamp && $(<"$stamp") == "$want" && -z $(lacks "$PY" "$level") ]]; then
    say "using $VENV"
    return
  fi
  cuda=$(cuda_extra)
  if [[ -n $cuda ]]; then extras+=("$cuda"); fi
  case $level:$cuda in
    demo:*) ;;
    *:cuda13) extras+=(tools) ;; # `test` would bring CUDA 12's compiler
    *) extras+=(test) ;;
  esac
  if (($# == 0)) && [[ -z $(command -v mpirun || command -v mpiexec) ]]; then extras+=(mpi); fi
  extras+=("$@")
  say "installing the package${extras[*]:+ with extras ${extras[*]}} into $VENV"
  rm -f "$stamp"
  PYTHONWARNINGS=ignore limited 1800 "$PY" -m pip install --quiet --disable-pip-version-check \
    --editable "$ROOT${extras[*]:+[$(IFS=,; echo "${extras[*]}")]}" ||
    die "pip could not install the dependencies (see above); on a machine without a network," \
      "activate an environment that has them, or name its interpreter in PYTHON"
  echo "$want" >"$stamp"
}

# ---- MPI -----------------------------------------------------------------------------------------

# Prints launchers worth a try for interpreter $1, best first: they must belong to its MPI library.
launchers() {
  local folder name
  if [[ -n ${MPIEXEC:-} ]]; then
    command -v "$MPIEXEC" || true
    return
  fi
  for folder in "$(dirname "$1")" "$(library_folder "$1")/../bin"; do
    for name in mpirun mpiexec; do
      if [[ -x $folder/$name ]]; then echo "$folder/$name"; fi
    done
  done
  type -ap mpirun mpiexec || true
}

# Prints the folder of the MPI library that interpreter $1 loads.
library_folder() {
  timeout 60 "$1" - <<'PYTHON'
import os

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI

with open("/proc/self/maps") as maps:
    paths = [line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line]
print(os.path.dirname(paths[0]) if paths else "/")
PYTHON
}

MPI_PROBE='from mpi4py.MPI import COMM_WORLD as world; size = world.allreduce(1)
if world.rank == 0: print(f"world of {size} ranks\n", end="")'

# Sets MPIRUN for interpreter $1. Fails, with the reason in MPI_FAULT, if no launcher works with it.
find_mpirun() {
  local launcher output
  MPI_FAULT="no ${MPIEXEC:-mpirun or mpiexec} was found"
  while read -r launcher; do
    MPIRUN=("$launcher")
    output=$(timeout 30 "$launcher" --version </dev/null 2>&1 || true)
    if [[ $output == *'Open MPI'* || $output == *OpenRTE* ]]; then
      # More ranks than cores are welcome, and each rank needs all cores for its threads.
      MPIRUN+=(--oversubscribe --bind-to none)
      if ((EUID == 0)); then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      fi
    fi
    output=$(timeout -k 5 60 "${MPIRUN[@]}" -n 2 "$1" -c "$MPI_PROBE" </dev/null 2>&1 || true)
    case $output in
      *'world of 2 ranks'*) return 0 ;;
      *'world of 1 ranks'*)
        MPI_FAULT="under $launcher every rank says it is alone: it belongs to another MPI than"
        MPI_FAULT+=" the one that mpi4py of $1 loads"
        ;;
      *) MPI_FAULT="two ranks did not start under $launcher: ${output:-no output}" ;;
    esac
  done < <(launchers "$1" | awk '!seen[$0]++')
  MPIRUN=()
  return 1
}

# ---- backend -------------------------------------------------------------------------------------

# Prints "COUNT|DRIVER|UUIDS|WORDS" for the usable GPUs, as interpreter $1 finds them.
# CUDA_VISIBLE_DEVICES counts; UUIDS is empty where all visible GPUs are usable.
find_gpus() {
  timeout 60 "$1" - <<'PYTHON'
import collections
import os
import shutil
import subprocess
import sys


def answer(count, words, driver="", uuids=()):
    print(count, driver, ",".join(uuids), words, sep="|")
    sys.exit()


command = shutil.which("nvidia-smi") or answer(0, "no nvidia-smi on PATH")
query = "--query-gpu=index,uuid,compute_cap,driver_version,name"
result = subprocess.run([command, query, "--format=csv,noheader"], capture_output=True, text=True)
if result.returncode:
    text = (result.stdout + result.stderr).strip().splitlines()
    answer(0, f"nvidia-smi failed: {text[0] if text else result.returncode}")
gpus = [line.split(", ", 4) for line in result.stdout.splitlines() if line.count(", ") >= 4]
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
if visible is not None:
    named = []
    for entry in visible.split(","):
        entry = entry.strip()
        found = [gpu for gpu in gpus if entry == gpu[0] or (entry and gpu[1].startswith(entry))]
        if not found:  # CUDA stops at the first name that means nothing, too
            break
        named += found[:1]
    gpus = named
usable = [gpu for gpu in gpus if gpu[2][:1].isdigit() and float(gpu[2]) >= 8.0]
where = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
if not usable:
    old = ", ".join(f"{name}: sm_{cap.replace('.', '')}" for _, _, cap, _, name in gpus)
    answer(0, f"no usable GPU{where}" + (f"; sm_80 or newer is needed, found {old}" if old else ""))
kinds = collections.Counter((name, "sm_" + cap.replace(".", "")) for _, _, cap, _, name in usable)
words = "; ".join(f"{count} x {name}, {sm}" for (name, sm), count in kinds.items())
uuids = [gpu[1] for gpu in usable] if len(usable) < len(gpus) else []
answer(len(usable), words + where, usable[0][3], uuids)
PYTHON
}

choose_backend() {
  local wanted=${MOE_AR_BACKEND:-auto} words uuids
  case $wanted in
    cpu) words='MOE_AR_BACKEND=cpu' ;;
    cuda | auto)
      IFS='|' read -r GPU_COUNT DRIVER uuids words < <(
        find_gpus "$1" || echo '0|||nvidia-smi could not be understood'
      )
      if [[ $wanted == cuda ]] && ((GPU_COUNT == 0)); then
        die "MOE_AR_BACKEND=cuda, but $words"
      fi
      ;;
    *) die "MOE_AR_BACKEND must be cpu, cuda or auto; got $wanted" ;;
  esac
  if ((GPU_COUNT > 0)); then
    export MOE_AR_BACKEND=cuda
    if [[ -n $uuids ]]; then export CUDA_VISIBLE_DEVICES=$uuids; fi
  else
    export MOE_AR_BACKEND=cpu
  fi
  say "backend: $MOE_AR_BACKEND ($words)"
}

# Sets CXX to the first compiler that works.
find_compiler() {
  local compiler
  for compiler in "${CXX:-}" g++ c++ clang++; do
    # Unquoted: CXX may hold options or a wrapper.
    # shellcheck disable=SC2086
    if [[ -n $compiler ]] && echo '#include <atomic>' |
      timeout 60 $compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
      export CXX=$compiler
      return
    fi
  done
  die "the CPU backend compiles its kernels and found no working C++ compiler (tried" \
    "CXX=${CXX:-}, g++, c++, clang++); install one (Debian, Ubuntu: apt-get install g++; Fedora:" \
    "dnf install gcc-c++) or name it in CXX"
}

# On one GPU the ranks are threads of one process, and no launcher is needed.
ready_to_launch() { ((GPU_COUNT == 1)) || find_mpirun "$1"; }

# ---- all of it -----------------------------------------------------------------------------------

setup() {
  local level=$1 base missing
  command -v timeout >/dev/null || die "timeout (GNU coreutils) is needed and not on PATH"
  base=$(find_python)
  choose_backend "$base"
  if [[ $MOE_AR_BACKEND == cpu ]]; then find_compiler; fi
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

  missing=$(lacks "$base" "$level")
  if [[ -z $missing ]] && ready_to_launch "$base"; then
    PY=$base
    say "using $PY as it is"
  else
    missing=${missing:-"a working MPI ($MPI_FAULT)"}
    say "$base lacks ${missing//$'\n'/, }"
    use_venv "$level" "$base"
    if ! ready_to_launch "$PY"; then
      if [[ -n ${MPIEXEC:-} ]]; then die "$MPI_FAULT"; fi
      # An MPI is there, but mpi4py's wheel cannot work with it.
      say "$MPI_FAULT; installing MPICH"
      use_venv "$level" "$base" mpi
      ready_to_launch "$PY" || die "$MPI_FAULT"
    fi
  fi
  export PATH=${PY%/*}:$PATH
}
