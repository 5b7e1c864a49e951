"""The sum over experts and ranks, by either protocol: values, bits, what a call leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    OUTPUTS,
    Rank,
    Ranks,
    ReductionCase,
    check,
    check_bits,
    each_protocol,
    each_world,
    filled,
    finalize,
    reduction_case,
    see_saw,
    usable_shapes,
    worlds,
)

from cupy_moe_ar import DType, Workspace
from cupy_moe_ar import reference as ref

# tokens, hidden_dim, experts of the ranks, T, wire; options; numbers of ranks
RANDOM: list[tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ((17, 64, [1, 5], BF16, None), {}, (1, 2, 3, 16)),
    ((12, 264, [8], F16, None), {"gamma": F32, "shared_on": lambda rank: rank == 1}, (2, 5)),
    ((5, 520, [13, 0, 16], BF16, F32), {}, (2, 3)),
    ((5, 1032, [6], F32, None), {"bias": 1.0}, (2, 4)),
    ((5, 2880, [3], F16, F32), {"residual": False}, (2, 8)),
    ((4, 7168, [9], BF16, None), {"eps": 1e-5, "shared_on": lambda rank: False}, (2,)),
]


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [(size, sizes, options) for sizes, options, counts in RANDOM for size in worlds(*counts)],
    indirect=["ranks"],
)
@each_protocol
def test_random(
    ranks: Ranks, sizes: tuple[Any, ...], options: dict[str, Any], oneshot: bool
) -> None:
    case = reduction_case(ranks.size, *sizes, **options)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, use_oneshot=oneshot)
        if rank.rank == 0:  # the others have the same bits
            check(case, results)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (BF16, [256.0] + 7 * [1.0]),
        (BF16, [256.0] + 31 * [1.0]),
        (F16, [2048.0] + 15 * [1.0]),
        (F16, [3e4, 0.25, 3e4, 0.25, -3e4, 0.25, -3e4, 0.25, 0.5]),
    ],
)
@each_protocol
@each_world(2, 3)
def test_c4_experts_are_summed_in_float32(
    ranks: Ranks, dtype: DType, values: list[float], oneshot: bool
) -> None:
    """Each value is a row times its scale; the other ranks have no experts."""
    rows = np.tile(filled(np.array(values)[:, None, None], dtype, len(values), 1, 256), (1, 2, 1))
    expected = ref.round_to(rows.astype(np.float64).sum(axis=0), dtype)
    none = [rows[:0]] * (ranks.size - 1)
    experts = [rows / rows.dtype.type(2), *none]
    scale = [np.full(x.shape[:2], 2, np.float32) for x in experts]
    gamma = filled(1, dtype, 256)
    case = ReductionCase(dtype, experts, scale=scale, gamma=gamma)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, use_oneshot=oneshot)
        for name in OUTPUTS[:2]:
            assert (results[name] == expected).all()


@each_protocol
@each_world(1, 2, 3)
def test_every_plan_and_c15_in_place(ranks: Ranks, oneshot: bool) -> None:
    case = reduction_case(ranks.size, 7, 520, [10])
    places = [
        {},
        {"residual_out": "residual_in"},
        {"norm_out": "moe_reduction_token_input", "allreduce_out": "residual_in"},
    ]

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=oneshot)
        check(case, results)
        for shape in usable_shapes(workspace, case, "oneshot" if oneshot else "twoshot"):
            for place in places:
                some = finalize(
                    rank, workspace, case, OUTPUTS, place, launch_shape=shape, use_oneshot=oneshot
                )
                for name, output in some.items():
                    check_bits(output, results[name], f"{name}, {place}, {shape}")
