"""Launches every kernel on small cases; for `sanitized_python`.

    python tests/every_kernel.py RANKS SOURCES [OPERATION ...]

Ranks are threads. Each operation that ran to its end is printed. `OPERATION:FORMAT` is one with
quantised outputs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import cases
import pytest
from cases import BF16, F16, F32, Case, Rank
from test_quant import OPTIONS, quantised
from test_twoshot import PRODUCERS, gather, scatter

from cupy_moe_ar import ArgumentError, Workspace
from cupy_moe_ar import compile as compiling
from cupy_moe_ar.plan import launch_shapes
from cupy_moe_ar.workspace import travels_as

TOKENS = 5
HIDDEN, QUANTISED_HIDDEN = 264, 288  # 33 and 36 vectors: a second group of few lanes
DTYPES = {2: (BF16, None), 3: (F16, F32)}  # by ranks; float32 on the wire: two planes

cases.GUARD_BYTES = 0  # arrays end where their memory does, so that the sanitizer sees the end


def run(name: str, size: int) -> None:
    """Every launch shape, with a row a cluster and with few clusters, threads in two orders."""
    operation, _, quant = name.partition(":")
    hidden = QUANTISED_HIDDEN if quant else HIDDEN
    make = PRODUCERS.get(operation.removesuffix("_reduce_scatter"), PRODUCERS["allreduce"])
    case: Case = make(size, TOKENS, hidden, *DTYPES[size])
    ran: set[str] = set()

    def body(rank: Rank, workspace: Workspace) -> None:
        calls: list[Callable[..., object]] = [partial(scatter, rank, workspace, case)]
        if operation in PRODUCERS:
            call = partial(cases.finalize, rank, workspace, case)
            if quant:
                call = partial(quantised, rank, workspace, case, quant, OPTIONS[quant][0])
            calls = [partial(call, use_oneshot=oneshot) for oneshot in (True, False)]
        elif operation == "allgather":
            calls = [partial(gather, rank, workspace, case, case.rows[0][workspace.share(TOKENS)])]
        for seed, call, shape, clusters in product(
            (0, 1), calls, launch_shapes(hidden // 8), (1 << 20, 2)
        ):
            workspace._backend.seed = seed
            fits = shape.kernel not in ("row", "row2") or clusters >= TOKENS
            refused = contextlib.nullcontext() if fits else pytest.raises(ArgumentError)
            with cases.crowded(workspace, clusters), refused:
                call(launch_shape=shape)
                ran.add(shape.kernel)

    formats = [quant] if quant else []
    cases.Ranks(size).with_workspace(case, operations=[operation], quant=formats)(body)
    assert ran == {"row", "row2", "rows", "rows2", "long"}
    print(name, flush=True)


def main(size: str, sources: str, *operations: str) -> None:
    compiling.sources = lambda: Path(sources)
    wanted = operations or tuple(compiling.OPERATIONS)
    dtype, comm_dtype = DTYPES[int(size)]
    wire = comm_dtype or dtype
    compiling.compile_all(  # at once, in parallel
        [
            compiling.Variant(
                operation,
                protocol,
                dtype,
                travels_as(protocol, dtype, wire),
                int(size),
                quant or None,
            )
            for operation, _, quant in (name.partition(":") for name in wanted)
            for protocol in compiling.OPERATIONS[operation]
        ],
        compiling.CPU,
    )
    for operation in wanted:
        run(operation, int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])
