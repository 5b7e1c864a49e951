"""Quantised outputs: bit for bit what `codecs.quantize` makes of the kernel's own norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    Array,
    Case,
    DenseCase,
    Rank,
    Ranks,
    backend,
    bits,
    check_bits,
    crowded,
    dense_case,
    each_world,
    finalize,
    launch,
    random_case,
    reduction_case,
    usable_shapes,
)

from cupy_moe_ar import (
    ArgumentError,
    DType,
    Workspace,
    WorkspaceError,
    allgather_residual_rmsnorm,
    allreduce_fusion,
    codecs,
    plan_allreduce_fusion,
)
from cupy_moe_ar import reference as ref
from cupy_moe_ar.formats import FORMATS, parse_quant, scales_of

Options = dict[str, Any]
GIVEN = 0.0123
OPTIONS: dict[str, list[Options]] = {
    "fp8_static": [{"scale_factor": GIVEN}, {"scale_factor": np.float32(1e-3).reshape(())}],
    "fp8_per_token_group": [
        {},
        {"scale_dtype": "ue8m0"},
        {"scale_layout": "column_major"},
        {"scale_layout": "column_major", "scale_dtype": "ue8m0"},
    ],
    "nvfp4": [
        {"scale_factor": GIVEN},
        {"scale_factor": np.float32([0.003]), "scale_layout": "linear"},
    ],
    "mxfp8": [{}, {"scale_layout": "linear"}],
    "fp8_per_token": [{}],
}
each_quant = pytest.mark.parametrize("quant", FORMATS)


def quantised(
    rank: Rank,
    workspace: Workspace,
    case: Case,
    quant: str,
    options: Options,
    outputs: Sequence[str] = ("residual_out", "norm_out"),
    **more: Any,
) -> dict[str, Array]:
    """Call the case's operation with quantised outputs; return them all, scales as bytes."""
    tokens, hidden_dim = case.shape
    layout = {name: options.get(name) for name in ("scale_layout", "scale_dtype")}
    fmt = parse_quant(quant)
    places: dict[str, Any] = dict.fromkeys(outputs, case.shape)
    places["quant_out"] = tokens, hidden_dim * fmt.code_bits // 8
    dtypes: dict[str, Any] = {"quant_out": np.uint8}
    if fmt.has_scales:
        scales = scales_of(fmt, tokens, hidden_dim, **layout)
        places["scale_out"], dtypes["scale_out"] = scales.shape, scales.array_dtypes[0]
    inputs, numbers = case.arrays(rank.rank), case.numbers
    given = options.get("scale_factor")
    if isinstance(given, np.ndarray):
        inputs["scale_factor"] = given
    elif given is not None:
        more["scale_factor"] = given
    if case.operation == "allgather":
        numbers = {name: numbers[name] for name in ("dtype", "weight_bias", "rms_eps")}
        inputs["allgather_in"] = inputs.pop("allreduce_in")[workspace.share(tokens)]
    results = launch(
        rank,
        workspace,
        case.function,
        inputs,
        places,
        dtypes=dtypes,
        quant=quant,
        **{**numbers, **layout, **more},
    )
    if "scale_out" in results:
        results["scale_out"] = np.ascontiguousarray(results["scale_out"]).reshape(-1).view(np.uint8)
    return results


def check_quantised(results: dict[str, Array], quant: str, options: Options) -> None:
    """Compare with what the reference makes of `norm_out`."""
    codes, scales = codecs.quantize(results["norm_out"], quant, **options)
    np.testing.assert_array_equal(results["quant_out"], codes, f"quant_out, {options}")
    if scales is not None:
        expected = np.ascontiguousarray(scales).view(np.uint8)
        np.testing.assert_array_equal(
            without_nans(results["scale_out"], scales.dtype),
            without_nans(expected, scales.dtype),
            f"scale_out, {options}",
        )


def without_nans(raw: Array, dtype: Any) -> Array:
    """Bytes, those of every float32 NaN the same."""
    if dtype != np.float32:
        return raw
    words = raw.view(np.float32).copy()
    words[np.isnan(words)] = np.nan
    return words.view(np.uint8)


def check_same(results: dict[str, Array], expected: dict[str, Array], what: str) -> None:
    for name, output in results.items():
        check_bits(output, expected[name][: len(output)], f"{name}, {what}")


class GatherCase(DenseCase):
    """Of an all-gather: every rank has its tokens of the first rank's rows."""

    operation = "allgather"
    function = staticmethod(allgather_residual_rmsnorm)

    def arrays(self, rank: int) -> dict[str, Array]:
        return super().arrays(0)


def gather_case(*sizes: Any, **options: Any) -> GatherCase:
    case = dense_case(*sizes, **options)
    return GatherCase(**{field.name: getattr(case, field.name) for field in fields(case)})


def edged(case: Case) -> Case:
    """With blocks of zeros of both signs, a large column and a tiny one."""
    assert case.gamma is not None
    gamma = case.gamma.copy()
    gamma[:128], gamma[200], gamma[300] = 0, 1e4, 1e-4
    return replace(case, gamma=gamma)


# ---- formats x operations x protocols x dtypes ---------------------------------------------------

OPERATIONS: dict[str, Callable[..., Case]] = {
    "moe_finalize": lambda size, tokens, hidden, *dtypes: random_case(
        size, tokens, hidden, 4, *dtypes
    ),
    "moe_reduction": lambda size, tokens, hidden, *dtypes: reduction_case(
        size, tokens, hidden, [3, 9], *dtypes, gamma=F32, bias=1.0
    ),
    "allgather": lambda size, tokens, hidden, dtype, wire: gather_case(size, tokens, hidden, dtype),
    "allreduce": dense_case,
}
DTYPES = [(BF16, None), (F32, None), (F16, F32), (BF16, F32), (F16, None)]
# A Latin square: every format meets every operation and every pair of dtypes, and these each other.
PAIRS = [
    (quant, name, DTYPES[(i + j) % len(DTYPES)])
    for i, quant in enumerate(FORMATS)
    for j, name in enumerate([*OPERATIONS, "allreduce"])
]


def dense_dtypes(quant: str) -> tuple[DType, DType | None]:
    """Of a format's first all-reduce above, so that other tests find its kernels compiled."""
    return next(dtypes for fmt, name, dtypes in PAIRS if (fmt, name) == (quant, "allreduce"))


@pytest.mark.parametrize(
    ("quant", "name", "dtypes"),
    PAIRS,
    ids=lambda x: x if isinstance(x, str) else "-".join(d.short for d in x if d),
)
@each_world(2, mpi_up_to=2)
def test_bits_are_the_references(
    ranks: Ranks, quant: str, name: str, dtypes: tuple[DType, DType | None]
) -> None:
    """By either protocol, with norm_out and without."""
    case = edged(OPERATIONS[name](ranks.size, 5, 640, *dtypes))
    protocols: list[Options] = [{"use_oneshot": True}, {"use_oneshot": False}]
    if name == "allgather":
        protocols = [{}]

    @ranks.with_workspace(case, operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=[case.operation], quant=quant)
        for options in OPTIONS[quant]:
            results = quantised(rank, workspace, case, quant, options, **protocols[0])
            check_quantised(results, quant, options)
            norm = case.norm_of(results["residual_out"])
            far = ref.ulp_distance(results["norm_out"], norm, case.dtype)
            assert far.max() <= (8 if case.dtype is F32 else 1)
            for protocol in protocols:
                for outputs in (["norm_out"], []):
                    some = quantised(rank, workspace, case, quant, options, outputs, **protocol)
                    check_same(some, results, f"{protocol}, {outputs}")


# ---- sizes ---------------------------------------------------------------------------------------

COUNTS = (1, 5, 32, 127, 128, 129)


@pytest.mark.parametrize(
    ("hidden_dim", "quant", "options", "counts"),
    [
        (7168, "nvfp4", {"scale_factor": 1.0}, COUNTS),
        (7168, "fp8_per_token_group", OPTIONS["fp8_per_token_group"][2], (1, 5, 129)),
        (2880, "mxfp8", {}, COUNTS),  # 90 columns of scales
        (2880, "nvfp4", {"scale_factor": 1.0, "scale_layout": "linear"}, (5, 129)),
        (2880, "fp8_static", {"scale_factor": 0.01}, (1, 129)),
        (2880, "fp8_per_token", {}, (1, 127)),
        (1664, "fp8_per_token_group", OPTIONS["fp8_per_token_group"][3], COUNTS),  # 13 columns
    ],
)
@each_world(2, mpi_up_to=2)
def test_c8_sizes_and_rows(
    ranks: Ranks, hidden_dim: int, quant: str, options: Options, counts: tuple[int, ...]
) -> None:
    """Rows of zeros, with a single 1e4, and normal ones; nothing is written beyond a buffer."""
    case = dense_case(ranks.size, max(counts), hidden_dim, *dense_dtypes(quant), residual=False)
    for rows in case.rows:
        rows[1::3], rows[2::3] = 0, 0
        rows[2::3, 7] = 1e4

    @ranks.with_workspace(case, operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=[case.operation], quant=quant)
        for count in counts:
            part = case.first(count)
            results = quantised(rank, workspace, part, quant, options, ["norm_out"])
            check_quantised(results, quant, options)
            assert not results["quant_out"][1:2].any()
            if quant == "fp8_static" and count > 2:
                assert results["quant_out"][2, 7] == 0x7E


# ---- launches ------------------------------------------------------------------------------------

SHAPED = [  # their kernels have been compiled above
    ("fp8_per_token", F16, None),
    ("fp8_per_token_group", F32, None),
    ("nvfp4", F16, F32),
    ("mxfp8", BF16, F32),
]


@pytest.mark.parametrize(("quant", "dtype", "wire"), SHAPED)
@each_world(2, mpi_up_to=3)
def test_bits_depend_on_no_plan(ranks: Ranks, quant: str, dtype: DType, wire: DType | None) -> None:
    """Every launch shape, with a row or several a cluster; and the plain call's norm."""
    case = edged(random_case(ranks.size, 5, 1152, 4, dtype, wire))
    options = OPTIONS[quant][-1]

    @ranks.with_workspace(case, quant=quant)
    def body(rank: Rank, workspace: Workspace) -> None:
        plain = finalize(rank, workspace, case, ["residual_out", "norm_out"])
        results = quantised(rank, workspace, case, quant, options)
        check_same(plain, results, "plain")
        for clusters, count in ((1 << 20, 5), (2, 5), (2, 3)):
            part = case.first(count)
            with crowded(workspace, clusters):
                for oneshot in (True, False):
                    protocol = "oneshot" if oneshot else "twoshot"
                    for shape in usable_shapes(workspace, part, protocol, quant):
                        more = {"launch_shape": shape, "use_oneshot": oneshot}
                        some = quantised(rank, workspace, part, quant, options, **more)
                        if quant == "nvfp4" or count == 5:  # linear scales; padding has no tokens
                            check_same(some, results, f"{shape}, {protocol}, {count}")
                        check_quantised(some, quant, options)


@pytest.mark.skipif(backend() != "cpu", reason="about the emulator")
@pytest.mark.parametrize("resident", [1, 0])
@pytest.mark.parametrize("quant", ["fp8_per_token", "mxfp8"])
@each_world(2)
def test_random_interleavings(ranks: Ranks, quant: str, resident: int) -> None:
    case = edged(dense_case(ranks.size, 5, 640, *dense_dtypes(quant)))

    @ranks.with_workspace(case, operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=[case.operation], quant=quant)
        results = quantised(rank, workspace, case, quant, {})
        workspace._backend.resident_clusters = resident
        with crowded(workspace, 2):
            for seed in (1, 2, 3):
                workspace._backend.seed = seed * 100 + rank.rank
                for shape in usable_shapes(workspace, case, quant=quant):
                    again = quantised(rank, workspace, case, quant, {}, launch_shape=shape)
                    check_same(again, results, f"{shape}")


# ---- values --------------------------------------------------------------------------------------


def every_value(dtype: DType, first: int, size: int) -> DenseCase:
    """A token whose norm is 32768 of the values of a type: gamma's, since its residual is 1."""
    gamma = np.arange(first, first + 32768, dtype=np.uint16).view(ref.numpy_dtype(dtype))
    rows = [np.zeros((1, 32768), gamma.dtype)] * size
    return DenseCase(dtype, rows, residual=rows[0] + 1, gamma=gamma, eps=0.0)


EVERY_VALUE = [  # allreduces that have been compiled above
    ("fp8_static", F16, {"scale_factor": 1.0}),
    ("fp8_per_token_group", BF16, {}),
    ("fp8_per_token_group", F16, {"scale_dtype": "ue8m0"}),
    ("nvfp4", BF16, {"scale_factor": 1.0}),
]


@pytest.mark.parametrize(("quant", "dtype", "options"), EVERY_VALUE)
@each_world(2, mpi_up_to=3)
def test_every_value_of_16_bits(ranks: Ranks, quant: str, dtype: DType, options: Options) -> None:
    """By the conversions of the machine at hand."""
    cases = [every_value(dtype, first, ranks.size) for first in (0, 32768)]

    @ranks.with_workspace(cases[0], operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=["allreduce"], quant=quant)
        for case in cases:
            results = quantised(rank, workspace, case, quant, options, ["norm_out"])
            assert case.gamma is not None
            with np.errstate(invalid="ignore"):  # gamma has signalling NaNs
                found, meant = results["norm_out"][0], case.gamma
                assert ((found == meant) | (np.isnan(found) & np.isnan(meant))).all()
            check_quantised(results, quant, options)


@pytest.mark.gpu
@each_world(2, mpi_up_to=3)
def test_codes_are_those_of_pytorchs_casts(ranks: Ranks) -> None:
    torch = pytest.importorskip("torch")
    cases = [every_value(F16, first, ranks.size) for first in (0, 32768)]

    @ranks.with_workspace(cases[0], operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=["allreduce"], quant="fp8_static")
        for case in cases:
            codes = quantised(rank, workspace, case, "fp8_static", {"scale_factor": 1.0})
            assert case.gamma is not None
            values = torch.from_numpy(case.gamma.astype(np.float32)).to(f"cuda:{rank.device}")
            theirs = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
            numbers = ~np.isnan(case.gamma)
            # The norm of -0.0 is +0.0: gamma is added to weight_bias.
            numbers &= case.gamma.view(np.uint16) != 0x8000
            assert (codes["quant_out"][0] == theirs)[numbers].all()


@each_quant
@each_world(2, mpi_up_to=3)
def test_nan_infinity_and_negative_zero(ranks: Ranks, quant: str) -> None:
    """Each in a column of its own, and in another block than the others."""
    case = dense_case(ranks.size, 3, 1024, *dense_dtypes(quant), gamma=F32)
    assert case.gamma is not None
    case.gamma[[5, 133, 261, 389]] = [np.nan, np.inf, -np.inf, -0.0]

    @ranks.with_workspace(case, operations=[])
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(operations=[case.operation], quant=quant)
        for options in OPTIONS[quant]:
            results = quantised(rank, workspace, case, quant, options)
            norm = results["norm_out"].astype(np.float32)
            assert np.isnan(norm[:, 5]).all()
            assert np.isinf(norm[:, [133, 261]]).all()
            check_quantised(results, quant, options)
        with_numbers = replace(case, gamma=np.where(np.isnan(case.gamma), 1, case.gamma))
        results = quantised(rank, workspace, with_numbers, quant, options)
        check_quantised(results, quant, options)
        back = codecs.dequantize(results["quant_out"], results.get("scale_out"), quant, **options)
        assert not np.isnan(back).any()


@each_world(2, mpi_up_to=3)
def test_a_given_scale_is_read_at_each_launch(ranks: Ranks) -> None:
    case = edged(dense_case(ranks.size, 3, 640))

    @ranks.with_workspace(case, operations=["allreduce"], quant=["fp8_static", "nvfp4"])
    def body(rank: Rank, workspace: Workspace) -> None:
        inputs = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
        norm = rank.put(case.rows[0] * 0)
        scale = rank.put(np.zeros(1, np.float32))
        for quant, columns in (("fp8_static", 640), ("nvfp4", 320)):
            codes = rank.put(np.zeros((3, columns), np.uint8))
            scales = rank.put(np.zeros((3, 40), np.uint8)) if quant == "nvfp4" else None
            planned = plan_allreduce_fusion(
                workspace=workspace,
                **inputs,
                norm_out=norm.array,
                quant=quant,
                quant_out=codes.array,
                scale_out=scales and scales.array,
                scale_factor=scale.array,
                scale_layout=scales and "linear",
                stream=rank.stream,
            )
            for value in (0.01, 0.5, 0.0, np.nan):  # zero blocks times 0 are no NaNs
                host = np.full(1, value, np.float32)
                if isinstance(scale.array, np.ndarray):
                    scale.array[...] = host
                else:
                    scale.array.set(host)
                rank.meet()
                planned.run()
                rank.meet()
                results = {"norm_out": norm.read(), "quant_out": codes.read()}
                if scales is not None:
                    results["scale_out"] = scales.read().reshape(-1)
                options = {"scale_factor": value}
                check_quantised(
                    results, quant, options | ({"scale_layout": "linear"} if scales else {})
                )


# ---- preparing -----------------------------------------------------------------------------------


@each_world(2)
def test_what_is_not_prepared_says_how(ranks: Ranks) -> None:
    case = dense_case(ranks.size, 3, 64)

    @ranks.with_workspace(case, operations=["allreduce", "reduce_scatter"])
    def body(rank: Rank, workspace: Workspace) -> None:
        with pytest.raises(WorkspaceError, match=r"and quant mxfp8; call .*, quant='mxfp8'\)"):
            quantised(rank, workspace, case, "mxfp8", {})
        with pytest.raises(ArgumentError, match="quant must be None or one of fp8_static"):
            workspace.prepare(quant="fp4")
        workspace.prepare(operations=["allreduce", "reduce_scatter"], quant=["mxfp8"])
        results = quantised(rank, workspace, case, "mxfp8", {})
        check_quantised(results, "mxfp8", {})
        formats = {(variant.operation, variant.quant) for variant in workspace._limits}
        assert ("reduce_scatter", "mxfp8") not in formats
        assert ("reduce_scatter", None) in formats


@each_world(2)
def test_a_remembered_call_is_told_apart(ranks: Ranks) -> None:
    """By the layout, which is in no array."""
    case = dense_case(ranks.size, 128, 64)

    @ranks.with_workspace(case, operations=["allreduce"], quant="mxfp8")
    def body(rank: Rank, workspace: Workspace) -> None:
        arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
        codes = rank.put(np.zeros(case.shape, np.uint8))
        scales = rank.put(np.zeros(128 * 4, np.uint8))
        given = {"quant": "mxfp8", "quant_out": codes.array, "scale_out": scales.array}
        rank.meet()
        for _ in range(2):
            allreduce_fusion(workspace=workspace, **arrays, **given, stream=rank.stream)
        rank.meet()
        swizzled = scales.read()
        linear = rank.put(np.zeros(128 * 2, np.uint8))
        given |= {"scale_out": linear.array, "scale_layout": "linear"}
        rank.meet()
        allreduce_fusion(workspace=workspace, **arrays, **given, stream=rank.stream)
        rank.meet()
        places = codecs.scale_places(scales_of(FORMATS["mxfp8"], 128, 64))
        assert (swizzled[places] == linear.read().reshape(128, 2)).all()
        assert len(bits(swizzled).nonzero()[0]) == 256
