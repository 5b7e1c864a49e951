"""The reference against numbers worked out by hand and against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_moe_ar import reference
from cupy_moe_ar.types import DType

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
SIXTEEN_BIT = (BF16, FP16)
FLOATS = (BF16, FP16, FP32)
# (significant bits, exponent of the smallest normal number, exponent of the largest finite one)
FORMAT = {BF16: (8, -126, 127), FP16: (11, -14, 15), FP32: (24, -126, 127)}

Array = NDArray[Any]


def from_bits(bits: Array, dtype: DType) -> Array:
    return bits.astype(f"u{dtype.itemsize}").view(reference.numpy_dtype(dtype))


def to_bits(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def round_fraction(x: Fraction, dtype: DType) -> Fraction:
    """Round to nearest even by exact arithmetic; `x` must not overflow."""
    if x == 0:
        return x
    precision, min_exponent, max_exponent = FORMAT[dtype]
    exponent = min_exponent
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - precision + 1)
    result = round(x / quantum) * quantum
    assert abs(result) < Fraction(2) ** (max_exponent + 1)
    return result


# ---- rounding ----


def test_numpy_dtype() -> None:
    assert reference.numpy_dtype(BF16) == np.dtype(ml_dtypes.bfloat16)
    assert reference.numpy_dtype(FP16) == np.dtype(np.float16)
    assert reference.numpy_dtype(FP32) == np.dtype(np.float32)
    assert reference.numpy_dtype(DType.INT32) == np.dtype(np.int32)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_round_to_keeps_every_pattern(dtype: DType) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = from_bits(patterns, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        nan = np.isnan(values)
        wides = (values.astype(np.float64), values.astype(np.float32))
    for wide in wides:
        result = reference.round_to(wide, dtype)
        assert result.dtype == values.dtype
        assert np.array_equal(to_bits(result)[~nan], patterns[~nan])
        assert np.isnan(result[nan]).all()
        dropped = reference.round_to(wide, dtype, drop_negative_zero=True)
        expected = np.where(patterns == 0x8000, 0, patterns)
        assert np.array_equal(to_bits(dropped)[~nan], expected[~nan])
        assert np.isnan(dropped[nan]).all()


def finite_neighbours(dtype: DType) -> tuple[Array, Array]:
    """Bit patterns of values >= 0 and of the values that follow them; the last is infinity."""
    if dtype is not FP32:
        infinity = int(to_bits(np.array(np.inf, reference.numpy_dtype(dtype))))
        low = np.arange(infinity)
    else:
        edges = [0, 1, 2, 3, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x7F7FFFFE, 0x7F7FFFFF]
        random = np.random.default_rng(1).integers(0, 0x7F800000, 100_000)
        low = np.concatenate([np.array(edges), random])
    return low, low + 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_round_to_at_and_next_to_every_midpoint(dtype: DType, sign: int) -> None:
    low, high = finite_neighbours(dtype)
    below = from_bits(low, dtype).astype(np.float64)
    above = from_bits(high, dtype).astype(np.float64)
    # Infinity counts as the value that the exponent range would hold next.
    above[np.isinf(above)] = 2.0 ** (FORMAT[dtype][2] + 1)
    middle = (below + above) / 2
    sign_bit = 0 if sign == 1 else 1 << (8 * dtype.itemsize - 1)

    def bits(x: Array) -> Array:
        return to_bits(reference.round_to(sign * x, dtype)).astype(np.int64)

    assert np.array_equal(bits(middle), np.where(low % 2 == 0, low, high) | sign_bit)
    # One float64 step off the midpoint: float32 on the way would round these to the midpoint.
    assert np.array_equal(bits(np.nextafter(middle, 0.0)), low | sign_bit)
    assert np.array_equal(bits(np.nextafter(middle, np.inf)), high | sign_bit)
    assert np.array_equal(bits(np.nextafter(below, np.inf)), low | sign_bit)
    assert np.array_equal(bits(np.nextafter(above, 0.0)), high | sign_bit)


def test_round_to_differs_from_a_cast_through_float32() -> None:
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    through_single = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert to_bits(through_single)[0] == 0x3F80
    assert to_bits(reference.round_to(x, BF16))[0] == 0x3F81


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_to_equals_rational_arithmetic(dtype: DType) -> None:
    random = np.random.default_rng(2)
    precision, min_exponent, max_exponent = FORMAT[dtype]
    exponents = random.integers(min_exponent - precision - 2, max_exponent, 2000)
    x = np.ldexp(random.uniform(-2, 2, 2000), exponents)
    for value, result in zip(x, reference.round_to(x, dtype).astype(np.float64), strict=True):
        assert Fraction(float(result)) == round_fraction(Fraction(float(value)), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_to_special_values(dtype: DType) -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300, 5e-324, -5e-324, 0.0, -0.0])
    result = reference.round_to(x, dtype)
    as_double = result.astype(np.float64)
    assert np.array_equal(
        as_double, [np.inf, -np.inf, np.nan, np.inf, -np.inf, 0, 0, 0, 0], equal_nan=True
    )
    assert np.signbit(as_double[5:]).tolist() == [False, True, False, True]
    dropped = reference.round_to(x, dtype, drop_negative_zero=True)
    assert not np.signbit(dropped.astype(np.float64)[5:]).any()


def test_round_to_leaves_its_argument_alone_and_keeps_the_shape() -> None:
    for dtype in FLOATS:
        x = np.array(-1e-60).reshape(())
        assert reference.round_to(x, dtype, drop_negative_zero=True).shape == ()
        y = np.full((2, 3), -0.0, np.float32)[:, ::2]
        assert reference.round_to(y, dtype, drop_negative_zero=True).shape == (2, 2)
        assert x == -1e-60
        assert np.signbit(y).all()


def test_negative_zero_born_in_rounding() -> None:
    x = np.array([-(2.0**-26)])
    assert to_bits(reference.round_to(x, FP16))[0] == 0x8000
    assert to_bits(reference.round_to(x, FP16, drop_negative_zero=True))[0] == 0


# ---- ulps ----


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_ulp_is_the_step_to_the_next_value(dtype: DType) -> None:
    low, high = (
        from_bits(bits[:-1], dtype).astype(np.float64) for bits in finite_neighbours(dtype)
    )
    assert np.array_equal(reference.ulp(low, dtype), high - low)
    assert np.array_equal(reference.ulp(-low, dtype), high - low)


def test_ulp_special_values() -> None:
    assert reference.ulp(np.array([1.0, 1.5, 2.0, 0.0]), FP32).tolist() == [
        2.0**-23,
        2.0**-23,
        2.0**-22,
        2.0**-149,
    ]
    assert reference.ulp(np.array([65504.0, 1e9, 1e-300]), FP16).tolist() == [32, 32, 2.0**-24]
    assert np.isnan(reference.ulp(np.array([np.inf, -np.inf, np.nan]), BF16)).all()
    assert reference.ulp(np.ones(3, ml_dtypes.bfloat16), BF16).dtype == np.float64


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_ulp_distance_counts_steps(dtype: DType) -> None:
    infinity = int(to_bits(np.array(np.inf, reference.numpy_dtype(dtype))))
    magnitude = np.arange(infinity + 1)
    line = np.concatenate([magnitude[:0:-1] | 0x8000, magnitude])  # -inf .. -tiny, 0, tiny .. inf
    x = from_bits(line, dtype)
    assert (np.diff(x.astype(np.float64)) > 0).all()
    assert (reference.ulp_distance(x[1:], x[:-1], dtype) == 1).all()
    assert np.array_equal(
        reference.ulp_distance(x, np.full_like(x, -np.inf), dtype), np.arange(len(x))
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance_special_values(dtype: DType) -> None:
    values = np.array([0.0, -0.0, np.nan, np.nan, 1.0, np.inf], reference.numpy_dtype(dtype))
    other = np.array([-0.0, 0.0, np.nan, 1.0, np.nan, -np.inf], values.dtype)
    distance = reference.ulp_distance(values, other, dtype)
    assert distance[:5].tolist() == [0, 0, 0, reference.NAN_DISTANCE, reference.NAN_DISTANCE]
    assert 0 < distance[5] < reference.NAN_DISTANCE
    # Nothing else is rounded than `expected`.
    one = np.ones(1, values.dtype)
    assert reference.ulp_distance(one, np.array([1 + 1e-9]), dtype).tolist() == [0]
    with pytest.raises(ValueError, match="actual must have dtype"):
        reference.ulp_distance(np.ones(1), one, dtype)
    with pytest.raises(ValueError, match=r"expected must have shape \(1,\)"):
        reference.ulp_distance(one, np.ones(2), dtype)


# ---- exact cases ----


def residual_of(partials: list[Array], dtype: DType, **options: Any) -> Array:
    result = reference.finish(partials, dtype=dtype, **options)
    assert result.residual_out.dtype == reference.numpy_dtype(dtype)
    return result.residual_out


@pytest.mark.parametrize("dtype", FLOATS)
def test_c1_subnormals_are_not_flushed(dtype: DType) -> None:
    sign = 1 << (8 * dtype.itemsize - 1)
    tiny = from_bits(np.full((4, 64), sign | 1), dtype)
    half = from_bits(np.where(np.arange(4 * 64) % 2 == 0, sign | 1, 0).reshape(4, 64), dtype)
    partials = [tiny.astype(np.float64), half.astype(np.float64)]
    result = reference.finish(partials, dtype=dtype, rms_gamma=np.ones(64))
    expected = np.where(np.arange(64) % 2 == 0, sign | 2, sign | 1)
    assert np.array_equal(to_bits(result.residual_out), np.broadcast_to(expected, (4, 64)))
    if dtype is not FP16:  # there the squares are not small beside eps
        assert result.norm_out is not None
        wanted = result.residual_out.astype(np.float64) * 1000
        assert reference.ulp_distance(result.norm_out, wanted, dtype).max() <= 1


def test_c2_negative_zero() -> None:
    plain = [np.full((3, 8), -0.0)] * 2
    for dtype in FLOATS:
        result = reference.finish(plain, dtype=dtype)
        assert not to_bits(result.allreduce_out).any()
        assert not to_bits(result.residual_out).any()
    row = np.full((1, 8), -(2.0**-14), np.float16)
    indices = np.zeros((3, 1), np.int32)
    partial = reference.moe_finalize(row, indices, np.full((3, 1), 2.0**-12, np.float32))
    assert (partial == -(2.0**-26)).all()
    assert not to_bits(reference.finish([partial] * 2, dtype=FP16).allreduce_out).any()
    ones = np.ones((3, 8), np.float16)
    assert (residual_of([partial, partial], FP16, residual_in=ones) == 1).all()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("hidden_dim", [64, 264, 2880])
def test_c3_constant_rows(hidden_dim: int, dtype: DType) -> None:
    level = np.arange(15) % 8 + 1.0
    partial = np.repeat(level[:, None], hidden_dim, axis=1)
    result = reference.finish([partial] * 3, dtype=dtype, rms_gamma=np.ones(hidden_dim))
    assert np.array_equal(result.residual_out, 3 * partial)
    assert result.norm_out is not None
    assert reference.ulp_distance(result.norm_out, np.ones_like(partial), dtype).max() <= 1


@pytest.mark.parametrize(("top_k", "expected"), [(8, 264), (32, 288)])
def test_c4_routes_are_not_summed_in_sixteen_bits(top_k: int, expected: int) -> None:
    rows = np.ones((top_k, 256), ml_dtypes.bfloat16)
    rows[0] = 256
    indices = np.tile(np.arange(top_k, dtype=np.int32), (2, 1))
    scales = np.ones((2, top_k), np.float32)
    first = reference.moe_finalize(rows, indices, scales)
    other = reference.moe_finalize(rows, np.full_like(indices, -1), scales)
    assert (residual_of([first, other, other], BF16) == expected).all()


@pytest.mark.parametrize(("world_size", "expected"), [(2, 256), (4, 260), (8, 264), (16, 272)])
def test_c4_ranks_are_not_summed_in_sixteen_bits(world_size: int, expected: int) -> None:
    partials = [np.full((2, 16), 256.0)] + [np.ones((2, 16))] * (world_size - 1)
    assert (residual_of(partials, BF16) == expected).all()


C5_INDICES = (
    np.array([[0, -1, 7, -1], [-1, -1, -1, -1], [3, 12, -1, -1]], np.int32),
    np.array([[-1, 5, -1, 9], [0, 1, 2, 3], [-1, -1, 30, 31]], np.int32),
)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("skip", [-1, -7, 40, 41, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(
    ("factor", "shared_ranks", "expected"),
    [
        (1.0, (), [12.5, 5, 40]),
        (2.0, (), [25, 10, 80]),
        (2.0, (0,), [26, 11, 81]),
        (2.0, (0, 1), [27, 12, 82]),
    ],
)
def test_c5_skipped_routes_factor_and_shared_expert(
    scale_dtype: Any, skip: int, factor: float, shared_ranks: tuple[int, ...], expected: list[float]
) -> None:
    hidden_dim = 16
    partials = []
    for rank, template in enumerate(C5_INDICES):
        used = np.isin(np.arange(40), template)
        rows = np.where(used, np.arange(1.0, 41.0), np.nan)[:, None]
        scales = np.where(template >= 0, 0.5, np.nan).astype(scale_dtype)
        indices = np.where(template >= 0, template, skip).astype(np.int32)
        shared = np.ones((3, hidden_dim), ml_dtypes.bfloat16) if rank in shared_ranks else None
        allreduce_in = np.repeat(rows, hidden_dim, axis=1).astype(ml_dtypes.bfloat16)
        partials.append(reference.moe_finalize(allreduce_in, indices, scales, shared, factor))
    wanted = np.repeat(np.array(expected)[:, None], hidden_dim, axis=1)
    assert np.array_equal(residual_of(partials, BF16), wanted)
    assert np.array_equal(reference.finish(partials, dtype=BF16, exact=True).residual_out, wanted)


def test_nan_of_a_route_that_is_taken_arrives() -> None:
    rows = np.array([[1.0, np.nan], [1.0, 1.0]], np.float32)
    indices = np.array([[0, 1]], np.int32)
    assert np.isnan(reference.moe_finalize(rows, indices)).tolist() == [[False, True]]
    scales = np.array([[1.0, np.nan]], np.float32)
    assert np.isnan(reference.moe_finalize(rows, indices, scales)).all()


def test_float32_wire_keeps_the_sum_up_to_the_residual_add() -> None:
    partials = [np.full((1, 8), 1 + 2.0**-9), np.full((1, 8), 2.0**-9)]
    residual_in = np.full((1, 8), 2.0**-8, ml_dtypes.bfloat16)
    narrow = reference.finish(partials, dtype=BF16, residual_in=residual_in)
    assert (narrow.allreduce_out == 1).all()
    assert (narrow.residual_out == 1).all()
    wide = reference.finish(partials, dtype=BF16, comm_dtype=FP32, residual_in=residual_in)
    assert (wide.allreduce_out == 1).all()  # 1 + 2**-8 is a tie
    assert (wide.residual_out == 1 + 2.0**-7).all()
    # What float32 does not hold of the sum is lost before the residual add: 1 + 2**-24 is a tie.
    fine = [np.ones((1, 8)), np.full((1, 8), 2.0**-24)]
    residual_in = np.full((1, 8), -1, ml_dtypes.bfloat16)
    wide = reference.finish(fine, dtype=BF16, comm_dtype=FP32, residual_in=residual_in)
    assert (wide.residual_out == 0).all()


def test_residual_is_what_was_rounded_before_the_norm() -> None:
    partials = [np.array([[1 + 2.0**-8, 1.0]])]  # rounds to [1, 1]
    gamma = np.full(2, 1.5)
    result = reference.finish(partials, dtype=BF16, rms_gamma=gamma, rms_eps=3.0, weight_bias=0.5)
    assert np.array_equal(result.residual_out, [[1, 1]])
    assert np.array_equal(result.arrays()["norm_out"], [[1, 1]])


def test_outputs_without_gamma_and_without_tokens() -> None:
    assert list(reference.finish([np.ones((1, 8))], dtype=BF16).arrays()) == [
        "allreduce_out",
        "residual_out",
    ]
    none = reference.moe_finalize(np.ones((0, 8), np.float16), np.zeros((0, 4), np.int32))
    result = reference.finish([none], dtype=FP16, rms_gamma=np.ones(8))
    assert [x.shape for x in result.arrays().values()] == [(0, 8)] * 3
    assert set(reference.errors(result, result).values()) == {(0.0, 0.0)}
    no_rows = reference.moe_finalize(np.ones((0, 8), np.float16), np.zeros((2, 4), np.int32))
    assert np.array_equal(no_rows, np.zeros((2, 8)))


def test_wrong_shapes_are_named() -> None:
    rows, indices = np.ones((4, 8)), np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"expanded_idx.* must have 2 dimensions; got .*\(6,\)"):
        reference.moe_finalize(rows, indices.reshape(-1))
    with pytest.raises(ValueError, match=r"expert_scale_factor must have shape \(2, 3\)"):
        reference.moe_finalize(rows, indices, np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"shared_expert_output must have shape \(2, 8\)"):
        reference.moe_finalize(rows, indices, None, np.ones((1, 8)))
    with pytest.raises(ValueError, match="got none"):
        reference.finish([], dtype=BF16)
    with pytest.raises(ValueError, match=r"partials\[1\]"):
        reference.finish([np.ones((2, 8)), np.ones((1, 8))], dtype=BF16)
    with pytest.raises(ValueError, match=r"rms_gamma must have shape \(8,\)"):
        reference.finish([np.ones((2, 8))], dtype=BF16, rms_gamma=np.ones((1, 8)))


# ---- slow twin ----


def fraction(x: Any) -> Fraction:
    return Fraction(float(x))


def square_root(x: Fraction) -> Fraction:
    """To 200 binary places and more."""
    return Fraction(math.isqrt(x.numerator * x.denominator << 400), x.denominator << 200)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("dtype", "comm_dtype"), [(BF16, None), (FP16, None), (BF16, FP32), (FP16, FP32), (FP32, None)]
)
def test_equals_rational_arithmetic(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, comm_dtype: DType | None, exact: bool
) -> None:
    world_size, token_num, hidden_dim, top_k, row_num = 3, 7, 10, 3, 9
    factor, eps, weight_bias = 2.5, 1e-5, 0.25
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 2 * hidden_dim)  # several blocks, one ragged
    random = np.random.default_rng(3)
    element = reference.numpy_dtype(dtype)
    residual_in = (4 * random.normal(size=(token_num, hidden_dim))).astype(element)
    gamma = (1 + 0.1 * random.normal(size=hidden_dim)).astype(np.float32)
    ranks = [
        (
            random.normal(size=(row_num, hidden_dim)).astype(element),
            random.integers(-3, row_num + 2, (token_num, top_k)).astype(np.int32),
            random.uniform(size=(token_num, top_k)).astype(np.float32),
            random.normal(size=(token_num, hidden_dim)).astype(element),
        )
        for _ in range(world_size)
    ]
    partials = [reference.moe_finalize(*rank, factor) for rank in ranks]
    result = reference.finish(
        partials,
        dtype=dtype,
        comm_dtype=comm_dtype,
        residual_in=residual_in,
        rms_gamma=gamma,
        rms_eps=eps,
        weight_bias=weight_bias,
        exact=exact,
    )

    def rounded(x: Fraction, to: DType) -> Fraction:
        return x if exact else round_fraction(x, to)

    expected: dict[str, list[list[Fraction]]] = {name: [] for name in result.arrays()}
    for t in range(token_num):
        totals = []
        for h in range(hidden_dim):
            total = Fraction(0)
            for rows, indices, scales, shared in ranks:
                routed = sum(
                    (
                        fraction(scale) * fraction(rows[index, h])
                        for index, scale in zip(indices[t], scales[t], strict=True)
                        if 0 <= index < row_num
                    ),
                    Fraction(0),
                )
                partial = fraction(factor) * routed + fraction(shared[t, h])
                total += rounded(partial, comm_dtype or dtype)
            totals.append(rounded(total, comm_dtype or dtype))
        expected["allreduce_out"].append([rounded(x, dtype) for x in totals])
        residual = [
            rounded(x + fraction(r), dtype) for x, r in zip(totals, residual_in[t], strict=True)
        ]
        expected["residual_out"].append(residual)
        mean_square = sum((x * x for x in residual), Fraction(0)) / hidden_dim
        root = square_root(mean_square + fraction(eps))
        expected["norm_out"].append(
            [
                rounded(x * (fraction(weight_bias) + fraction(g)) / root, dtype)
                for x, g in zip(residual, gamma, strict=True)
            ]
        )
    for name, actual in result.arrays().items():
        wanted = np.array([[float(x) for x in row] for row in expected[name]])
        if exact:
            assert actual.dtype == np.float64
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-14)
        else:
            assert np.array_equal(actual.astype(np.float64), wanted), name


# ---- errors ----


def test_errors_and_rounding_floor() -> None:
    exact = reference.Result(np.array([[1.0, 1 + 2.0**-8]]), np.array([[3.0, -2.0]]))
    assert reference.rounding_floor(exact, BF16) == {
        "allreduce_out": (2.0**-9, 2.0**-8),
        "residual_out": (0.0, 0.0),
    }
    assert reference.rounding_floor(exact, FP32)["allreduce_out"] == (0.0, 0.0)
    actual = {"residual_out": np.array([[2.0, -2.0]], np.float16), "norm_out": None}
    assert reference.errors(actual, exact) == {"residual_out": (0.5, 1.0)}
    with pytest.raises(KeyError):
        reference.errors({"norm_out": np.zeros((1, 2))}, exact)
    with pytest.raises(ValueError, match="residual_out must have shape"):
        reference.errors({"residual_out": np.zeros((1, 1))}, exact)


def test_errors_of_values_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1)
    exact = reference.Result(np.array([[np.inf], [np.nan], [1.0]]), np.array([[1.0], [1e6], [0.0]]))
    same = {"allreduce_out": exact.allreduce_out.astype(np.float32)}
    assert reference.errors(same, exact) == {"allreduce_out": (0.0, 0.0)}
    nan = {"residual_out": np.array([[np.nan], [1e6], [0.0]], np.float32)}
    assert np.isnan(reference.errors(nan, exact)["residual_out"]).all()
    assert reference.rounding_floor(exact, FP16)["residual_out"] == (np.inf, np.inf)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_float32_wire_reaches_the_floor(dtype: DType) -> None:
    random = np.random.default_rng(4)
    partials = [random.normal(size=(32, 512)) for _ in range(4)]
    residual_in = 4 * random.normal(size=(32, 512))

    def mean_error(comm_dtype: DType) -> float:
        model = reference.finish(
            partials, dtype=dtype, comm_dtype=comm_dtype, residual_in=residual_in
        )
        return reference.errors(model, exact)["residual_out"][0]

    exact = reference.finish(partials, dtype=dtype, residual_in=residual_in, exact=True)
    floor, _ = reference.rounding_floor(exact, dtype)["residual_out"]
    assert floor <= mean_error(FP32) * (1 + 1e-9)
    assert mean_error(FP32) < 1.01 * floor
    assert mean_error(dtype) > 1.05 * floor
