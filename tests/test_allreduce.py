"""The dense all-reduce by either protocol: values, bits, and what a call leaves behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    OUTPUTS,
    DenseCase,
    Rank,
    Ranks,
    bits,
    check,
    check_bits,
    dense_case,
    each_protocol,
    each_world,
    filled,
    finalize,
    see_saw,
    usable_shapes,
    worlds,
)

from cupy_moe_ar import DType, Workspace
from cupy_moe_ar import reference as ref

# tokens, hidden_dim, T, wire; options; numbers of ranks
RANDOM: list[tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ((33, 64, BF16, None), {}, (1, 2, 3, 16)),
    ((12, 264, F16, None), {"gamma": F32}, (2, 4, 5, 8)),
    ((9, 520, BF16, F32), {}, (1, 2, 3, 16)),
    ((9, 1032, F32, None), {"bias": 1.0}, (2, 4)),
    ((9, 2880, F16, F32), {"residual": False, "bias": 1.0}, (2, 8)),
    ((12, 7168, BF16, None), {"eps": 1e-5, "gamma": F32}, (2, 4)),
    ((3, 32768, BF16, None), {}, (2,)),
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
    case = dense_case(ranks.size, *sizes, **options)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, use_oneshot=oneshot)
        if rank.rank == 0:  # the others have the same bits
            check(case, results)


@each_protocol
@each_world(2, 3)
def test_c3_ragged_rows(ranks: Ranks, oneshot: bool) -> None:
    for hidden_dim in (64, 1032, 2880):
        rows = [filled(np.arange(64)[:, None] % 8 + 1, BF16, 64, hidden_dim)] * ranks.size
        case = DenseCase(BF16, rows, gamma=filled(1, BF16, hidden_dim))
        expected = (np.arange(64)[:, None] % 8 + 1) * ranks.size

        @ranks.with_workspace(case)
        def body(
            rank: Rank, workspace: Workspace, case: DenseCase = case, expected: Any = expected
        ) -> None:
            results = see_saw(rank, workspace, case, (1, 15, 27, 64), use_oneshot=oneshot)
            assert (results["residual_out"] == expected).all()
            assert ref.ulp_distance(results["norm_out"], np.ones(case.shape), BF16).max() <= 1


@pytest.mark.parametrize(("dtype", "tiny"), [(BF16, 0x8001), (F32, 0x80000001)])
@each_protocol
@each_world(2, 3)
def test_c1_negative_subnormals(ranks: Ranks, dtype: DType, tiny: int, oneshot: bool) -> None:
    rows = [filled(0, dtype, 4, 1024) for _ in range(ranks.size)]
    for r, part in enumerate(rows):
        bits(part)[:, :: 1 if r == 0 else 2] = tiny
    case = DenseCase(dtype, rows, residual=filled(0, dtype, 4, 1024), gamma=filled(1, dtype, 1024))
    expected = np.full(case.shape, tiny, bits(rows[0]).dtype)
    expected[:, ::2] += ranks.size - 1

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, (4, 1, 4, 4, 3, 4, 4), use_oneshot=oneshot)
        assert (bits(results["residual_out"]) == expected).all()


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), slice(1, 2)], ids=str)
@pytest.mark.parametrize(("dtype", "wire"), [(BF16, None), (F16, None), (F32, None), (F16, F32)])
@each_protocol
@each_world(2, 3)
def test_c2_negative_zero(
    ranks: Ranks, dtype: DType, wire: DType | None, columns: slice, oneshot: bool
) -> None:
    part = filled(0, dtype, 3, 512)
    part[:, columns] = -0.0
    case = DenseCase(dtype, [part] * ranks.size, gamma=filled(1, dtype, 512), comm_dtype=wire)
    with_residual = replace(case, residual=filled(1, dtype, *case.shape))

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for _ in range(4):
            total = finalize(rank, workspace, case, use_oneshot=oneshot)["allreduce_out"]
            assert (bits(total) == 0).all()
            some = finalize(rank, workspace, with_residual, use_oneshot=oneshot)
            assert (some["residual_out"] == 1).all()


@each_protocol
@each_world(2, 4, 8, 16)
def test_c4_ranks_are_summed_in_float32(ranks: Ranks, oneshot: bool) -> None:
    rows = [filled(1 if r else 256, BF16, 3, 256) for r in range(ranks.size)]
    case = DenseCase(BF16, rows, gamma=filled(1, BF16, 256))
    expected = ref.round_to(np.float64(256 + ranks.size - 1), BF16)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, use_oneshot=oneshot)
        assert (results["residual_out"] == expected).all()


@pytest.mark.parametrize(("dtype", "wire"), [(BF16, None), (F16, None), (BF16, F32), (F32, None)])
@each_protocol
@each_world(2, 3)
def test_nan_and_infinity_pass(
    ranks: Ranks, dtype: DType, wire: DType | None, oneshot: bool
) -> None:
    rows = [filled(0, dtype, 3, 512) for _ in range(ranks.size)]
    rows[-1][1, 8:12] = [np.inf, -np.inf, np.nan, -np.nan]
    bits(rows[-1])[1, 12] = {BF16: 0xFFFF, F16: 0xFC01}.get(dtype, 0xFFFFFFFF)  # NaNs too
    rows[-1][2] = 1
    case = DenseCase(dtype, rows, gamma=filled(1, dtype, 512), comm_dtype=wire)
    expected = filled(0, F32, 3, 512)
    expected[1, 8:13] = [np.inf, -np.inf, np.nan, np.nan, np.nan]
    expected[2] = 1

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, use_oneshot=oneshot)
        total, norm = (results[name].astype(np.float32) for name in ("allreduce_out", "norm_out"))
        assert np.array_equal(total, expected, equal_nan=True)
        assert np.isnan(norm[1, 10:13]).all()


@each_protocol
@each_world(1, 2, 3)
def test_every_combination_of_outputs_and_c15_in_place(ranks: Ranks, oneshot: bool) -> None:
    case = dense_case(ranks.size, 7, 520)
    chosen = [names for count in (1, 2) for names in combinations(OUTPUTS, count)]
    places = [
        {"norm_out": "allreduce_in"},
        {"residual_out": "allreduce_in"},
        {"allreduce_out": "allreduce_in"},
        {"norm_out": "residual_in", "residual_out": "allreduce_in"},
        {"residual_out": "residual_in", "norm_out": "allreduce_in"},
    ]

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=oneshot)
        check(case, results)
        calls = [(names, {}) for names in chosen] + [(OUTPUTS, place) for place in places]
        for shape in usable_shapes(workspace, case, "oneshot" if oneshot else "twoshot"):
            for names, place in calls:
                some = finalize(
                    rank, workspace, case, names, place, launch_shape=shape, use_oneshot=oneshot
                )
                for name, output in some.items():
                    check_bits(output, results[name], f"{name}, {names}, {place}, {shape}")


@each_protocol
@each_world(2, 3)
def test_c11_no_tokens(ranks: Ranks, oneshot: bool) -> None:
    case = dense_case(ranks.size, 3, 64)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for _ in range(3):  # `finalize` sees that the state stays
            check(case, finalize(rank, workspace, case, use_oneshot=oneshot))
            none = finalize(rank, workspace, case.first(0), use_oneshot=oneshot)
            assert none["norm_out"].shape == (0, 64)


@each_world(2)
def test_untyped_arrays_and_defaults(ranks: Ranks) -> None:
    """The bits of bfloat16 as uint16, and the total alone."""
    case = dense_case(ranks.size, 3, 64)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        total = finalize(rank, workspace, case)["allreduce_out"]
        rows = rank.put(bits(case.rows[rank.rank]))
        output = rank.put(np.zeros(case.shape, np.uint16))
        rank.meet()
        case.function(rows.array, workspace, allreduce_out=output.array, stream=rank.stream)
        rank.meet()
        assert (output.read() == bits(total)).all()
