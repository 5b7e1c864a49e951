"""Wrong calls: an error before the launch names argument, got and expected; then all is well."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    Case,
    Rank,
    Ranks,
    backend,
    check,
    control,
    each_world,
    filled,
    finalize,
    random_case,
)

from cupy_moe_ar import (
    ArgumentError,
    DType,
    LaunchShape,
    Workspace,
    moe_finalize_allreduce_fusion,
)

TOKENS, HIDDEN, TOP_K = 4, 64, 2
PLACE = "the CPU" if backend() == "cpu" else "CUDA device"
FUNCTION = "moe_finalize_allreduce_fusion"
Mutation = Callable[[Rank, dict[str, Any]], dict[str, Any]]


def arguments(rank: Rank, case: Case) -> dict[str, Any]:
    """Every argument of a right call, arrays on the device."""
    arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
    for name in ("allreduce_out", "residual_out", "norm_out"):
        arrays[name] = rank.put(filled(0, case.dtype, *case.shape)).array
    return {**arrays, **case.numbers}


def put(name: str, dtype: DType, *shape: int) -> Mutation:
    """Another array in place of an argument."""
    return lambda rank, args: {name: rank.put(filled(0, dtype, *shape)).array}


def index(array: np.ndarray) -> Mutation:
    return lambda rank, args: {"expanded_idx_to_permuted_idx": rank.put(array).array}


def value(**options: Any) -> Mutation:
    return lambda rank, args: options


def sized(tokens: int, hidden_dim: int, top_k: int) -> Mutation:
    """Arguments that fit each other, for a call of other sizes."""

    def mutate(rank: Rank, args: dict[str, Any]) -> dict[str, Any]:
        return arguments(rank, random_case(rank.size, tokens, hidden_dim, top_k))

    return mutate


def shifted(name: str, offset: int) -> Mutation:
    """Another array that begins `offset` bytes behind a boundary."""

    def mutate(rank: Rank, args: dict[str, Any]) -> dict[str, Any]:
        shape = args[name].shape
        larger = np.zeros((shape[0] + 1, *shape[1:]), args[name].dtype)
        return {name: rank.put(larger).at(offset, shape)}

    return mutate


def strided(name: str) -> Mutation:
    return lambda rank, args: {
        name: rank.put(filled(0, BF16, args[name].shape[0], 2 * HIDDEN)).array[:, ::2]
    }


def overlapping(output: str, other: str) -> Mutation:
    """An output that begins one row behind the beginning of another argument."""

    def mutate(rank: Rank, args: dict[str, Any]) -> dict[str, Any]:
        buffer = rank.put(filled(0, BF16, TOKENS + 1, HIDDEN))
        shape = TOKENS, HIDDEN
        return {output: buffer.at(2 * HIDDEN, shape), other: buffer.at(0, shape)}

    return mutate


def cuda_array(address: int, readonly: bool) -> Any:
    shape = {"shape": (TOKENS, HIDDEN), "typestr": "<u2", "version": 3}
    return SimpleNamespace(__cuda_array_interface__={**shape, "data": (address, readonly)})


def elsewhere(rank: Rank, args: dict[str, Any]) -> dict[str, Any]:
    """An array on another device than the workspace."""
    if backend() == "cuda":
        return {"residual_in": args["residual_in"].get()}
    return {"residual_in": cuda_array(1 << 20, readonly=False)}


def readonly(name: str) -> Mutation:
    def mutate(rank: Rank, args: dict[str, Any]) -> dict[str, Any]:
        if backend() == "cpu":
            args[name].flags.writeable = False
            return {}
        return {name: cuda_array(args[name].data.ptr, readonly=True)}

    return mutate


# What is changed in a right call, and words of the error.
FAULTS: dict[str, tuple[Mutation, list[str]]] = {
    # dtypes
    "rows dtype": (put("allreduce_in", F16, 9, HIDDEN), ["allreduce_in", "bfloat16", "float16"]),
    "index dtype": (index(np.zeros((TOKENS, TOP_K), np.int64)),
                    ["expanded_idx_to_permuted_idx", "int32", "got int64"]),
    "scale dtype": (put("expert_scale_factor", F16, TOKENS, TOP_K),
                    ["expert_scale_factor", "bfloat16 or float32", "got float16"]),
    "shared dtype": (put("shared_expert_output", F32, TOKENS, HIDDEN),
                     ["shared_expert_output", "bfloat16", "got float32"]),
    "residual dtype": (put("residual_in", F32, TOKENS, HIDDEN),
                       ["residual_in", "bfloat16", "got float32"]),
    "gamma dtype": (put("rms_gamma", F16, HIDDEN), ["rms_gamma", "bfloat16 or float32", "float16"]),
    "output dtype": (put("norm_out", F32, TOKENS, HIDDEN), ["norm_out", "bfloat16", "got float32"]),
    "option dtype": (value(dtype="int32"), ["dtype must be bfloat16, float16 or float32", "int32"]),
    "unknown dtype": (value(dtype="float8"), ["dtype must be", "float8"]),
    "wire": (value(comm_dtype="float16"),
             ["comm_dtype", "bfloat16 (the activation dtype) or float32", "got float16"]),
    "unknown wire": (value(comm_dtype="int7"), ["dtype must be one of", "int7"]),
    # shapes
    "rows 1-D": (put("allreduce_in", BF16, HIDDEN),
                 ["allreduce_in", "[num_permuted_rows, hidden_dim]", "(64,)"]),
    "rows 3-D": (put("allreduce_in", BF16, 1, 2, HIDDEN), ["allreduce_in", "(1, 2, 64)"]),
    "index 1-D": (index(np.zeros(8, np.int32)),
                  ["expanded_idx_to_permuted_idx", "[token_num, top_k]", "(8,)"]),
    "no routes": (sized(TOKENS, HIDDEN, 0),
                  ["expanded_idx_to_permuted_idx", "top_k", "(4, 0)"]),
    "scale 1-D": (put("expert_scale_factor", F32, TOKENS * TOP_K),
                  ["expert_scale_factor", "[token_num, top_k] = (4, 2)", "(8,)"]),
    "scale top_k": (put("expert_scale_factor", F32, TOKENS, 3),
                    ["expert_scale_factor", "(4, 2)", "(4, 3)"]),
    "shared tokens": (put("shared_expert_output", BF16, 3, HIDDEN),
                      ["shared_expert_output", "(4, 64)", "(3, 64)"]),
    "residual hidden": (put("residual_in", BF16, TOKENS, 72),
                        ["residual_in", "(4, 64)", "(4, 72)"]),
    "gamma length": (put("rms_gamma", BF16, 72), ["rms_gamma", "[hidden_dim] = (64,)", "(72,)"]),
    "gamma 2-D": (put("rms_gamma", BF16, 1, HIDDEN), ["rms_gamma", "(64,)", "(1, 64)"]),
    "output tokens": (put("residual_out", BF16, 5, HIDDEN),
                      ["residual_out", "(4, 64)", "(5, 64)"]),
    "output flat": (put("allreduce_out", BF16, TOKENS * HIDDEN), ["allreduce_out", "(256,)"]),
    "ragged row": (sized(TOKENS, 60, TOP_K),
                   ["allreduce_in", "hidden_dim must be a positive multiple of 8", "got 60"]),
    "empty row": (sized(TOKENS, 0, TOP_K), ["allreduce_in", "positive multiple", "got 0"]),
    "long row": (sized(1, 32776, 1), ["hidden_dim must be at most 32768", "32776"]),
    # memory
    "rows stride": (strided("allreduce_in"), ["allreduce_in", "contiguous", "strides (256, 4)"]),
    "residual stride": (strided("residual_in"), ["residual_in", "contiguous", "(256, 4)"]),
    "output stride": (strided("norm_out"), ["norm_out", "contiguous", "(256, 4)"]),
    "rows alignment": (shifted("allreduce_in", 2), ["allreduce_in", "16-byte boundary", "0x"]),
    "gamma alignment": (shifted("rms_gamma", 8), ["rms_gamma", "16-byte boundary", "0x"]),
    "output alignment": (shifted("norm_out", 8), ["norm_out", "16-byte boundary", "0x"]),
    "index alignment": (shifted("expanded_idx_to_permuted_idx", 2),
                        ["expanded_idx_to_permuted_idx", "4-byte boundary", "0x"]),
    "scale alignment": (shifted("expert_scale_factor", 2),
                        ["expert_scale_factor", "4-byte boundary", "0x"]),
    "device": (elsewhere, ["residual_in", f"must be on {PLACE}", "got an array on"]),
    "read-only": (readonly("residual_out"), ["residual_out must be writable", "read-only"]),
    "no array": (value(allreduce_in=None), ["allreduce_in", "NoneType"]),
    "list": (value(residual_in=[[1.0]]), ["residual_in", "list"]),
    # aliasing
    "same outputs": (lambda rank, args: {"norm_out": args["residual_out"]},
                     ["residual_out and norm_out must not overlap"]),
    "overlapping outputs": (overlapping("norm_out", "allreduce_out"),
                            ["allreduce_out and norm_out must not overlap"]),
    "overlapping residual": (overlapping("residual_out", "residual_in"),
                             ["residual_out must be exactly residual_in or not overlap"]),
    "overlapping shared": (overlapping("norm_out", "shared_expert_output"),
                           ["norm_out must be exactly shared_expert_output or not overlap"]),
    "output in rows": (lambda rank, args: {"norm_out": args["allreduce_in"][:TOKENS]},
                       ["norm_out must not overlap allreduce_in"]),
    # what is missing, too much or no number
    "no outputs": (value(allreduce_out=None, residual_out=None, norm_out=None),
                   ["at least one of allreduce_out, residual_out, norm_out and quant_out"]),
    "no gamma": (value(rms_gamma=None), ["norm_out needs rms_gamma"]),
    "capacity": (sized(TOKENS + 1, HIDDEN, TOP_K), ["5 tokens", "capacity", "(4 such tokens)"]),
    "factor": (value(routed_scaling_factor=float("nan")), ["routed_scaling_factor", "nan"]),
    "factor text": (value(routed_scaling_factor="two"),
                    ["routed_scaling_factor must be a number", "'two'"]),
    "eps": (value(rms_eps=-1.0), ["rms_eps", "at least 0", "-1.0"]),
    "eps nan": (value(rms_eps=float("nan")), ["rms_eps must be finite", "nan"]),
    "bias": (value(weight_bias=float("inf")), ["weight_bias must be finite", "inf"]),
    "factor too large": (value(routed_scaling_factor=1e39), ["routed_scaling_factor", "1e+39"]),
    "factor too long": (value(routed_scaling_factor=10**400),
                        ["routed_scaling_factor must be finite", "beyond float64"]),
    "oneshot": (value(use_oneshot=np.ones(2)), ["use_oneshot must be True, False or None"]),
    "stream": (value(stream="fast"), ["stream", "fast" if backend() == "cpu" else "str"]),
    "shape": (value(launch_shape=LaunchShape(16, 32, "rows")),
              ["launch_shape must be one of", "LaunchShape(cluster_blocks=16"]),
}  # fmt: skip


def wrong_call(rank: Rank, workspace: Workspace, case: Case, *mutations: Mutation) -> str:
    """Check that a call raises the same on every rank and launches nothing; return the message."""
    args = arguments(rank, case)
    for mutate in mutations:
        args.update(mutate(rank, args))
    launches = control(workspace).launches
    rank.meet()
    with pytest.raises(ValueError, match=r"^moe_finalize_allr|^launch_shape") as caught:
        moe_finalize_allreduce_fusion(workspace=workspace, **args)
    rank.meet()
    assert control(workspace).launches == launches
    message = str(caught.value)
    rank.same(re.sub("0x[0-9a-f]+|CUDA device [0-9]+", "...", message))
    return message


@pytest.mark.parametrize("name", FAULTS)
@each_world(2)
def test_fault(ranks: Ranks, name: str) -> None:
    mutation, words = FAULTS[name]
    case = random_case(ranks.size, TOKENS, HIDDEN, TOP_K)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for _ in range(2):
            message = wrong_call(rank, workspace, case, mutation)
            assert all(word in message for word in words), message
            assert "faults" not in message or name == "long row", message
            check(case, finalize(rank, workspace, case))


@pytest.mark.parametrize(
    "names",
    [
        ["scale dtype", "shared tokens", "residual stride", "gamma length", "eps", "bias"],
        ["capacity", "output alignment", "factor"],
        ["no gamma", "output alignment", "residual hidden"],
        ["overlapping residual", "read-only", "rows alignment"],
        ["rows dtype", "gamma dtype", "eps", "no outputs"],
        ["wire", "gamma dtype", "eps"],
    ],
    ids=", ".join,
)
@each_world(2)
def test_all_faults_are_reported_together(ranks: Ranks, names: list[str]) -> None:
    case = random_case(ranks.size, TOKENS, HIDDEN, TOP_K)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        message = wrong_call(rank, workspace, case, *(FAULTS[name][0] for name in names))
        for name in names:
            assert all(word in message for word in FAULTS[name][1]), (name, message)
        check(case, finalize(rank, workspace, case))


def on_last(mutation: Mutation) -> Mutation:
    return lambda rank, args: mutation(rank, args) if rank.rank == rank.size - 1 else {}


DIFFER = ["must be the same on every rank"]


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        *((index(np.full((TOKENS, TOP_K), i, np.int32)),
           ["rank {}: expanded_idx_to_permuted_idx must hold -1", f"got {i}"])
          for i in (-7, -2, 1000, 2**31 - 1)),
        *((FAULTS[name][0], ["rank {}: ", *FAULTS[name][1]])
          for name in ("gamma dtype", "rows alignment", "no outputs")),
        *((value(**{name: 0.25}), DIFFER)
          for name in ("rms_eps", "weight_bias", "routed_scaling_factor")),
        (value(launch_shape=LaunchShape(16, 32, "row")), ["rank {}: launch_shape must be one of"]),
        (value(launch_shape=LaunchShape(1, 32, "long")), DIFFER),
        (value(stream="no stream"), ["rank {}: stream"]),
        (sized(TOKENS - 1, HIDDEN, TOP_K), DIFFER),
        (sized(TOKENS, HIDDEN, 1), DIFFER),
    ],
)  # fmt: skip
@each_world(2, 3)
def test_check_tells_all_ranks_of_a_fault_on_one(
    ranks: Ranks, mutation: Mutation, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_AR_CHECK", "1")
    case = random_case(ranks.size, TOKENS, HIDDEN, TOP_K)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for _ in range(2):
            args = arguments(rank, case)
            args.update(on_last(mutation)(rank, args))
            rank.meet()
            with pytest.raises(ArgumentError) as caught:
                moe_finalize_allreduce_fusion(workspace=workspace, **args)
            rank.meet()
            assert all(word.format(rank.size - 1) in str(caught.value) for word in words)
            check(case, finalize(rank, workspace, case))
