"""One call, fully described and checked: every shape, dtype and alignment rule lives here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .abi import MAX_ROW_BYTES, VECTOR_BYTES, Flag, Params
from .arrays import ArrayView, view
from .errors import ArgumentError
from .types import DType

__all__ = ["ACTIVATIONS", "Call", "Home", "comm_dtype_of", "describe_moe_finalize", "row_problem"]

ACTIVATIONS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Home:
    """Where calls run: what of the workspace the rules need.

    Attributes:
        device: CUDA ordinal, or `arrays.CPU`.
        dtype: Default activation dtype.
        comm_dtype: Default wire dtype; None is the activation dtype.
        payload_bytes: Most bytes that a rank may send in a launch.
    """

    device: int
    dtype: DType
    comm_dtype: DType | None
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: what the planner and the kernel need, no more.

    Attributes:
        operation: `moe_finalize`.
        dtype: Activation dtype.
        comm_dtype: Wire dtype.
        token_num: Rows of the result.
        hidden_dim: Elements of a row.
        top_k: Routes of a token.
        num_permuted_rows: Rows of the permuted input.
        addresses: Value of each pointer field of `Params`; 0 where an argument is absent.
        routed_scaling_factor: Factor of the routed sum.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma.
        flags: Bits for the kernel.
    """

    operation: str
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

    @property
    def row_vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.hidden_dim * self.dtype.itemsize // VECTOR_BYTES

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


def comm_dtype_of(dtype: DType, comm_dtype: DType | str | None) -> DType:
    """Return the wire dtype for an activation dtype.

    Raises:
        ValueError: It is neither the activation dtype nor float32.
    """
    wire = dtype if comm_dtype is None else DType.parse(comm_dtype)
    if wire not in (dtype, DType.FLOAT32):
        raise ValueError(
            f"comm_dtype must be {dtype.value} (the activation dtype) or float32; got {wire.value}"
        )
    return wire


def row_problem(hidden_dim: int, dtype: DType) -> str | None:
    """Say why rows of `hidden_dim` elements cannot be served; None if they can."""
    row_bytes = hidden_dim * dtype.itemsize
    if hidden_dim < 1 or row_bytes % VECTOR_BYTES:
        return (
            f"hidden_dim must be a positive multiple of {VECTOR_BYTES // dtype.itemsize} "
            f"(16 bytes of {dtype.value}); got {hidden_dim}"
        )
    if row_bytes > MAX_ROW_BYTES:
        return (
            f"hidden_dim must be at most {MAX_ROW_BYTES // dtype.itemsize} for {dtype.value}; "
            f"got {hidden_dim}"
        )
    return None


class _Checker:
    """Collects the faults of one call, so that all are reported together."""

    def __init__(self, function: str, home: Home) -> None:
        self.function = function
        self.home = home
        self.faults: list[str] = []
        self.views: dict[str, ArrayView] = {}

    def fault(self, words: str) -> None:
        self.faults.append(words)

    def raise_faults(self) -> None:
        if self.faults:
            raise ArgumentError(self.function, self.faults)

    def array(
        self, name: str, obj: Any, dtypes: tuple[DType, ...], declared: DType | None = None
    ) -> ArrayView | None:
        """View an array and check what does not depend on the other arguments.

        An untyped array is taken for `declared`, or the first of `dtypes` of its item size.
        """
        try:
            found = view(obj)
            if found.dtype not in dtypes and found.dtype_name in _UNTYPED:
                for dtype in (declared,) if declared else dtypes:
                    if dtype.itemsize == found.itemsize:
                        found = found._replace(dtype=dtype)
                        break
        except (TypeError, ValueError) as error:
            self.fault(f"{name}: {error}")
            return None
        if found.device != self.home.device:
            self.fault(
                f"{name} must be on {_place(self.home.device)}, where the workspace is; "
                f"got an array on {_place(found.device)}"
            )
        if found.dtype not in dtypes:
            allowed = " or ".join(dtype.value for dtype in dtypes)
            self.fault(f"{name} must have dtype {allowed}; got {found.dtype_name}")
            return None
        if not found.contiguous:
            self.fault(
                f"{name} must be contiguous in C order; got shape {found.shape} with strides "
                f"{found.strides} bytes"
            )
        self.views[name] = found
        return found

    def shape(self, name: str, expected: tuple[int, ...], meaning: str) -> None:
        found = self.views.get(name)
        if found is not None and found.shape != expected:
            self.fault(f"{name} must have shape {meaning} = {expected}; got {found.shape}")

    def aligned(self, name: str, alignment: int) -> None:
        found = self.views.get(name)
        if found is not None and found.ptr % alignment:
            self.fault(
                f"{name} must start on a {alignment}-byte boundary; got address {found.ptr:#x}"
            )

    def writable(self, name: str) -> None:
        found = self.views.get(name)
        if found is not None and found.readonly:
            self.fault(f"{name} must be writable; got a read-only array")

    def no_overlap(self, outputs: tuple[str, ...], in_place: tuple[str, ...]) -> None:
        """An output may be exactly one of `in_place`, and else touches nothing."""
        extents = [(name, *found.extent) for name, found in self.views.items()]
        for i, (name, first, end) in enumerate(extents):
            if name not in outputs:
                continue
            for j, (other, other_first, other_end) in enumerate(extents):
                if first >= other_end or other_first >= end or i == j:
                    continue
                if other in outputs:
                    if i < j:
                        self.fault(f"{name} and {other} must not overlap")
                elif other not in in_place:
                    self.fault(f"{name} must not overlap {other}")
                elif (first, end) != (other_first, other_end):
                    self.fault(f"{name} must be exactly {other} or not overlap it at all")

    def number(self, name: str, value: Any, *, minimum: float | None = None) -> float:
        try:
            result = float(value)
        except (TypeError, ValueError):
            self.fault(f"{name} must be a number; got {value!r}")
            return math.nan
        # As float32, which is what the kernel gets.
        if not abs(result) < 2.0**128 - 2.0**103 or (minimum is not None and result < minimum):
            at_least = "" if minimum is None else f" and at least {minimum:g}"
            self.fault(f"{name} must be finite{at_least}; got {value!r}")
        return result


_UNTYPED = ("uint16", "uint32", "int16", "void16", "void32", "V2", "V4")
_OUTPUTS = ("allreduce_out", "residual_out", "norm_out")
_FLOAT32 = (DType.FLOAT32,)


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
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    trigger_completion_at_end: bool = True,
) -> Call:
    """Check the arguments of `moe_finalize_allreduce_fusion` and describe the call.

    Raises:
        ArgumentError: With every fault of the call.
    """
    check = _Checker("moe_finalize_allreduce_fusion", home)
    try:
        activation = home.dtype if dtype is None else DType.parse(dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"dtype must be bfloat16, float16 or float32; got {activation.value}")
        if comm_dtype is None and activation is home.dtype:
            comm_dtype = home.comm_dtype
        wire = comm_dtype_of(activation, comm_dtype)
    except ValueError as error:
        check.fault(str(error))
        check.raise_faults()

    own = (activation,)
    own_or_float = own if activation is DType.FLOAT32 else (activation, DType.FLOAT32)
    rows = check.array("allreduce_in", allreduce_in, own)
    index = check.array(
        "expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx, (DType.INT32,)
    )
    if rows is not None and rows.ndim != 2:
        check.fault(
            f"allreduce_in must have shape [num_permuted_rows, hidden_dim]; got {rows.shape}"
        )
    if index is not None and index.ndim != 2:
        check.fault(
            f"expanded_idx_to_permuted_idx must have shape [token_num, top_k]; got {index.shape}"
        )
    check.raise_faults()
    assert rows is not None
    assert index is not None
    num_permuted_rows, hidden_dim = rows.shape
    token_num, top_k = index.shape

    problem = row_problem(hidden_dim, activation)
    if problem:
        check.fault(f"allreduce_in: {problem}")
    if top_k < 1:
        check.fault(f"expanded_idx_to_permuted_idx must have top_k >= 1 columns; got {index.shape}")
    sent = token_num * hidden_dim * wire.itemsize
    if sent > home.payload_bytes or token_num > _MAX_TOKENS:
        check.fault(
            f"expanded_idx_to_permuted_idx: {token_num} tokens of hidden_dim {hidden_dim} send "
            f"{sent} bytes as {wire.value}; the workspace's capacity is {home.payload_bytes} bytes "
            f"({home.payload_bytes // (hidden_dim * wire.itemsize)} such tokens)"
        )

    flags = Flag(0)
    scale = gamma = None
    if expert_scale_factor is not None:
        scale = check.array("expert_scale_factor", expert_scale_factor, own_or_float)
        check.shape("expert_scale_factor", index.shape, "[token_num, top_k]")
        if scale is not None and scale.dtype is DType.FLOAT32:
            flags |= Flag.SCALE_IS_FLOAT32
    if rms_gamma is not None:
        gamma = check.array("rms_gamma", rms_gamma, own_or_float)
        check.shape("rms_gamma", (hidden_dim,), "[hidden_dim]")
        if gamma is not None and gamma.dtype is DType.FLOAT32:
            flags |= Flag.GAMMA_IS_FLOAT32
    row_arrays = ["allreduce_in", "rms_gamma"]
    for name, obj in (
        ("shared_expert_output", shared_expert_output),
        ("residual_in", residual_in),
        ("allreduce_out", allreduce_out),
        ("residual_out", residual_out),
        ("norm_out", norm_out),
    ):
        if obj is not None:
            check.array(name, obj, own)
            check.shape(name, (token_num, hidden_dim), "[token_num, hidden_dim]")
            row_arrays.append(name)
    if allreduce_out is None and residual_out is None and norm_out is None:
        check.fault("at least one of allreduce_out, residual_out and norm_out must be given")
    if norm_out is not None and rms_gamma is None:
        check.fault("norm_out needs rms_gamma; got None")

    factor = check.number("routed_scaling_factor", routed_scaling_factor)
    eps = check.number("rms_eps", rms_eps, minimum=0.0)
    bias = check.number("weight_bias", weight_bias)

    if token_num > 0:
        for name in row_arrays:
            check.aligned(name, VECTOR_BYTES)
        check.aligned("expanded_idx_to_permuted_idx", 4)
        if scale is not None:
            check.aligned("expert_scale_factor", scale.itemsize)
        for name in _OUTPUTS:
            check.writable(name)
        check.no_overlap(_OUTPUTS, ("residual_in", "shared_expert_output"))
    check.raise_faults()

    if top_k % 8 == 0 and index.ptr % 16 == 0 and (scale is None or scale.ptr % 16 == 0):
        flags |= Flag.VECTOR_ROUTES
    if not trigger_completion_at_end:
        flags |= Flag.TRIGGER_EARLY
    views = check.views
    addresses = tuple(
        (field, views[name].ptr if name in views else 0) for field, name in _FINALIZE_FIELDS
    )
    return Call(
        operation="moe_finalize",
        dtype=activation,
        comm_dtype=wire,
        token_num=token_num,
        hidden_dim=hidden_dim,
        top_k=top_k,
        num_permuted_rows=num_permuted_rows,
        addresses=addresses,
        routed_scaling_factor=factor,
        rms_eps=eps,
        weight_bias=bias,
        flags=flags,
    )


_FINALIZE_FIELDS = (
    ("allreduce_in", "allreduce_in"),
    ("route_index", "expanded_idx_to_permuted_idx"),
    ("route_scale", "expert_scale_factor"),
    ("shared_expert", "shared_expert_output"),
    ("residual_in", "residual_in"),
    ("rms_gamma", "rms_gamma"),
    ("allreduce_out", "allreduce_out"),
    ("residual_out", "residual_out"),
    ("norm_out", "norm_out"),
)


def _place(device: int) -> str:
    return "the CPU" if device < 0 else f"CUDA device {device}"
