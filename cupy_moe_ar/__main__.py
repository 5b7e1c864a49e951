"""Tools: `python -m cupy_moe_ar info | check | precompile | bench | demo`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .compile import CPU, CUDA_TARGETS, OPERATIONS, QUANTISING, Variant, prebuild
from .cuda_backend import device_count
from .errors import MoeArError, UnsupportedError
from .formats import FORMATS
from .group import as_group
from .info import gather
from .launch import device_limits
from .selfcheck import DTYPES, TRIALS, Options, check
from .terminal import launcher_rank, parse, positive, progress
from .testing import spawn_ranks
from .workspace import travels_as

__all__ = ["main"]

_PROGRAM = "python -m cupy_moe_ar"
_SCRIPTS = {  # in scripts/ of the checkout, and in the wheel
    "bench": "time an operation: scripts/bench.py",
    "demo": "the main job on realistic input: scripts/demo.py",
}
_MOST_RANKS = 8
_CHECK_S = 1800.0
_say = functools.partial(print, flush=True)


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Tools of cupy_moe_ar.")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")

    about = "what is installed, which devices there are, what is wrong and what to do"
    info = tools.add_parser("info", help=about, description=about)
    info.add_argument("--no-probe", action="store_true", help="start no processes")

    about = "run every operation and protocol on these ranks against the reference"
    more = (
        "Under mpirun the ranks are MPI's, else processes of its own. The last line is PASS or "
        "what failed; the exit status is 0 or 1."
    )
    run = tools.add_parser("check", help=about, description=about, epilog=more)
    run.add_argument("--ranks", type=positive, help="processes to start; default: one for each GPU,"
                     " 2 to 8 of them; under mpirun: those of MPI")  # fmt: skip
    run.add_argument("--backend", choices=("cuda", "cpu", "auto"))
    run.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"],
                     help="activations, or activations/wire; default: bfloat16")  # fmt: skip
    run.add_argument("--quant", choices=FORMATS, nargs="+", default=[],
                     help="quantised outputs too, of these formats")  # fmt: skip
    run.add_argument("--hidden", type=positive, nargs="+", help="row lengths")
    run.add_argument("--tokens", type=positive, nargs="+", help="token counts")
    run.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS",
                     help="bound of a wait for a peer; default: 30")  # fmt: skip

    about = "compile kernels into a folder for MOE_AR_PREBUILT; needs no GPU"
    compiler = tools.add_parser("precompile", help=about, description=about)
    compiler.add_argument("--out", type=Path, required=True, metavar="DIR")
    compiler.add_argument("--arch", type=_arch, nargs="+", help="such as sm_90a, or cpu; default: "
                          f"the GPUs', else {' '.join(CUDA_TARGETS)}")  # fmt: skip
    compiler.add_argument("--ranks", type=positive, nargs="+", default=[2, 4, 8],
                          help="world sizes; default: 2 4 8")  # fmt: skip
    compiler.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"],
                          help="as check's; default: bfloat16")  # fmt: skip
    compiler.add_argument("--quant", choices=FORMATS, nargs="+", default=[],
                          help="formats of quantised outputs, besides none")  # fmt: skip
    compiler.add_argument("--operation", choices=OPERATIONS, nargs="+", default=list(OPERATIONS),
                          help="default: all")  # fmt: skip

    for name, words in _SCRIPTS.items():
        tools.add_parser(name, help=words, add_help=False)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run a tool; return its exit status."""
    words = sys.argv[1:] if words is None else list(words)
    if words and words[0] in _SCRIPTS:
        return _run_script(*words)
    options = parse(arguments(), words)
    tools = {"info": _info, "check": _check, "precompile": _precompile}
    return tools[options.tool](options)


def _arch(text: str) -> str:
    if text != CPU and not re.fullmatch(r"sm_\d+[af]?", text):
        raise argparse.ArgumentTypeError(f"must be {CPU} or such as sm_90a; got {text}")
    return text


# ---- info ----------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    if launcher_rank():  # rank 0 tells of the machine; the others only join it
        with contextlib.suppress(UnsupportedError):
            as_group(None)
        return 0
    report = gather(probe=not options.no_probe)
    _say("\n".join(report.lines()))
    return 0 if report.backends else 1


# ---- check ---------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    chosen = Options(
        options.backend,
        tuple(options.dtype),
        tuple(options.quant),
        options.hidden and tuple(options.hidden),
        options.tokens and tuple(options.tokens),
        options.timeout,
    )
    if options.ranks is None and launcher_rank() is not None:
        return _check_mpi(chosen)
    ranks = options.ranks or min(max(2, _device_count(options.backend)), _MOST_RANKS)
    outcomes = spawn_ranks(ranks, check, chosen, _say, timeout_s=_CHECK_S)
    faults = {outcome.value: None for outcome in outcomes if outcome.value}
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            faults[f"rank {rank}: {_last_line(outcome.error)}"] = None
            print(f"[rank {rank}] {outcome.error}", file=sys.stderr, flush=True)
    return _verdict(ranks, chosen, "; ".join(faults))


def _check_mpi(chosen: Options) -> int:
    try:
        world = as_group(None)
    except UnsupportedError as error:
        return _verdict(1, chosen, str(error))
    rank, size = world.Get_rank(), world.Get_size()
    try:
        fault = check(world, chosen, _say)
    except BaseException:
        print(f"[rank {rank}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        _verdict(size, chosen, f"rank {rank}: {_last_line(traceback.format_exc())}")
        if size > 1:
            world.Abort(1)  # type: ignore[attr-defined]
        raise
    return _verdict(size, chosen, fault) if rank == 0 else int(bool(fault))


def _verdict(ranks: int, chosen: Options, fault: str | None) -> int:
    sys.stderr.flush()
    if fault:
        _say(f"FAILED: {fault}")
        return 1
    formats = ", ".join(chosen.dtypes + chosen.quant)
    _say(f"PASS: {len(TRIALS)} operations and protocols on {ranks} ranks, {formats}")
    return 0


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _device_count(backend: str | None) -> int:
    if (backend or os.environ.get("MOE_AR_BACKEND")) == "cpu":
        return 0
    try:
        return device_count()
    except UnsupportedError:
        return 0


# ---- precompile ----------------------------------------------------------------------------------


def _precompile(options: argparse.Namespace) -> int:
    try:
        arches = options.arch or _visible_arches() or CUDA_TARGETS
        variants = [
            Variant(operation, protocol, dtype, travels_as(protocol, dtype, wire), ranks, quant)
            for quant in (None, *options.quant)
            for operation in options.operation
            if quant is None or operation in QUANTISING
            for protocol in OPERATIONS[operation]
            for dtype, wire in map(DTYPES.__getitem__, options.dtype)
            for ranks in options.ranks
        ]
        with progress():
            paths = prebuild(dict.fromkeys(variants), dict.fromkeys(arches), options.out)
    except MoeArError as error:
        _say(f"FAILED: {error}")
        return 1
    size = sum(path.stat().st_size for path in paths) / 2**20
    ranks, formats = map(str, options.ranks), (*options.dtype, *options.quant)
    _say(f"{len(paths)} kernel modules, {size:.1f} MiB, for {' '.join(arches)}, "
         f"{' '.join(ranks)} ranks, {' '.join(formats)}")  # fmt: skip
    _say(f"export MOE_AR_PREBUILT={options.out.absolute()}")
    return 0


def _visible_arches() -> list[str]:
    return sorted({device_limits(device).arch for device in range(_device_count(None))})


# ---- scripts -------------------------------------------------------------------------------------


def _run_script(name: str, *words: str) -> int:
    package = Path(__file__).resolve().parent
    folder = next(f for f in (package / "scripts", package.parent / "scripts") if f.is_dir())
    sys.path.insert(0, str(folder))
    sys.argv = [f"{_PROGRAM} {name}", *words]
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
