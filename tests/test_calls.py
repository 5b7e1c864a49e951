"""Rules of the sister operations' arguments; test_bad_input has the finalize's, and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import BF16, F16, F32, filled

from cupy_moe_ar import ArgumentError, DType
from cupy_moe_ar.arrays import CPU
from cupy_moe_ar.call import (
    Call,
    describe_allgather,
    describe_allreduce,
    describe_moe_finalize_reduce_scatter,
    describe_moe_reduction,
    describe_reduce_scatter,
)
from cupy_moe_ar.checks import Home

TOKENS, HIDDEN, EXPERTS = 5, 64, 3
ROW = HIDDEN * 2
MEMORY = np.zeros(512, np.uint8)
F8 = ml_dtypes.float8_e4m3fn
HOME = Home(CPU, BF16, None, 1, 2, TOKENS * ROW, 4 * ROW)  # one-shot: four tokens
Arguments = dict[str, Any]


def rows(*shape: int, dtype: DType = BF16) -> Any:
    return filled(0, dtype, *(shape or (TOKENS, HIDDEN)))


def allreduce() -> Arguments:
    return {"allreduce_in": rows(), "residual_in": rows(), "rms_gamma": rows(HIDDEN),
            "residual_out": rows(), "norm_out": rows()}  # fmt: skip


def reduction() -> Arguments:
    rest = allreduce()
    del rest["allreduce_in"]
    return {"moe_reduction_active_experts_token_input": rows(EXPERTS, TOKENS, HIDDEN),
            "moe_reduction_scale_input": rows(EXPERTS, TOKENS, dtype=F32),
            "moe_reduction_token_input": rows(), "moe_allreduce_out": rows(), **rest}  # fmt: skip


def scatter() -> Arguments:
    return {"allreduce_in": rows(), "reduce_scatter_out": rows(2, HIDDEN)}


def finalize_scatter() -> Arguments:
    return {"allreduce_in": rows(9, HIDDEN), "reduce_scatter_out": rows(2, HIDDEN),
            "expanded_idx_to_permuted_idx": np.zeros((TOKENS, 2), np.int32)}  # fmt: skip


def gather() -> Arguments:
    rest = allreduce()
    del rest["allreduce_in"]
    return {"allgather_in": rows(2, HIDDEN), "allgather_out": rows(), **rest}


def octets(*shape: int, dtype: Any = np.uint8) -> Any:
    return np.zeros(shape, dtype)


def mxfp8() -> Arguments:
    return {**allreduce(), "quant": "mxfp8", "quant_out": octets(TOKENS, HIDDEN),
            "scale_out": octets(512)}  # fmt: skip


def nvfp4() -> Arguments:
    return {**reduction(), "quant": "nvfp4", "quant_out": octets(TOKENS, HIDDEN // 2),
            "scale_out": octets(512), "scale_factor": 0.5}  # fmt: skip


def static() -> Arguments:
    return {**gather(), "quant": "fp8_static", "quant_out": octets(TOKENS, HIDDEN),
            "scale_factor": 0.5}  # fmt: skip


def groups() -> Arguments:
    """Of rows of 128 elements, packed."""
    return {"allreduce_in": rows(2, 128), "rms_gamma": rows(128), "quant": "fp8_per_token_group",
            "quant_out": octets(2, 128), "scale_out": octets(1, 4, dtype=np.int32),
            "scale_layout": "column_major", "scale_dtype": "ue8m0"}  # fmt: skip


DESCRIBE: dict[Callable[[], Arguments], Callable[..., Call]] = {
    allreduce: describe_allreduce,
    reduction: describe_moe_reduction,
    scatter: describe_reduce_scatter,
    finalize_scatter: describe_moe_finalize_reduce_scatter,
    gather: describe_allgather,
    mxfp8: describe_allreduce,
    nvfp4: describe_moe_reduction,
    static: describe_allgather,
    groups: describe_allreduce,
}

Change = Arguments | Callable[[Arguments], Arguments]
FAULTS: list[tuple[Callable[[], Arguments], Change, str]] = [
    (allreduce, {"allreduce_in": rows(HIDDEN)}, r"allreduce_in .*\[token_num, hidden_dim\]; got"),
    (allreduce, {"allreduce_in": rows(dtype=F16)}, "allreduce_in must have dtype bfloat16"),
    (allreduce, {"residual_in": rows(TOKENS, 72)}, r"residual_in .*\(5, 64\); got \(5, 72\)"),
    (allreduce, {"norm_out": None, "residual_out": None}, "at least one of allreduce_out"),
    (allreduce, {"rms_gamma": None}, "norm_out needs rms_gamma"),
    (allreduce, {"rms_eps": -1.0}, "rms_eps must be finite and at least 0"),
    (allreduce, {"use_oneshot": True}, r"5 tokens .* one-shot capacity is 512 bytes \(4 such"),
    (allreduce, {"use_oneshot": 1.5}, "use_oneshot must be True, False or None"),
    (allreduce, {"comm_dtype": "float32"}, r"allreduce_in: 5 tokens .* \(2 such tokens\)"),
    (allreduce, {"allreduce_in": rows(6, HIDDEN), "residual_in": None, "residual_out": None,
                 "norm_out": rows(6, HIDDEN)}, r"6 tokens .* \(5 such tokens\)"),
    (allreduce, lambda a: {"norm_out": a["residual_out"]}, "norm_out must not overlap"),
    (allreduce, lambda a: {"norm_out": a["rms_gamma"]}, "norm_out"),
    (reduction, {"moe_reduction_active_experts_token_input": rows()},
     r"active_experts_token_input must have shape \[num_experts, token_num, hidden_dim\]"),
    (reduction, {"moe_reduction_scale_input": rows(EXPERTS * TOKENS, dtype=F32)},
     r"scale_input must have shape \[num_experts, token_num\] = \(3, 5\); got \(15,\)"),
    (reduction, {"moe_reduction_scale_input": rows(EXPERTS, TOKENS)},
     "scale_input must have dtype float32; got bfloat16"),
    (reduction, {"moe_reduction_scale_input": None}, "moe_reduction_scale_input: "),
    (reduction, {"moe_reduction_token_input": rows(4, HIDDEN)}, r"token_input .*\(5, 64\)"),
    (reduction, lambda a: {"norm_out": a["moe_reduction_active_experts_token_input"][0]},
     "norm_out must not overlap moe_reduction_active_experts_token_input"),
    (scatter, {"reduce_scatter_out": rows()}, r"\[share, hidden_dim\] = \(2, 64\); got \(5, 64"),
    (scatter, lambda a: {"reduce_scatter_out": a["allreduce_in"][3:]}, "must not overlap allre"),
    (scatter, {"reduce_scatter_out": None}, "reduce_scatter_out"),
    (finalize_scatter, {"expanded_idx_to_permuted_idx": np.zeros(5, np.int32)}, "token_num, top_k"),
    (finalize_scatter, {"routed_scaling_factor": "two"}, "routed_scaling_factor must be a number"),
    (gather, {"allgather_in": rows(3, HIDDEN)}, r"the 2 rows that rank 1 of 2 owns of 5 tokens"),
    (gather, {"allgather_out": None, "residual_out": None, "norm_out": None}, "at least one of"),
    (gather, {"residual_in": rows(3, HIDDEN)}, "residual_in must have shape"),
    (mxfp8, {"quant": "fp4"}, "None or one of fp8_static, fp8_per_token_group, nvfp4, mxfp8, "),
    (mxfp8, {"quant": None}, "quant_out needs quant; got None"),
    (mxfp8, {"quant_out": None}, "quant 'mxfp8' needs quant_out; got None"),
    (mxfp8, {"scale_out": None}, "quant 'mxfp8' needs scale_out; got None"),
    (mxfp8, {"scale_factor": 1.0}, "quant 'mxfp8' takes no scale_factor; got float"),
    (mxfp8, {"scale_layout": "swizzled_8x4"}, "must be 'swizzled_128x4' or 'linear' .*8x4'"),
    (mxfp8, {"scale_dtype": "float32"}, "scale_dtype must be None for quant 'mxfp8'"),
    (mxfp8, {"scale_layout": "linear"}, r"must have 10 bytes .*\(5, 2\) of uint8; got 512 bytes"),
    (mxfp8, {"scale_out": octets(511)}, r"must have 512 bytes .*\(128, 4\) of .*; got 511 bytes"),
    (mxfp8, {"scale_out": octets(128, dtype=F8)}, "uint8 or float8_e8m0fnu; got float8_e4m3fn"),
    (mxfp8, {"scale_out": octets(128, dtype=np.float32)}, "must have dtype uint8; got float32"),
    (mxfp8, {"quant_out": octets(TOKENS, HIDDEN // 2)}, r"\(5, 64\); got \(5, 32\)"),
    (mxfp8, {"quant_out": octets(TOKENS, HIDDEN, dtype=ml_dtypes.float8_e5m2)},
     "quant_out must have dtype uint8 or float8_e4m3fn; got float8_e5m2"),
    (mxfp8, {"norm_out": None, "rms_gamma": None}, "quant needs rms_gamma; got None"),
    (mxfp8, {"quant_out": MEMORY[:320].reshape(TOKENS, HIDDEN), "scale_out": MEMORY},
     "quant_out and scale_out must not overlap"),
    (mxfp8, {"allreduce_in": rows(TOKENS, 48), "residual_in": None, "residual_out": None,
             "norm_out": None, "rms_gamma": rows(48)}, "hidden_dim must be a multiple of 32"),
    (nvfp4, {"quant_out": octets(TOKENS, HIDDEN)}, r"hidden_dim / 2\] = \(5, 32\); got \(5, 64"),
    (nvfp4, {"quant_out": octets(TOKENS, HIDDEN // 2, dtype=F8)}, "uint8 or float4_e2m1fn_x2; got"),
    (nvfp4, {"scale_factor": None}, "quant 'nvfp4' needs a scale_factor; got None"),
    (nvfp4, {"scale_factor": 0.0}, "scale_factor must be positive as float32; got 0.0"),
    (nvfp4, {"scale_factor": 1e-60}, "scale_factor must be positive as float32; got 1e-60"),
    (nvfp4, {"scale_factor": float("inf")}, "scale_factor must be finite; got inf"),
    (nvfp4, {"scale_factor": "two"}, "scale_factor: expected a NumPy"),
    (nvfp4, {"scale_factor": octets(2, dtype=np.float32)}, r"have one element; got shape \(2,"),
    (nvfp4, {"scale_factor": octets(1, dtype=np.float64)}, "scale_factor must have dtype float32"),
    (static, {"scale_out": octets(4)}, "quant 'fp8_static' makes no scale_out; got ndarray"),
    (static, {"quant_out": octets(4, HIDDEN)}, r"quant_out must have shape .*\(5, 64\); got \(4,"),
    (groups, {"scale_layout": "linear"}, "must be 'row_major' or 'column_major'"),
    (groups, {"scale_dtype": "e4m3"}, "scale_dtype must be 'float32' or 'ue8m0'"),
    (groups, {"scale_dtype": None}, r"scale_out must have dtype float32; got int32"),
    (groups, {"scale_layout": None}, "scale_out must have dtype uint8; got int32"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "words"), FAULTS)
def test_fault(make: Callable[[], Arguments], change: Change, words: str) -> None:
    arguments = make()
    arguments |= change(arguments) if callable(change) else change
    with pytest.raises(ArgumentError, match=words) as caught:
        DESCRIBE[make](HOME, **arguments)
    assert caught.value.function in str(caught.value)
    DESCRIBE[make](HOME, **make())


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (mxfp8, {"quant_out": octets(TOKENS, HIDDEN, dtype=F8)}),
        (mxfp8, {"scale_out": octets(128, 4, dtype=ml_dtypes.float8_e8m0fnu)}),
        (mxfp8, {"allreduce_out": None, "residual_out": None, "norm_out": None}),
        (nvfp4, {"scale_out": octets(512, dtype=F8)}),
        (nvfp4, {"scale_factor": octets(1, dtype=np.float32)}),
        (nvfp4, {"scale_factor": np.float32(2)}),
        (static, {"scale_factor": octets(dtype=np.float32)}),
        (static, {"allgather_out": None, "residual_out": None, "norm_out": None}),
        (groups, {"scale_out": octets(16)}),
        (groups, {"scale_dtype": None, "scale_out": octets(1, 4, dtype=np.float32)}),
    ],
)
def test_quantised_outputs_may_be(make: Callable[[], Arguments], change: Arguments) -> None:
    call = DESCRIBE[make](HOME, **{**make(), **change})
    addresses = dict(call.addresses)
    assert call.quant is not None
    assert addresses["quant_out"]
    assert bool(addresses["scale_out"]) == (make is not static)
    assert bool(addresses["scale_in"]) == isinstance(change.get("scale_factor"), np.ndarray)


def test_scales_are_never_in_place() -> None:
    """Not even where they have just the bytes of what another output may be written to."""
    given = {name: x if name == "rms_gamma" else x[:4] for name, x in allreduce().items()}
    given |= {"quant": "mxfp8", "quant_out": octets(4, HIDDEN)}
    assert given["residual_in"].nbytes == 512
    with pytest.raises(ArgumentError, match="scale_out must not overlap residual_in"):
        describe_allreduce(HOME, **given, scale_out=given["residual_in"].view(np.uint8))


def in_place(output: str, other: str) -> Change:
    return lambda a: {output: a[other]}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (allreduce, in_place("norm_out", "allreduce_in")),
        (allreduce, in_place("residual_out", "allreduce_in")),
        (allreduce, in_place("residual_out", "residual_in")),
        (reduction, in_place("residual_out", "residual_in")),
        (reduction, in_place("norm_out", "moe_reduction_token_input")),
        (gather, in_place("residual_out", "residual_in")),
    ],
)
def test_in_place_is_allowed(make: Callable[[], Arguments], change: Any) -> None:
    arguments = make()
    DESCRIBE[make](HOME, **{**arguments, **change(arguments)})


def test_what_a_call_says() -> None:
    call = describe_allreduce(HOME, **allreduce())
    assert (call.operation, call.protocol, call.token_num) == ("allreduce", "twoshot", TOKENS)
    few = {name: x if x.ndim == 1 else x[:4] for name, x in allreduce().items()}
    assert describe_allreduce(HOME, **few).protocol == "oneshot"
    assert describe_allreduce(HOME, **few, use_oneshot=False).protocol == "twoshot"
    call = describe_moe_reduction(HOME, **reduction())
    assert (call.top_k, call.same.top_k) == (EXPERTS, 0)  # may differ between ranks
    given = {name for name, address in call.addresses if address}
    assert given == {"allreduce_in", "route_scale", "shared_expert", "residual_in", "rms_gamma",
                     "allreduce_out", "residual_out", "norm_out"}  # fmt: skip
    assert describe_allgather(HOME, **gather()).comm_dtype is BF16
    wide = Home(CPU, BF16, F32, 1, 2, 2 * TOKENS * ROW, 0)
    assert describe_reduce_scatter(wide, **scatter()).comm_dtype is F32
    assert describe_allgather(wide, **gather()).comm_dtype is BF16
