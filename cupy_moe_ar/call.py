"""One call, fully described and checked: the rules of each operation in its `describe_*` function.

What they share stands in `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .abi import VECTOR_BYTES, Flag, Params
from .checks import QUANTISED, Checker, Home
from .plan import share_of
from .types import DType

__all__ = [
    "Call",
    "describe_allgather",
    "describe_allreduce",
    "describe_moe_finalize",
    "describe_moe_finalize_reduce_scatter",
    "describe_moe_reduction",
    "describe_reduce_scatter",
]

_POINTERS = (
    "allreduce_in",
    "route_index",
    "route_scale",
    "shared_expert",
    "residual_in",
    "rms_gamma",
    "allreduce_out",
    "residual_out",
    "norm_out",
    "scale_in",
    "quant_out",
    "scale_out",
)
_OUTPUTS = ("allreduce_out", "residual_out", "norm_out", *QUANTISED)


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: what the planner and the kernel need, no more.

    Attributes:
        operation: One of `compile.OPERATIONS`.
        protocol: One of the operation's.
        dtype: Activation dtype.
        comm_dtype: Wire dtype.
        token_num: Rows of the result, over all ranks where each has a share.
        hidden_dim: Elements of a row.
        top_k: Routes of a token, or experts of this rank.
        num_permuted_rows: Rows of the permuted input; 0 without one.
        addresses: Value of each pointer field of `Params`; 0 where an argument is absent.
        routed_scaling_factor: Factor of the routed sum.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma.
        flags: Bits for the kernel.
        quant: Format of the quantised outputs; None is without.
        scale_factor: The scale that is given as a number; 1 where there is none.
    """

    operation: str
    protocol: str
    dtype: DType
    comm_dtype: DType
    token_num: int
    hidden_dim: int
    top_k: int
    num_permuted_rows: int
    addresses: tuple[tuple[str, int], ...]
    routed_scaling_factor: float
    rms_eps: float
    weight_bias: float
    flags: Flag
    quant: str | None
    scale_factor: float

    @property
    def row_vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.hidden_dim * self.dtype.itemsize // VECTOR_BYTES

    @property
    def same(self) -> Call:
        """What must be equal on every rank: all but addresses and what this rank's inputs hold."""
        top_k = 0 if self.operation == "moe_reduction" else self.top_k
        return replace(self, addresses=(), flags=Flag(0), num_permuted_rows=0, top_k=top_k)

    def fill(self, params: Params) -> None:
        """Write the call into kernel parameters; rank, control block and workspace are not its."""
        for name, address in self.addresses:
            setattr(params, name, address)
        params.num_permuted_rows = min(self.num_permuted_rows, 2**31)
        params.token_num = self.token_num
        params.row_vectors = self.row_vectors
        params.top_k = self.top_k
        params.routed_scaling_factor = self.routed_scaling_factor
        params.rms_eps = self.rms_eps
        params.weight_bias = self.weight_bias
        params.inverse_hidden = 1.0 / self.hidden_dim
        params.flags = self.flags
        params.scale_factor = self.scale_factor


# ---- all-reduces ---------------------------------------------------------------------------------


def describe_moe_finalize(
    home: Home,
    *,
    allreduce_in: Any,
    expanded_idx_to_permuted_idx: Any,
    expert_scale_factor: Any = None,
    shared_expert_output: Any = None,
    routed_scaling_factor: float = 1.0,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `moe_finalize_allreduce_fusion` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("moe_finalize_allreduce_fusion", home, dtype, comm_dtype)
    top_k = _take_routes(check, allreduce_in, expanded_idx_to_permuted_idx)
    protocol = check.capacity("expanded_idx_to_permuted_idx", use_oneshot)
    _check_scale(check, expert_scale_factor)
    check.rows(shared_expert_output=shared_expert_output, residual_in=residual_in)
    check.rows(allreduce_out=allreduce_out, residual_out=residual_out, norm_out=norm_out)
    check.gamma(rms_gamma, norm_out, quant)
    check.quantised(quant, quant_out, scale_out, scale_factor, scale_layout, scale_dtype)
    numbers = _numbers(check, routed_scaling_factor, rms_eps, weight_bias)
    check.memory(_OUTPUTS, ("residual_in", "shared_expert_output"))
    return _call(
        check, "moe_finalize", protocol, _ROUTES, top_k, trigger_completion_at_end, *numbers
    )


def describe_moe_reduction(
    home: Home,
    *,
    moe_reduction_active_experts_token_input: Any,
    moe_reduction_scale_input: Any,
    moe_reduction_token_input: Any = None,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    moe_allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `moe_reduction_allreduce_fusion` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("moe_reduction_allreduce_fusion", home, dtype, comm_dtype)
    experts_name = "moe_reduction_active_experts_token_input"
    num_experts, token_num, hidden_dim = check.leading(
        experts_name,
        moe_reduction_active_experts_token_input,
        3,
        "[num_experts, token_num, hidden_dim]",
    )
    check.sizes(token_num, hidden_dim, experts_name)
    if num_experts * token_num > 2**31:
        check.fault(f"{experts_name} must have at most 2**31 rows; got {num_experts} x {token_num}")
    protocol = check.capacity(experts_name, use_oneshot)
    check.array("moe_reduction_scale_input", moe_reduction_scale_input, (DType.FLOAT32,), None)
    check.shape("moe_reduction_scale_input", (num_experts, token_num), "[num_experts, token_num]")
    check.rows(moe_reduction_token_input=moe_reduction_token_input, residual_in=residual_in)
    outputs = ("moe_allreduce_out", "residual_out", "norm_out", *QUANTISED)
    check.rows(moe_allreduce_out=moe_allreduce_out, residual_out=residual_out, norm_out=norm_out)
    check.gamma(rms_gamma, norm_out, quant)
    check.quantised(quant, quant_out, scale_out, scale_factor, scale_layout, scale_dtype)
    numbers = _numbers(check, 1.0, rms_eps, weight_bias)
    check.memory(outputs, ("residual_in", "moe_reduction_token_input"))
    names = {
        "allreduce_in": experts_name,
        "route_scale": "moe_reduction_scale_input",
        "shared_expert": "moe_reduction_token_input",
        "allreduce_out": "moe_allreduce_out",
    }
    return _call(
        check, "moe_reduction", protocol, names, num_experts, trigger_completion_at_end, *numbers
    )


def describe_allreduce(
    home: Home,
    *,
    allreduce_in: Any,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `allreduce_fusion` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("allreduce_fusion", home, dtype, comm_dtype)
    _take_rows(check, allreduce_in)
    protocol = check.capacity("allreduce_in", use_oneshot)
    check.rows(residual_in=residual_in)
    check.rows(allreduce_out=allreduce_out, residual_out=residual_out, norm_out=norm_out)
    check.gamma(rms_gamma, norm_out, quant)
    check.quantised(quant, quant_out, scale_out, scale_factor, scale_layout, scale_dtype)
    numbers = _numbers(check, 1.0, rms_eps, weight_bias)
    check.memory(_OUTPUTS, ("residual_in", "allreduce_in"))
    return _call(check, "allreduce", protocol, {}, 0, trigger_completion_at_end, *numbers)


# ---- halves --------------------------------------------------------------------------------------


def describe_moe_finalize_reduce_scatter(
    home: Home,
    *,
    allreduce_in: Any,
    expanded_idx_to_permuted_idx: Any,
    expert_scale_factor: Any = None,
    shared_expert_output: Any = None,
    routed_scaling_factor: float = 1.0,
    reduce_scatter_out: Any,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `moe_finalize_reduce_scatter` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("moe_finalize_reduce_scatter", home, dtype, comm_dtype)
    top_k = _take_routes(check, allreduce_in, expanded_idx_to_permuted_idx)
    check.capacity("expanded_idx_to_permuted_idx")
    _check_scale(check, expert_scale_factor)
    check.rows(shared_expert_output=shared_expert_output)
    numbers = _numbers(check, routed_scaling_factor, 0.0, 0.0)
    _check_share_out(check, reduce_scatter_out)
    return _call(
        check,
        "moe_finalize_reduce_scatter",
        "reduce_scatter",
        {**_ROUTES, "allreduce_out": "reduce_scatter_out"},
        top_k,
        trigger_completion_at_end,
        *numbers,
    )


def describe_reduce_scatter(
    home: Home,
    *,
    allreduce_in: Any,
    reduce_scatter_out: Any,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `reduce_scatter` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("reduce_scatter", home, dtype, comm_dtype)
    _take_rows(check, allreduce_in)
    check.capacity("allreduce_in")
    _check_share_out(check, reduce_scatter_out)
    names = {"allreduce_out": "reduce_scatter_out"}
    return _call(check, "reduce_scatter", "reduce_scatter", names, 0, trigger_completion_at_end)


def describe_allgather(
    home: Home,
    *,
    allgather_in: Any,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allgather_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    trigger_completion_at_end: bool | None = None,
) -> Call:
    """Check the arguments of `allgather_residual_rmsnorm` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = Checker("allgather_residual_rmsnorm", home, dtype, None)
    check.comm_dtype = check.dtype  # a total needs no more than it has been rounded to
    given = {"allgather_out": allgather_out, "residual_out": residual_out, "norm_out": norm_out}
    sized_by = next((name for name, obj in given.items() if obj is not None), None)
    share_num, hidden_dim = check.leading("allgather_in", allgather_in, 2, "[share, hidden_dim]")
    token_num = -1
    if sized_by is not None:
        token_num, _ = check.leading(sized_by, given[sized_by], 2, "[token_num, hidden_dim]")
    elif quant_out is not None:
        sized_by = "quant_out"
        token_num, _ = check.leading(sized_by, quant_out, 2, "[token_num, ...]", (DType.UINT8,))
    check.sizes(token_num, hidden_dim, "allgather_in")
    check.capacity(sized_by or "allgather_in")
    share = share_of(home.rank, home.world_size, check.token_num)
    if token_num >= 0 and share_num not in (-1, len(share)):
        check.fault(
            f"allgather_in must have the {len(share)} rows that rank {home.rank} of "
            f"{home.world_size} owns of {token_num} tokens; got {(share_num, hidden_dim)}"
        )
    check.rows(residual_in=residual_in, **given)
    check.gamma(rms_gamma, norm_out, quant)
    check.quantised(quant, quant_out, scale_out, scale_factor, scale_layout, scale_dtype)
    numbers = _numbers(check, 1.0, rms_eps, weight_bias)
    check.memory(("allgather_out", "residual_out", "norm_out", *QUANTISED), ("residual_in",))
    names = {"allreduce_in": "allgather_in", "allreduce_out": "allgather_out"}
    return _call(check, "allgather", "allgather", names, 0, trigger_completion_at_end, *numbers)


# ---- what several operations share --------------------------------------------------------------

_ROUTES = {  # field of Params -> argument
    "route_index": "expanded_idx_to_permuted_idx",
    "route_scale": "expert_scale_factor",
    "shared_expert": "shared_expert_output",
}


def _take_routes(check: Checker, allreduce_in: Any, index: Any) -> int:
    """Take the sizes from permuted rows and routes; return top_k."""
    index_name = "expanded_idx_to_permuted_idx"
    _, hidden_dim = check.leading(
        "allreduce_in", allreduce_in, 2, "[num_permuted_rows, hidden_dim]"
    )
    token_num, top_k = check.leading(
        index_name, index, 2, "[token_num, top_k]", (DType.INT32,), None
    )
    check.sizes(token_num, hidden_dim, "allreduce_in")
    if top_k == 0:
        shape = (token_num, top_k)
        check.fault(f"{index_name} must have top_k >= 1 columns; got {shape}")
    return top_k


def _check_scale(check: Checker, expert_scale_factor: Any) -> None:
    index = check.views.get("expanded_idx_to_permuted_idx")
    name = "expert_scale_factor"
    scale = None
    if expert_scale_factor is not None:
        scale = check.array(name, expert_scale_factor, check.own_or_float, None)
        if scale is not None and scale.dtype is DType.FLOAT32:
            check.flags |= Flag.SCALE_IS_FLOAT32
    if index is None or index.ndim != 2:
        return
    check.shape(name, index.shape, "[token_num, top_k]")
    whole = index.shape[1] % 8 == 0 and index.ptr % 16 == 0
    if whole and (scale is None or scale.ptr % 16 == 0):
        check.flags |= Flag.VECTOR_ROUTES


def _take_rows(check: Checker, allreduce_in: Any) -> None:
    name = "allreduce_in"
    token_num, hidden_dim = check.leading(name, allreduce_in, 2, "[token_num, hidden_dim]")
    check.sizes(token_num, hidden_dim, name)


def _check_share_out(check: Checker, reduce_scatter_out: Any) -> None:
    home = check.home
    share = share_of(home.rank, home.world_size, check.token_num)
    check.array("reduce_scatter_out", reduce_scatter_out, check.own)
    check.shape("reduce_scatter_out", (len(share), check.hidden_dim), "[share, hidden_dim]")
    check.memory(("reduce_scatter_out",), ())


def _numbers(
    check: Checker, routed_scaling_factor: float, rms_eps: float, weight_bias: float
) -> tuple[float, float, float]:
    return (
        check.number("routed_scaling_factor", routed_scaling_factor),
        check.number("rms_eps", rms_eps, minimum=0.0),
        check.number("weight_bias", weight_bias),
    )


def _call(
    check: Checker,
    operation: str,
    protocol: str,
    names: Mapping[str, str],
    top_k: int,
    trigger_completion_at_end: bool | None,
    routed_scaling_factor: float = 1.0,
    rms_eps: float = 0.0,
    weight_bias: float = 0.0,
) -> Call:
    """Put a call together; `names` has the pointer fields that are not named as the argument."""
    views = check.views
    if trigger_completion_at_end is None:
        check.flags |= Flag.TRIGGER_HEARD
    elif not trigger_completion_at_end:
        check.flags |= Flag.TRIGGER_EARLY
    names = {"scale_in": "scale_factor", **names}
    arguments = ((field, names.get(field, field)) for field in _POINTERS)
    return Call(
        operation=operation,
        protocol=protocol,
        dtype=check.dtype,
        comm_dtype=check.comm_dtype,
        token_num=check.token_num,
        hidden_dim=check.hidden_dim,
        top_k=top_k,
        num_permuted_rows=views["allreduce_in"].shape[0] if names.get("route_index") else 0,
        addresses=tuple(
            (field, views[name].ptr if name in views else 0) for field, name in arguments
        ),
        routed_scaling_factor=routed_scaling_factor,
        rms_eps=rms_eps,
        weight_bias=weight_bias,
        flags=check.flags,
        quant=check.quant,
        scale_factor=check.scale_factor,
    )
