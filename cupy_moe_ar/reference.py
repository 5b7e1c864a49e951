"""The operation in NumPy float64: what the right answer is, and how far rounding alone is from it.

Two models of the same formula: exact (float64, no rounding) and rounded exactly where the contract
rounds. For tests and scripts; nothing that computes for a user imports it.

    partials = [moe_finalize(rows, indices, scales, shared) for ... in ranks]
    exact = finish(partials, dtype=T, residual_in=..., rms_gamma=..., exact=True)
    model = finish(partials, dtype=T, residual_in=..., rms_gamma=...)
    errors(model, exact), rounding_floor(exact, T)

Both use float64 where the kernels use FP32, so they differ from the kernels by FP32's own rounding
and wherever an FP32 intermediate overflows although the result would be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupy_moe_ar.types import DType

__all__ = [
    "NAN_DISTANCE",
    "Result",
    "errors",
    "finish",
    "moe_finalize",
    "moe_reduction",
    "numpy_dtype",
    "round_to",
    "rounding_floor",
    "ulp",
    "ulp_distance",
]

Array: TypeAlias = NDArray[Any]
Float64Array: TypeAlias = NDArray[np.float64]

NAN_DISTANCE = 1 << 32
"""`ulp_distance` of a NaN from a number: more than any two numbers are apart, of any dtype."""

# Fraction bits, exponent of the smallest normal number and of the largest finite one.
_FORMAT = {
    DType.BFLOAT16: (7, -126, 127),
    DType.FLOAT16: (10, -14, 15),
    DType.FLOAT32: (23, -126, 127),
}
_BLOCK_ELEMENTS = 1 << 18  # 2 MiB of float64: a block and its temporaries stay in the cache


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype of `dtype`; bfloat16 comes from ml_dtypes."""
    scalar: Any = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.value
    result: np.dtype[Any] = np.dtype(scalar)
    return result


def round_to(x: Array, dtype: DType, *, drop_negative_zero: bool = False) -> Array:
    """Round to the nearest value of `dtype`, once, ties to even.

    Subnormals are kept, overflow gives infinity, NaN stays NaN.

    Args:
        x: Values that float64 holds exactly, of any shape.
        dtype: A floating-point type.
        drop_negative_zero: Turn every -0.0 of the result into +0.0, as is done to what travels
            between ranks; rounding makes -0.0 of tiny negative values.

    Returns:
        New array of `x`'s shape and of NumPy dtype `numpy_dtype(dtype)`.
    """
    with _quiet():
        wide = np.asarray(x, dtype=np.float64)
        single = np.asarray(wide.astype(np.float32))
        if dtype is not DType.FLOAT32:
            # ml_dtypes casts float64 to bfloat16 through float32 and so rounds twice. Rounding to
            # odd on the way (truncate; last bit set if inexact) makes the second rounding right.
            magnitude = np.abs(wide)
            single_magnitude = np.abs(single)
            bits = single.view(np.uint32)
            bits -= single_magnitude > magnitude
            bits |= single_magnitude != magnitude
        result = single.astype(numpy_dtype(dtype), copy=False)
    if drop_negative_zero:
        result[result == 0] = 0
    return result


def ulp(x: Array, dtype: DType) -> Float64Array:
    """Spacing of the values of `dtype` in the binade of |x|; NaN where `x` is not finite.

    Below the smallest normal number it is the subnormal spacing, above the largest finite one the
    spacing there.
    """
    fraction_bits, min_exponent, max_exponent = _FORMAT[dtype]
    with _quiet():
        wide = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(wide)
    _, exponent = np.frexp(np.where(finite, wide, 0.0))  # |x| = m * 2**exponent, 0.5 <= m < 1
    exponent = np.where(wide == 0, min_exponent, exponent - 1)
    exponent = np.clip(exponent, min_exponent, max_exponent)
    return np.where(finite, np.ldexp(1.0, exponent - fraction_bits), np.nan)


def ulp_distance(actual: Array, expected: Array, dtype: DType) -> NDArray[np.int64]:
    """Count the steps from one value of `dtype` to the next between `actual` and `expected`.

    +0.0 and -0.0 are the same value, infinity follows the largest finite value, two NaNs are 0
    apart and a NaN is `NAN_DISTANCE` from every number.

    Args:
        actual: Array of `dtype`.
        expected: Array of the same shape; rounded to `dtype` if it is of another type.
        dtype: A floating-point type.

    Raises:
        ValueError: The shapes differ, or `actual` is of another type.
    """
    if actual.dtype != numpy_dtype(dtype):
        raise ValueError(f"actual must have dtype {dtype.value}; got {actual.dtype}")
    _require_shape("expected", expected, actual.shape)
    if expected.dtype != actual.dtype:
        expected = round_to(expected, dtype)
    distance = np.abs(_ordered(actual) - _ordered(expected))
    with _quiet():
        actual_nan, expected_nan = np.isnan(actual), np.isnan(expected)
    distance = np.where(actual_nan | expected_nan, NAN_DISTANCE, distance)
    return np.where(actual_nan & expected_nan, 0, distance)


def moe_finalize(
    allreduce_in: Array,
    expanded_idx_to_permuted_idx: Array,
    expert_scale_factor: Array | None = None,
    shared_expert_output: Array | None = None,
    routed_scaling_factor: float = 1.0,
) -> Float64Array:
    """Compute one rank's partial, not rounded.

    A route whose index lies outside 0..num_permuted_rows-1 is skipped: neither a row nor its scale
    is read.

    Args:
        allreduce_in: `[num_permuted_rows, hidden_dim]`, any floating-point type.
        expanded_idx_to_permuted_idx: `[token_num, top_k]`, integers.
        expert_scale_factor: `[token_num, top_k]`; None is 1.0.
        shared_expert_output: `[token_num, hidden_dim]`, this rank's part of it; None is 0.
        routed_scaling_factor: Factor of the routed sum, not of the shared expert.

    Returns:
        float64 `[token_num, hidden_dim]`.

    Raises:
        ValueError: A shape does not fit; the message names it.
    """
    indices = expanded_idx_to_permuted_idx
    for name, array in (
        ("allreduce_in", allreduce_in),
        ("expanded_idx_to_permuted_idx", indices),
    ):
        if array.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions; got shape {array.shape}")
    num_permuted_rows, hidden_dim = allreduce_in.shape
    token_num, top_k = indices.shape
    if expert_scale_factor is not None:
        _require_shape("expert_scale_factor", expert_scale_factor, indices.shape)
    if shared_expert_output is not None:
        _require_shape("shared_expert_output", shared_expert_output, (token_num, hidden_dim))

    partial = np.zeros((token_num, hidden_dim))
    with _quiet():
        for tokens in _token_blocks(token_num, hidden_dim):
            block = partial[tokens]
            for k in range(top_k):
                index = indices[tokens, k]
                routed = np.flatnonzero((index >= 0) & (index < num_permuted_rows))
                rows = allreduce_in[index[routed]].astype(np.float64)
                if expert_scale_factor is not None:
                    rows *= expert_scale_factor[tokens, k][routed, None].astype(np.float64)
                block[routed] += rows
            block *= routed_scaling_factor
            if shared_expert_output is not None:
                block += shared_expert_output[tokens].astype(np.float64)
    return partial


def moe_reduction(active_experts: Array, scale: Array, token_input: Array | None) -> Float64Array:
    """Compute one rank's partial of the sum over its experts, not rounded.

    Args:
        active_experts: `[num_experts, token_num, hidden_dim]`, any floating-point type.
        scale: `[num_experts, token_num]`.
        token_input: `[token_num, hidden_dim]`, this rank's part of it; None is 0.

    Returns:
        float64 `[token_num, hidden_dim]`.

    Raises:
        ValueError: A shape does not fit; the message names it.
    """
    if active_experts.ndim != 3:
        raise ValueError(f"active_experts must have 3 dimensions; got shape {active_experts.shape}")
    _require_shape("scale", scale, active_experts.shape[:2])
    partial = np.zeros(active_experts.shape[1:])
    if token_input is not None:
        _require_shape("token_input", token_input, partial.shape)
    with _quiet():
        for rows, weight in zip(active_experts, scale, strict=True):
            partial += weight[:, None].astype(np.float64) * rows.astype(np.float64)
        if token_input is not None:
            partial += token_input.astype(np.float64)
    return partial


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Outputs of one call, each `[token_num, hidden_dim]`; `norm_out` is None without a gamma."""

    allreduce_out: Array
    residual_out: Array
    norm_out: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """Return the outputs that there are, by name."""
        outputs = {"allreduce_out": self.allreduce_out, "residual_out": self.residual_out}
        return outputs if self.norm_out is None else {**outputs, "norm_out": self.norm_out}


def finish(
    partials: Sequence[Array],
    *,
    dtype: DType,
    comm_dtype: DType | None = None,
    residual_in: Array | None = None,
    rms_gamma: Array | None = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    exact: bool = False,
) -> Result:
    """Sum the ranks' partials, add the residual and normalise.

    Rounds where the contract does: each partial to `comm_dtype` (no -0.0 remains), the sum to
    `dtype`, or to float32 on its way to the residual add if that is what travels, the residual and
    the norm to `dtype`. The norm is taken of the rounded residual.

    Args:
        partials: One array `[token_num, hidden_dim]` for each rank, not rounded.
        dtype: Type of the activations.
        comm_dtype: Type of what travels between ranks; None is `dtype`.
        residual_in: `[token_num, hidden_dim]`; None is 0.
        rms_gamma: `[hidden_dim]`; None leaves `norm_out` out.
        rms_eps: Added to the mean square.
        weight_bias: Added to gamma.
        exact: Round nowhere; `dtype` and `comm_dtype` do not matter then.

    Returns:
        Arrays of `dtype`, or of float64 if `exact`.

    Raises:
        ValueError: There is no partial or a shape does not fit; the message names it.
    """
    if not partials:
        raise ValueError("partials must hold one array for each rank; got none")
    shape = partials[0].shape
    if len(shape) != 2:
        raise ValueError(f"partials[0] must have 2 dimensions; got shape {shape}")
    for rank, partial in enumerate(partials):
        _require_shape(f"partials[{rank}]", partial, shape)
    if residual_in is not None:
        _require_shape("residual_in", residual_in, shape)
    if rms_gamma is not None:
        _require_shape("rms_gamma", rms_gamma, shape[1:])
    wire = comm_dtype or dtype
    total_dtype = DType.FLOAT32 if wire is DType.FLOAT32 else dtype

    def rounded(x: Array, to: DType, *, drop_negative_zero: bool = False) -> Float64Array:
        if not exact:
            x = round_to(x, to, drop_negative_zero=drop_negative_zero)
        return x.astype(np.float64)

    out_dtype = np.dtype(np.float64) if exact else numpy_dtype(dtype)
    allreduce_out = np.empty(shape, out_dtype)
    residual_out = np.empty(shape, out_dtype)
    norm_out = None if rms_gamma is None else np.empty(shape, out_dtype)
    # What is stored has been rounded to the outputs' type: the stores are exact.
    with _quiet():
        for tokens in _token_blocks(*shape):
            arrived = (rounded(x[tokens], wire, drop_negative_zero=True) for x in partials)
            total = rounded(reduce(np.add, arrived), total_dtype)
            allreduce_out[tokens] = rounded(total, dtype)
            if residual_in is not None:
                total = total + residual_in[tokens].astype(np.float64)
            residual = rounded(total, dtype)
            residual_out[tokens] = residual
            if rms_gamma is not None and norm_out is not None:
                root = np.sqrt(np.mean(residual**2, axis=1, keepdims=True) + rms_eps)
                weight = weight_bias + rms_gamma.astype(np.float64)
                norm_out[tokens] = rounded(residual * weight / root, dtype)
    return Result(allreduce_out, residual_out, norm_out)


def errors(
    actual: Result | Mapping[str, Array | None], exact: Result
) -> dict[str, tuple[float, float]]:
    """Return (mean, maximum) of |actual - exact| for each output of `actual`, by name.

    Equal infinities and two NaNs count as no error; a NaN on one side makes both numbers NaN.

    Raises:
        KeyError: `exact` lacks an output that `actual` has.
        ValueError: Two shapes differ.
    """
    outputs = actual.arrays() if isinstance(actual, Result) else actual
    truth = exact.arrays()
    return {
        name: _error(name, output, truth[name])
        for name, output in outputs.items()
        if output is not None
    }


def rounding_floor(exact: Result, dtype: DType) -> dict[str, tuple[float, float]]:
    """Return the least possible `errors`: those of rounding `exact` itself once to `dtype`."""
    return errors({name: round_to(x, dtype) for name, x in exact.arrays().items()}, exact)


def _quiet() -> np.errstate:
    """No warnings of infinities and NaNs: they are values like others here."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")


def _error(name: str, actual: Array, exact: Array) -> tuple[float, float]:
    _require_shape(name, actual, exact.shape)
    if exact.size == 0:
        return 0.0, 0.0
    total = worst = np.float64(0.0)
    with _quiet():
        for tokens in _token_blocks(*exact.shape):
            a, b = actual[tokens].astype(np.float64), exact[tokens]
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            error = np.where(same, 0.0, np.abs(a - b))
            total, worst = total + error.sum(), np.maximum(worst, error.max())
    return float(total / exact.size), float(worst)


def _ordered(x: Array) -> NDArray[np.int64]:
    """Map the bits of `x` to integers in the order of its values; both zeros become 0."""
    width = 8 * x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.int64).reshape(x.shape)
    sign = 1 << (width - 1)
    return np.where(bits >= sign, sign - bits, bits)


def _token_blocks(token_num: int, hidden_dim: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, hidden_dim))
    for start in range(0, token_num, step):
        yield slice(start, start + step)


def _require_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}; got {array.shape}")
