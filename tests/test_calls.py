"""Rules of the sister operations' arguments; test_bad_input has the finalize's, and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


DESCRIBE: dict[Callable[[], Arguments], Callable[..., Call]] = {
    allreduce: describe_allreduce,
    reduction: describe_moe_reduction,
    scatter: describe_reduce_scatter,
    finalize_scatter: describe_moe_finalize_reduce_scatter,
    gather: describe_allgather,
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
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "words"), FAULTS)
def test_fault(make: Callable[[], Arguments], change: Change, words: str) -> None:
    arguments = make()
    arguments |= change(arguments) if callable(change) else change
    with pytest.raises(ArgumentError, match=words) as caught:
        DESCRIBE[make](HOME, **arguments)
    assert caught.value.function in str(caught.value)
    DESCRIBE[make](HOME, **make())


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
