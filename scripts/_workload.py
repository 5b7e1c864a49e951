"""What the demo and the benchmark compute: named models, input data, operations, the right answer.

Data depend on the case and the rank only, so that any process can make those of any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe_ar import (
    Call,
    DType,
    PlannedCall,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_reduction_allreduce_fusion,
    plan_allreduce_fusion,
    plan_moe_finalize_allreduce_fusion,
    plan_moe_reduction_allreduce_fusion,
    reference,
)
from cupy_moe_ar.call import describe_allreduce, describe_moe_finalize, describe_moe_reduction

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "PRESETS",
    "PROTOCOLS",
    "Case",
    "Operation",
    "Preset",
    "common_inputs",
    "expected",
    "expert_parallel_inputs",
]

Array = NDArray[Any]
Inputs = dict[str, "Array | None"]  # by argument name

PROTOCOLS = {"auto": None, "oneshot": True, "twoshot": False}  # use_oneshot
DTYPES = ("bfloat16", "float16", "float32")
_TILE_ROWS = 8  # a grouped GEMM pads the rows of an expert to its tile
_MOST_DRAWN = 1 << 25  # numbers; a larger array repeats them


@dataclass(frozen=True)
class Preset:
    """The end of one MoE layer of a model.

    Attributes:
        hidden: Elements of a row.
        top_k: Routes of a token.
        shared: Whether there is a shared expert.
        factor: Routed scaling factor.
        scales: Whether the routes have scales of their own.
        weight_bias: 1 for models that store gamma - 1.
    """

    hidden: int
    top_k: int
    shared: bool
    factor: float = 1.0
    scales: bool = True
    weight_bias: float = 0.0


PRESETS = {
    "deepseek-v3": Preset(7168, 8, shared=True, factor=2.5),
    "kimi-k2": Preset(7168, 8, shared=True, factor=2.827),
    "glm-5": Preset(6144, 8, shared=True, factor=2.5),
    "minimax-m2": Preset(3072, 8, shared=False),
    "qwen3-235b": Preset(4096, 8, shared=False),
    "qwen3-30b": Preset(2048, 8, shared=False),
    "qwen3.5-35b": Preset(2048, 8, shared=True, weight_bias=1.0),
    "gpt-oss-120b": Preset(2880, 4, shared=False),
    "llama4-maverick": Preset(5120, 1, shared=True, scales=False),
}


@dataclass(frozen=True)
class Case:
    """One shape to run.

    Attributes:
        tokens: Rows of the result.
        model: Sizes and options of the layer.
        dtype: Activations.
        comm_dtype: What travels.
        eps: Added to the mean of squares.
    """

    tokens: int
    model: Preset
    dtype: DType
    comm_dtype: DType
    eps: float = 1e-5

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of activations."""
        return self.model.hidden * self.dtype.itemsize

    @property
    def message_bytes(self) -> int:
        """Bytes that a rank sends to each peer."""
        return self.tokens * self.model.hidden * self.comm_dtype.itemsize

    def generator(self, *key: int) -> np.random.Generator:
        """Return random numbers that are the same for the same case and key."""
        model = self.model
        return np.random.default_rng([self.tokens, model.hidden, model.top_k, *key])

    def normal(self, generator: np.random.Generator, scale: float, *shape: int) -> Array:
        """Draw from a normal distribution, rounded to the activation dtype."""
        size = math.prod(shape)
        drawn = generator.standard_normal(min(size, _MOST_DRAWN), dtype=np.float32)
        drawn *= np.float32(scale)
        return np.resize(drawn.astype(reference.numpy_dtype(self.dtype)), shape)


@dataclass(frozen=True)
class Operation:
    """How to run and judge one operation.

    Attributes:
        call: The public function.
        plan: Plans the same call for launching it many times.
        describe: Checks the same arguments without launching.
        inputs: Random arguments of one rank: `inputs(case, rank)`.
        options: Numbers to pass.
        partial: What a rank contributes, in float64: `partial(case, inputs)`.
        token_axis: Which dimension of an argument counts tokens, by name, where one does.
        bytes_read: What a rank reads of its own inputs: `bytes_read(case)`.
    """

    call: Callable[..., None]
    plan: Callable[..., PlannedCall]
    describe: Callable[..., Call]
    inputs: Callable[[Case, int], Inputs]
    options: Callable[[Case], dict[str, float]]
    partial: Callable[[Case, Inputs], NDArray[np.float64]]
    bytes_read: Callable[[Case], int]
    token_axis: Mapping[str, int]

    def pick(self, inputs: Inputs, tokens: NDArray[np.intp]) -> Inputs:
        """Return a rank's arguments for some of its tokens."""
        return {
            name: array.take(tokens, self.token_axis[name])
            if array is not None and name in self.token_axis
            else array
            for name, array in inputs.items()
        }


def common_inputs(case: Case) -> Inputs:
    """Make the arguments that are the same on every rank."""
    generator = case.generator()
    hidden = case.model.hidden
    residual = case.normal(generator, 4.0, case.tokens, hidden)
    deviation = 0.1 * generator.standard_normal(hidden) - case.model.weight_bias
    gamma = (1.0 + deviation).astype(reference.numpy_dtype(case.dtype))
    return {"residual_in": residual, "rms_gamma": gamma}


def expected(
    case: Case, partials: Sequence[Array], common: Mapping[str, Array | None], *, exact: bool
) -> reference.Result:
    """Return the outputs, exactly or rounded where the contract rounds."""
    return reference.finish(
        partials,
        dtype=case.dtype,
        comm_dtype=case.comm_dtype,
        residual_in=common["residual_in"],
        rms_gamma=common["rms_gamma"],
        rms_eps=case.eps,
        weight_bias=case.model.weight_bias,
        exact=exact,
    )


def _finalize_inputs(case: Case, rank: int) -> Inputs:
    """Every route on this rank, each to a row of its own."""
    generator = case.generator(1, rank)
    tokens, model = case.tokens, case.model
    num_rows = 2 * tokens * model.top_k + 8
    rows = case.normal(generator, 0.5, num_rows, model.hidden)
    index = generator.permutation(num_rows)[: tokens * model.top_k].astype(np.int32)
    scales = _softmax(generator.standard_normal((tokens, model.top_k)))
    shared = case.normal(generator, 0.5, tokens, model.hidden)
    return {
        "allreduce_in": rows,
        "expanded_idx_to_permuted_idx": index.reshape(tokens, model.top_k),
        "expert_scale_factor": reference.round_to(scales, case.dtype) if model.scales else None,
        "shared_expert_output": shared if model.shared else None,
    }


def expert_parallel_inputs(case: Case, rank: int, experts: int) -> Inputs:
    """Route tokens as a model does, in the layout of a grouped GEMM.

    Each token takes `top_k` different experts at random. A rank has three experts of four: in
    tensor parallelism it would have a slice of all, in expert parallelism all of a slice. Its rows
    are ordered by expert, each expert's padded to whole tiles; padding is NaN and never read.
    """
    router = case.generator(2)  # routers are replicated
    tokens, model = case.tokens, case.model
    logits = router.standard_normal((tokens, experts))
    chosen = np.argsort(-logits, axis=1)[:, : model.top_k]
    scales = _softmax(np.take_along_axis(logits, chosen, axis=1)).astype(np.float32)

    index = np.full((tokens, model.top_k), -1, np.int32)
    num_rows = 0
    for expert in range(experts):
        if expert % 4 == rank % 4:
            continue
        routes = np.nonzero(chosen == expert)
        count = len(routes[0])
        index[routes] = num_rows + np.arange(count)
        num_rows += -(-count // _TILE_ROWS) * _TILE_ROWS

    generator = case.generator(3, rank)
    rows = case.normal(generator, 0.5, max(1, num_rows), model.hidden)
    padding = np.ones(len(rows), bool)
    padding[index[index >= 0]] = False
    rows[padding] = np.nan
    return {
        "allreduce_in": rows,
        "expanded_idx_to_permuted_idx": index,
        "expert_scale_factor": scales if model.scales else None,
        "shared_expert_output": case.normal(generator, 0.5, tokens, model.hidden)
        if model.shared
        else None,
    }


def _finalize_partial(case: Case, inputs: Inputs) -> NDArray[np.float64]:
    rows, index = inputs["allreduce_in"], inputs["expanded_idx_to_permuted_idx"]
    assert rows is not None
    assert index is not None
    return reference.moe_finalize(
        rows,
        index,
        inputs["expert_scale_factor"],
        inputs["shared_expert_output"],
        case.model.factor,
    )


def _finalize_options(case: Case) -> dict[str, float]:
    return {
        "routed_scaling_factor": case.model.factor,
        "weight_bias": case.model.weight_bias,
        "rms_eps": case.eps,
    }


def _finalize_bytes_read(case: Case) -> int:
    rows = case.tokens * (case.model.top_k + case.model.shared)
    return rows * case.row_bytes


def _norm_options(case: Case) -> dict[str, float]:
    return {"weight_bias": case.model.weight_bias, "rms_eps": case.eps}


def _allreduce_inputs(case: Case, rank: int) -> Inputs:
    generator = case.generator(4, rank)
    return {"allreduce_in": case.normal(generator, 1.0, case.tokens, case.model.hidden)}


def _allreduce_partial(case: Case, inputs: Inputs) -> NDArray[np.float64]:
    rows = inputs["allreduce_in"]
    assert rows is not None
    return rows.astype(np.float64)


def _reduction_inputs(case: Case, rank: int) -> Inputs:
    """As many experts as a token has routes, each with a weight for every token."""
    generator = case.generator(5, rank)
    tokens, model = case.tokens, case.model
    scales = _softmax(generator.standard_normal((tokens, model.top_k)))
    return {
        "moe_reduction_active_experts_token_input": case.normal(
            generator, 0.5, model.top_k, tokens, model.hidden
        ),
        "moe_reduction_scale_input": np.ascontiguousarray(scales.T, dtype=np.float32),
        "moe_reduction_token_input": case.normal(generator, 0.5, tokens, model.hidden)
        if model.shared
        else None,
    }


def _reduction_partial(case: Case, inputs: Inputs) -> NDArray[np.float64]:
    rows = inputs["moe_reduction_active_experts_token_input"]
    scales = inputs["moe_reduction_scale_input"]
    assert rows is not None
    assert scales is not None
    return reference.moe_reduction(rows, scales, inputs["moe_reduction_token_input"])


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = weights / weights.sum(axis=1, keepdims=True)
    return result


OPERATIONS = {
    "moe_finalize": Operation(
        moe_finalize_allreduce_fusion,
        plan_moe_finalize_allreduce_fusion,
        describe_moe_finalize,
        _finalize_inputs,
        _finalize_options,
        _finalize_partial,
        _finalize_bytes_read,
        {"expanded_idx_to_permuted_idx": 0, "expert_scale_factor": 0, "shared_expert_output": 0},
    ),
    "moe_reduction": Operation(
        moe_reduction_allreduce_fusion,
        plan_moe_reduction_allreduce_fusion,
        describe_moe_reduction,
        _reduction_inputs,
        _norm_options,
        _reduction_partial,
        _finalize_bytes_read,
        {
            "moe_reduction_active_experts_token_input": 1,
            "moe_reduction_scale_input": 1,
            "moe_reduction_token_input": 0,
        },
    ),
    "allreduce": Operation(
        allreduce_fusion,
        plan_allreduce_fusion,
        describe_allreduce,
        _allreduce_inputs,
        _norm_options,
        _allreduce_partial,
        lambda case: case.tokens * case.row_bytes,
        {"allreduce_in": 0},
    ),
}
