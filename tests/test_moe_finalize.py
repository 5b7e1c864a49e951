"""The operation: values, bits, and what a call leaves behind."""

from __future__ import annotations

import time
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
    Case,
    Rank,
    Ranks,
    backend,
    bits,
    check,
    check_bits,
    crowded,
    each_world,
    filled,
    finalize,
    random_case,
    see_saw,
    usable_shapes,
    worlds,
)

from cupy_moe_ar import DType, Workspace, moe_finalize_allreduce_fusion
from cupy_moe_ar import reference as ref

# ---- random data ---------------------------------------------------------------------------------

# tokens, hidden_dim, top_k, T, wire; options; numbers of ranks
RANDOM: list[tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ((33, 64, 1, BF16, None), {"scale": None}, (1, 2, 3, 16)),
    ((12, 264, 4, F16, None), {"scale": F16, "gamma": F32}, (2, 4, 5, 8)),
    ((9, 520, 6, BF16, F32), {"factor": 2.5}, (1, 2, 3, 16)),
    ((9, 1032, 8, F32, None), {"factor": 0.5}, (2, 4)),
    ((9, 2880, 10, F16, F32), {"residual": False, "bias": 1.0}, (2, 8)),
    ((9, 1032, 8, BF16, None), {"shared_on": lambda rank: rank == 1}, (2, 3, 4, 5, 8)),
    ((7, 4096, 32, BF16, None), {"shared_on": lambda rank: False, "eps": 1e-5}, (2,)),
    ((7, 6144, 64, BF16, None), {"scale": BF16, "gamma": F32}, (2,)),
    ((12, 7168, 8, BF16, None), {"factor": 2.5, "eps": 1e-5}, (2, 4)),
    ((7, 16384, 8, F16, None), {"bias": 1.0}, (2,)),
    ((3, 32768, 2, BF16, None), {}, (2,)),
]


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (size, sizes, options)
        for sizes, options, counts in RANDOM
        for size in worlds(*counts, mpi_up_to=max(3, *counts))
    ],
    indirect=["ranks"],
)
def test_random(ranks: Ranks, sizes: tuple[Any, ...], options: dict[str, Any]) -> None:
    case = random_case(ranks.size, *sizes, **options)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case)
        if rank.rank == 0:  # the others have the same bits
            check(case, results)


@pytest.mark.parametrize(
    ("dtype", "wire", "bound"), [(BF16, None, 1.18), (F16, None, 1.18), (BF16, F32, 1.01)]
)
@each_world(2, mpi_up_to=2)
def test_error_against_the_rounding_floor(
    ranks: Ranks, dtype: DType, wire: DType | None, bound: float
) -> None:
    case = random_case(ranks.size, 16, 7168, 8, dtype, wire, scale=dtype, factor=2.5, eps=1e-5)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        residual = finalize(rank, workspace, case, ["residual_out"])
        if rank.rank == 0:
            floor = ref.rounding_floor(case.exact, dtype)["residual_out"][0]
            assert ref.errors(residual, case.exact)["residual_out"][0] <= bound * floor


# ---- exact numbers -------------------------------------------------------------------------------


def zeros(size: int, tokens: int, hidden_dim: int, dtype: DType, **more: Any) -> Case:
    """One route a token on each rank, to row t % 8 of rows that are 0; gamma 1."""
    index = np.arange(tokens, dtype=np.int32)[:, None] % 8
    rows = [filled(0, dtype, 8, hidden_dim) for _ in range(size)]
    return Case(dtype, rows, [index] * size, gamma=filled(1, dtype, hidden_dim), **more)


@pytest.mark.parametrize("hidden_dim", [64, 264, 520, 1032, 2880])
@pytest.mark.parametrize("dtype", [BF16, F16])
@each_world(2, mpi_up_to=3)
def test_c3_ragged_rows(ranks: Ranks, dtype: DType, hidden_dim: int) -> None:
    case = zeros(ranks.size, 256, hidden_dim, dtype)
    for rows in case.rows:
        rows[...] = filled(np.arange(1, 9)[:, None], dtype, *rows.shape)
    expected = (np.arange(256)[:, None] % 8 + 1) * ranks.size

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, (1, 15, 27, 256))
        assert (results["residual_out"] == expected).all()
        assert ref.ulp_distance(results["norm_out"], np.ones(case.shape), dtype).max() <= 1


@pytest.mark.parametrize(("dtype", "tiny"), [(BF16, 0x8001), (F32, 0x80000001)])
@each_world(2, 3)
def test_c1_negative_subnormals(ranks: Ranks, dtype: DType, tiny: int) -> None:
    case = zeros(ranks.size, 4, 1024, dtype, residual=filled(0, dtype, 4, 1024))
    for r, rows in enumerate(case.rows):
        bits(rows)[:, :: 1 if r == 0 else 2] = tiny
    expected = np.full(case.shape, tiny, bits(rows).dtype)
    expected[:, ::2] += ranks.size - 1

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case, (4, 1, 4, 4, 3, 4, 4))
        assert (bits(results["residual_out"]) == expected).all()
        thousandfold = expected.view(rows.dtype).astype(np.float64) * 1000
        assert ref.ulp_distance(results["norm_out"], thousandfold, dtype).max() <= 1


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), slice(1, 2)], ids=str)
@pytest.mark.parametrize("origin", ["shared", "rounding"])
@pytest.mark.parametrize(("dtype", "wire"), [(BF16, None), (F16, None), (F32, None), (F16, F32)])
@each_world(2, 3)
def test_c2_negative_zero(
    ranks: Ranks, dtype: DType, wire: DType | None, origin: str, columns: slice
) -> None:
    """Partials that are -0.0 as FP32, or become it in rounding to the wire."""
    case = zeros(ranks.size, 3, 512, dtype, comm_dtype=wire)
    if origin == "shared":  # -1 * (+0.0) + -0.0
        shared = filled(0, dtype, *case.shape)
        shared[:, columns] = -0.0
        case = replace(case, shared=[shared] * ranks.size, factor=-1.0)
    else:
        for rows in case.rows:
            rows[:, columns] = -(2.0**-14)
        tiny = {BF16: 2.0**-140, F16: 2.0**-26, F32: 2.0**-160}[wire or dtype]
        case = replace(case, factor=tiny * 2**14)
    sent = ref.round_to(case.float32_partial(0), wire or dtype)[:, columns]
    assert ((sent == 0) & np.signbit(sent)).all()  # the test can fail
    with_residual = replace(case, residual=filled(1, dtype, *case.shape))

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for _ in range(4):
            assert (finalize(rank, workspace, case)["allreduce_out"] == 0).all()
            assert (finalize(rank, workspace, with_residual)["residual_out"] == 1).all()


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (BF16, [256.0] + 7 * [1.0]),
        (BF16, [256.0] + 31 * [1.0]),
        (F16, [2048.0] + 15 * [1.0]),
        (BF16, [1e4, 1.0, 1.0, 1.0, -1e4, 1.0, 1.0]),
        (F16, [3e4, 0.25, 3e4, 0.25, -3e4, 0.25, -3e4, 0.25, 0.5]),
    ],
)
@each_world(2, 3)
def test_c4_routes_are_summed_in_float32(ranks: Ranks, dtype: DType, values: list[float]) -> None:
    rows = filled(np.array(values)[:, None], dtype, len(values), 256)
    in_16_bits = rows[0] * 0
    for row in rows:
        in_16_bits = in_16_bits + row
    expected = ref.round_to(rows.astype(np.float64).sum(axis=0), dtype)
    assert (in_16_bits != expected).all()  # the test can fail
    index = np.tile(np.arange(len(values), dtype=np.int32), (2, 1))
    absent = [np.full_like(index, -1)] * (ranks.size - 1)
    case = Case(dtype, [rows] * ranks.size, [index, *absent], residual=filled(0, dtype, 2, 256))

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for output in see_saw(rank, workspace, case, outputs=OUTPUTS[:2]).values():
            assert (output == expected).all()


@each_world(2, 4, 8, 16)
def test_c4_ranks_are_summed_in_float32(ranks: Ranks) -> None:
    case = zeros(ranks.size, 2, 256, BF16)
    for r, rows in enumerate(case.rows):
        rows[...] = 256 if r == 0 else 1
    expected = ref.round_to(np.float64(256 + ranks.size - 1), BF16)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        assert (see_saw(rank, workspace, case)["residual_out"] == expected).all()


@pytest.mark.parametrize("scale", [BF16, F32])
@each_world(2, 3)
def test_c5_absent_routes_factor_and_shared_expert(ranks: Ranks, scale: DType) -> None:
    index = [np.full((3, 4), -1, np.int32) for _ in range(ranks.size)]
    index[0][...] = [[0, -1, 7, -1], [-1, -1, -1, -1], [3, 12, -1, -1]]
    index[1][...] = [[-1, 5, -1, 9], [0, 1, 2, 3], [-1, -1, 30, 31]]
    rows, scales, outside = [], [], []
    for own in index:
        rows.append(filled(np.arange(1, 41)[:, None], BF16, 40, 512))
        rows[-1][np.setdiff1d(np.arange(40), own)] = np.nan
        scales.append(np.where(own < 0, np.nan, 0.5).astype(ref.numpy_dtype(scale)))
        others = np.resize([-7, 40, 2**31 - 1, -(2**31)], own.shape)  # as absent as -1
        outside.append(np.where(own < 0, others, own).astype(np.int32))
    case = Case(BF16, rows, index, scales, residual=filled(0, BF16, 3, 512))
    doubled = replace(case, factor=2.0)
    ones, none = filled(1, BF16, 3, 512), [None] * (ranks.size - 1)
    expected = [
        (case, [12.5, 5, 40]),
        (replace(case, index=outside), [12.5, 5, 40]),
        (doubled, [25, 10, 80]),
        (replace(doubled, shared=[ones, *none]), [26, 11, 81]),
        (replace(doubled, shared=[*none, ones]), [26, 11, 81]),
        (replace(doubled, shared=[ones] * ranks.size), [v + ranks.size for v in (25, 10, 80)]),
    ]

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for variant, values in expected * 2:
            output = finalize(rank, workspace, variant, ["residual_out"])["residual_out"]
            assert (output == np.array(values)[:, None]).all()


@pytest.mark.parametrize(("dtype", "wire"), [(BF16, None), (F16, None), (BF16, F32), (F32, None)])
@each_world(2, 3)
def test_nan_and_infinity_pass(ranks: Ranks, dtype: DType, wire: DType | None) -> None:
    """From the last rank, each in a column of its own."""
    case = zeros(ranks.size, 3, 512, dtype, comm_dtype=wire)
    case.rows[-1][1, 8:12] = [np.inf, -np.inf, np.nan, -np.nan]
    bits(case.rows[-1])[1, 12] = {BF16: 0xFFFF, F16: 0xFC01}.get(dtype, 0xFFFFFFFF)  # NaNs too
    case.rows[-1][2] = 1
    expected = filled(0, F32, 3, 512)
    expected[1, 8:13] = [np.inf, -np.inf, np.nan, np.nan, np.nan]
    expected[2] = 1

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = see_saw(rank, workspace, case)
        total, norm = (results[name].astype(np.float32) for name in ("allreduce_out", "norm_out"))
        assert np.array_equal(total, expected, equal_nan=True)
        assert np.isnan(norm[1, 10:13]).all()
        assert np.allclose(norm[::2], expected[::2], rtol=0, atol=1e-6)


# ---- arguments and launches ----------------------------------------------------------------------


@each_world(1, 2, 3)
def test_every_combination_of_outputs_and_c15_in_place(ranks: Ranks) -> None:
    case = random_case(ranks.size, 7, 520)
    chosen = [names for count in (1, 2) for names in combinations(OUTPUTS, count)]
    places = [
        {"residual_out": "residual_in"},
        {"norm_out": "residual_in"},
        {"allreduce_out": "residual_in"},
        {"norm_out": "shared_expert_output"},
        {"allreduce_out": "shared_expert_output", "residual_out": "residual_in"},
    ]

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case)
        check(case, results)
        calls = [(names, {}) for names in chosen] + [(OUTPUTS, place) for place in places]
        for shape in usable_shapes(workspace, case):
            for names, place in calls:
                some = finalize(rank, workspace, case, names, place, launch_shape=shape)
                for name, output in some.items():
                    check_bits(output, results[name], f"{name}, {names}, {place}, {shape}")


@each_world(2, 3, 4)
def test_c11_c12_no_tokens_and_about_as_many_as_ranks(ranks: Ranks) -> None:
    size = ranks.size
    case = random_case(size, size + 1, 64)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        for count in (0, 1, size - 1, size, 0, size + 1) * 2:  # without tokens the state stays
            part = case.first(count)
            results = finalize(rank, workspace, part)
            if count:
                check(part, results)


@pytest.mark.parametrize("at_end", [None, True, False])
@pytest.mark.parametrize("pdl", [False, True])
@each_world(2, 3)
def test_launch_options_change_no_bits(ranks: Ranks, pdl: bool, at_end: bool | None) -> None:
    """Eight back to back: with programmatic launch the next one begins early."""
    case = random_case(ranks.size, 7, 1032)
    options = {"launch_with_pdl": pdl, "trigger_completion_at_end": at_end}

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, **options)
        check(case, results)
        inputs = {name: rank.put(x) for name, x in case.arrays(rank.rank).items()}
        written = [{name: rank.put(x * 0) for name, x in results.items()} for _ in range(8)]
        rank.meet()
        for outputs in written:
            arrays = {name: buffer.array for name, buffer in (inputs | outputs).items()}
            moe_finalize_allreduce_fusion(
                workspace=workspace, **arrays, **case.numbers, **options, stream=rank.stream
            )
        rank.meet()
        for outputs in written:
            for name, buffer in outputs.items():
                check_bits(buffer.read(), results[name], name)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (size, sizes)
        for sizes, counts in (
            ((64, 64, 6, BF16, None), (1, 2, 3, 5, 16)),
            ((64, 1032, 6, F16, None), (2, 3, 8)),
            ((7, 2880, 6, F16, F32), (1, 2, 4)),
            ((7, 1032, 6, F32, None), (2, 3)),
            ((64, 7168, 6, BF16, None), (2,)),
            ((7, 16384, 6, BF16, F32), (2,)),
        )
        for size in worlds(*counts, mpi_up_to=max(3, *counts))
    ],
    indirect=["ranks"],
)
def test_c14_bits_depend_on_no_plan_and_no_batch(ranks: Ranks, sizes: tuple[Any, ...]) -> None:
    case = random_case(ranks.size, *sizes, seed=1)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case)
        if rank.rank == 0:
            check(case, results)
        for count in (5, 1, case.shape[0], 2):
            part = case.first(count)
            for shape in usable_shapes(workspace, part):
                for name, output in finalize(rank, workspace, part, launch_shape=shape).items():
                    check_bits(output, results[name][:count], f"{name}, {count} of {shape}")


@pytest.mark.skipif(backend() != "cpu", reason="about the emulator")
@pytest.mark.parametrize("resident", [1, 0])
@pytest.mark.parametrize(("hidden_dim", "wire"), [(264, None), (1032, F32)])
@each_world(2, 3)
def test_random_interleavings(
    ranks: Ranks, hidden_dim: int, wire: DType | None, resident: int
) -> None:
    """Threads preempted at any access; one resident cluster, and all at a time."""
    case = random_case(ranks.size, 5, hidden_dim, comm_dtype=wire)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case)
        workspace._backend.resident_clusters = resident
        for seed in (1, 2, 3):
            workspace._backend.seed = seed * 100 + rank.rank
            for shape in usable_shapes(workspace, case):
                again = see_saw(rank, workspace, case, (1, 3), launch_shape=shape)
                for name, output in again.items():
                    check_bits(output, results[name], f"{name}, {shape}")


@pytest.mark.skipif(backend() != "cpu", reason="GPUs have fewer clusters than these tests rows")
@pytest.mark.parametrize("hidden_dim", [264, 1032])
@each_world(2, 3)
def test_clusters_that_take_several_rows(ranks: Ranks, hidden_dim: int) -> None:
    """Two clusters for up to seven rows: pushed ahead, and both halves of the row sums in turn."""
    case = random_case(ranks.size, 7, hidden_dim)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case)
        if rank.rank == 0:
            check(case, results)
        with crowded(workspace, 2):
            shapes = usable_shapes(workspace, case)
            assert {shape.kernel for shape in shapes} <= {"rows", "rows2", "long"}
            for seed in (0, 1):
                workspace._backend.seed = seed * 100 + rank.rank * seed
                for shape in shapes:
                    again = see_saw(rank, workspace, case, (1, 7, 2, 5), launch_shape=shape)
                    for name, output in again.items():
                        check_bits(output, results[name], f"{name}, {shape}")


@pytest.mark.gpu
@each_world(2, 4)
def test_graph_replays(ranks: Ranks) -> None:
    """A graph of 20 launches, replayed 50 times; then with other values in the same arrays."""
    cases = [random_case(ranks.size, 4, 7168, seed=seed) for seed in (0, 1)]

    @ranks.with_workspace(cases[0])
    def body(rank: Rank, workspace: Workspace) -> None:
        expected = [finalize(rank, workspace, case) for case in cases]
        check(cases[0], expected[0])
        inputs = {name: rank.put(x) for name, x in cases[0].arrays(rank.rank).items()}
        written = [{name: rank.put(x * 0) for name, x in expected[0].items()} for _ in range(20)]
        rank.meet()
        rank.stream.begin_capture()
        for outputs in written:
            arrays = {name: buffer.array for name, buffer in (inputs | outputs).items()}
            moe_finalize_allreduce_fusion(workspace=workspace, **arrays, **cases[0].numbers)
        graph = rank.stream.end_capture()
        graph.upload(rank.stream)
        begin = time.monotonic()
        for case, results in zip(cases, expected, strict=True):
            for name, host in case.arrays(rank.rank).items():
                inputs[name].array.set(host)
            rank.meet()
            for _ in range(50):
                graph.launch(rank.stream)
            rank.meet()
            for outputs in written:
                for name, buffer in outputs.items():
                    check_bits(buffer.read(), results[name], name)
        assert time.monotonic() - begin < 60
