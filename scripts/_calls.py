"""Any operation with any shapes: its arguments on a rank, and what its outputs must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stress import FUNCTIONS, OUTPUTS, Options, Spec

from cupy_moe_ar import (
    allgather_residual_rmsnorm,
    moe_finalize_reduce_scatter,
    reduce_scatter,
    reference,
)
from cupy_moe_ar.plan import share_of

__all__ = ["CALLED", "Arguments", "make"]

Array = NDArray[Any]

CALLED: dict[str, Callable[..., None]] = {
    **FUNCTIONS,
    "moe_finalize_reduce_scatter": moe_finalize_reduce_scatter,
    "reduce_scatter": reduce_scatter,
    "allgather": allgather_residual_rmsnorm,
}
_HALVES = {"moe_finalize_reduce_scatter": "moe_finalize", "reduce_scatter": "allreduce"}


@dataclass(frozen=True)
class Arguments:
    """A call of `CALLED[operation]` on one rank, by argument name.

    Attributes:
        inputs: Arrays.
        outputs: What the outputs must hold.
        options: The rest, `workspace` excepted.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    options: dict[str, Any]


def make(spec: Spec, options: Options, number: int, rank: int, size: int) -> Arguments:
    """Make what `spec` describes, with the payload of launch `number`.

    Args:
        spec: Its `operation` is one of `CALLED`; for a half of two-shot `outputs` are those of the
            all-reduce and `launch` has no `use_oneshot`.
        options: Whose seed the payload depends on.
        number: Of the launch.
        rank: Own rank.
        size: Number of ranks.
    """
    given = {"dtype": spec.dtype, "launch_shape": spec.launch_shape, **spec.launch}
    share = share_of(rank, size, spec.tokens)
    own = slice(share.start, share.stop)
    if spec.operation in _HALVES:
        whole = replace(spec, operation=_HALVES[spec.operation], outputs=("allreduce_out",))
        total = whole.expected(options, number, size).allreduce_out
        numbers = {"routed_scaling_factor": spec.numbers["routed_scaling_factor"]}
        return Arguments(
            whole.own(options, number, rank),
            {"reduce_scatter_out": total[own]},
            {**given, **(numbers if whole.operation == "moe_finalize" else {}),
             "comm_dtype": spec.comm_dtype},
        )  # fmt: skip
    common = spec.common(options, number)
    norm = {name: spec.numbers[name] for name in ("rms_eps", "weight_bias")}
    if spec.operation == "allgather":
        rows = spec.rows(options.generator(4, number), 100, spec.tokens, spec.hidden)
        right = reference.finish(
            [rows.astype(np.float64)],
            dtype=spec.dtype,
            residual_in=common.get("residual_in"),
            rms_gamma=common.get("rms_gamma"),
            rms_eps=norm["rms_eps"],
            weight_bias=norm["weight_bias"],
        )
        names = {"allreduce_out": "allgather_out"}
        inputs = {"allgather_in": rows[own], **common}
    else:
        right = spec.expected(options, number, size)
        names = {"allreduce_out": "moe_allreduce_out"} if spec.operation == "moe_reduction" else {}
        inputs = {**spec.own(options, number, rank), **common}
        given["comm_dtype"] = spec.comm_dtype
        if spec.operation == "moe_finalize":
            norm["routed_scaling_factor"] = spec.numbers["routed_scaling_factor"]
    outputs = {names.get(name, name): getattr(right, name)
               for name in OUTPUTS if name in spec.outputs}  # fmt: skip
    return Arguments(inputs, outputs, {**given, **norm})
