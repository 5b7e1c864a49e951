"""The main job on realistic input: run it, compare it with float64, say how long it took.

    mpirun -n 4 python scripts/demo.py            a rank a process
    python scripts/demo.py --in-process 2         a rank a thread

Exit status 0: every launch was right on every rank, and the same on all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import _checkout  # noqa: F401
import numpy as np
from _ranks import Rank, choose_backend, parse, positive, start, table
from _workload import (
    DTYPES,
    OPERATIONS,
    Case,
    Preset,
    common_inputs,
    expected,
    expert_parallel_inputs,
)

from cupy_moe_ar import DType, Workspace, reference
from cupy_moe_ar.checks import comm_dtype_of
from cupy_moe_ar.group import Group

OUTPUTS = ("allreduce_out", "residual_out", "norm_out")
OPERATION = OPERATIONS["moe_finalize"]

# Against the reference that rounds where the contract does. It computes in float64, the kernel in
# float32: near a tie the two may round apart, which changes an error's size but little.
MEAN_SLACK = 1.01
MAX_SLACK = 1.5
# With float32 activations float32's own rounding is what is measured.
FLOAT32_SLACK = 8.0


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=positive, nargs="+", help="token count of each launch")
    parser.add_argument("--hidden", type=positive, help="default: 7168 on GPUs, else 1024")
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument("--experts", type=positive, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--comm-dtype", choices=DTYPES, help="what travels; default: the dtype")
    parser.add_argument("--in-process", type=positive, metavar="RANKS", help="ranks as threads")
    return parser


def demo(group: Group, options: argparse.Namespace) -> int:
    """Run one rank of the demo; return its exit status, which is the same on all."""
    backend = choose_backend(group)
    hidden = options.hidden or (7168 if backend == "cuda" else 1024)
    token_nums = options.tokens or ([1, 16, 3, 128, 64] if backend == "cuda" else [1, 8, 3, 16])
    dtype = DType.parse(options.dtype)
    comm_dtype = comm_dtype_of(dtype, options.comm_dtype)
    model = Preset(hidden, options.top_k, shared=True, factor=2.5)
    if options.top_k > options.experts:
        raise ValueError(f"--top-k must be at most --experts; got {options.top_k}")

    workspace = Workspace(
        group,
        max_token_num=max(token_nums),
        hidden_dim=hidden,
        dtype=dtype,
        comm_dtype=comm_dtype,
        operations=["moe_finalize"],
        backend=backend,
        timeout_s=60.0,
    )
    with workspace:
        rank = Rank(group, workspace)
        devices = group.allgather(rank.device_name)
        rank.say(f"{OPERATION.call.__name__} on the {workspace.backend} backend")
        for index, device in enumerate(devices):
            rank.say(f"rank {index} of {rank.size}: {device}")
        rank.say(
            f"hidden {hidden}, top-{model.top_k} of {options.experts} experts, shared expert, "
            f"factor {model.factor}, {dtype.value}, {comm_dtype.value} travels\n"
        )
        cases = [Case(tokens, model, dtype, comm_dtype) for tokens in token_nums]
        launches = [Launch(rank, workspace, case, options.experts) for case in cases]
        rank.meet()
        for launch in launches:  # one after the other, nothing in between
            launch()
        rank.meet()
        rows = []
        held = True
        for launch in launches:
            told, right = launch.judge()
            held = held and right
            rows += told
        rank.say(table(HEAD, rows))
        rank.say("\nall held" if held else "\nNOT all held")
    return 0 if held else 1


HEAD = ("tokens", "us/launch", "output", "mean |error|", "contract's", "rounding floor",
        "max |error|", "contract's", "rounding floor", "ranks equal", "held")  # fmt: skip


class Launch:
    """One call on one rank: its arguments, and what came of it."""

    def __init__(self, rank: Rank, workspace: Workspace, case: Case, experts: int) -> None:
        """Make the arguments."""
        self.rank = rank
        self.case = case
        self.inputs = expert_parallel_inputs(case, rank.index, experts)
        self.common = common_inputs(case)
        self.dtype = reference.numpy_dtype(case.dtype)
        poison = np.full((case.tokens, case.model.hidden), np.nan, self.dtype)
        self.outputs = {name: rank.put(poison) for name in OUTPUTS}
        given = {**self.inputs, **self.common}
        arrays = {name: rank.put(array) for name, array in given.items() if array is not None}
        self._call: Callable[[], None] = lambda: OPERATION.call(
            workspace=workspace,
            **arrays,
            **self.outputs,
            **OPERATION.options(case),
            stream=rank.stream,
        )

    def __call__(self) -> None:
        """Enqueue it."""
        self._call()

    def judge(self) -> tuple[list[tuple[str, ...]], bool]:
        """Compare the outputs with float64, then time the launch; return lines and verdict."""
        rank, case = self.rank, self.case
        found = {name: rank.get(array, self.dtype) for name, array in self.outputs.items()}
        equal = {name: rank.same_bits(array) for name, array in found.items()}
        partials = rank.group.allgather(OPERATION.partial(case, self.inputs))
        exact = expected(case, partials, self.common, exact=True)
        model = expected(case, partials, self.common, exact=False)
        errors = reference.errors(found, exact)
        contract = reference.errors(model, exact)
        floor = reference.rounding_floor(exact, case.dtype)
        us = rank.time_us(self._call)
        lines = []
        all_right = True
        for name in OUTPUTS:
            (mean, worst), (model_mean, model_worst) = errors[name], contract[name]
            loose = FLOAT32_SLACK if case.dtype is DType.FLOAT32 else 1.0
            right = equal[name] and (
                mean <= MEAN_SLACK * loose * model_mean and worst <= MAX_SLACK * loose * model_worst
            )
            right = all(rank.group.allgather(right))
            all_right = all_right and right
            first = name == OUTPUTS[0]
            lines.append(
                (
                    str(case.tokens) if first else "",
                    f"{us:.1f}" if first else "",
                    name,
                    *(f"{x:.3e}" for x in (mean, model_mean, floor[name][0])),
                    *(f"{x:.3e}" for x in (worst, model_worst, floor[name][1])),
                    "yes" if equal[name] else "NO",
                    "yes" if right else "NO",
                )
            )
        return lines, all_right


if __name__ == "__main__":
    given = parse(arguments())
    start(lambda group: demo(group, given), given.in_process)
