"""Two-shot gives one-shot's bits, whatever the tokens, the ranks and the launch; and its halves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    OUTPUTS,
    Array,
    Case,
    Rank,
    Ranks,
    backend,
    check,
    check_bits,
    crowded,
    dense_case,
    each_world,
    finalize,
    launch,
    random_case,
    reduction_case,
    see_saw,
    usable_shapes,
    worlds,
)

from cupy_moe_ar import (
    ArgumentError,
    DType,
    LaunchShape,
    PeerTimeoutError,
    Workspace,
    abi,
    allgather_residual_rmsnorm,
    moe_finalize_reduce_scatter,
    reduce_scatter,
)
from cupy_moe_ar import reference as ref

Make = Callable[..., Case]
PRODUCERS: dict[str, Make] = {
    "moe_finalize": lambda size, tokens, hidden, *dtypes, **more: random_case(
        size, tokens, hidden, 4, *dtypes, **more
    ),
    "moe_reduction": lambda size, tokens, hidden, *dtypes, **more: reduction_case(
        size, tokens, hidden, [3, 9], *dtypes, **more
    ),
    "allreduce": dense_case,
}
each_producer = pytest.mark.parametrize("make", PRODUCERS.values(), ids=PRODUCERS)


def edges(size: int) -> list[int]:
    """Token counts about the number of ranks, ragged and even."""
    return sorted({1, max(1, size - 1), size, size + 1, 2 * size + 1, 3 * size})


# ---- the whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "hidden_dim", "dtypes"),
    [
        (size, hidden_dim, dtypes)
        for hidden_dim, dtypes, counts in (
            (264, (BF16, None), (1, 2, 3, 4, 8)),
            (64, (F16, F32), (2, 5, 16)),
            (1032, (F32, None), (2, 3)),
            (4104, (BF16, F32), (2,)),
        )
        for size in worlds(*counts)
    ],
    indirect=["ranks"],
)
@each_producer
def test_bits_are_one_shots(
    ranks: Ranks, hidden_dim: int, dtypes: tuple[DType, DType | None], make: Make
) -> None:
    counts = edges(ranks.size)
    case = make(ranks.size, max(counts), hidden_dim, *dtypes)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=True)
        if rank.rank == 0:
            check(case, results)
        for count in counts:
            some = finalize(rank, workspace, case.first(count), use_oneshot=False)
            for name, output in some.items():
                check_bits(output, results[name][:count], f"{name} of {count} tokens")


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
@each_producer
@each_world(2, 3, 4)
def test_few_clusters_with_many_tokens(ranks: Ranks, make: Make, clusters: int) -> None:
    """Rows in turn: several are under way at a time, and owners take turns within a cluster."""
    case = make(ranks.size, 4 * ranks.size + 1, 520)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=True)
        with crowded(workspace, clusters):
            for oneshot in (False, True):
                protocol = "oneshot" if oneshot else "twoshot"
                shapes = usable_shapes(workspace, case, protocol)
                for shape in shapes if clusters < 3 else shapes[-2:]:
                    options: dict[str, Any] = {"use_oneshot": oneshot, "launch_shape": shape}
                    for name, output in finalize(rank, workspace, case, **options).items():
                        check_bits(output, results[name], f"{name}, {protocol}, {shape}")


@pytest.mark.parametrize("options", [{}, {"norm": False}])
@each_world(2, 3)
def test_every_plan(ranks: Ranks, options: dict[str, Any]) -> None:
    case = random_case(ranks.size, 7, 1032, comm_dtype=F32)
    outputs = OUTPUTS if options.get("norm", True) else OUTPUTS[:2]

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=True)
        for count in (7, 1, 4):
            part = case.first(count)
            for shape in usable_shapes(workspace, part, "twoshot"):
                some = finalize(
                    rank, workspace, part, outputs, launch_shape=shape, use_oneshot=False
                )
                for name, output in some.items():
                    check_bits(output, results[name][:count], f"{name}, {count} of {shape}")


@pytest.mark.skipif(backend() != "cpu", reason="about the emulator")
@pytest.mark.parametrize("resident", [1, 0])
@each_world(2, 3)
def test_random_interleavings(ranks: Ranks, resident: int) -> None:
    """Threads preempted at any access; one resident cluster, and all at a time."""
    case = random_case(ranks.size, 2 * ranks.size + 1, 264)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        results = finalize(rank, workspace, case, use_oneshot=False)
        workspace._backend.resident_clusters = resident
        with crowded(workspace, 2):
            for seed in (1, 2):
                workspace._backend.seed = seed * 100 + rank.rank
                for shape in usable_shapes(workspace, case, "twoshot"):
                    options: dict[str, Any] = {"use_oneshot": False, "launch_shape": shape}
                    again = see_saw(rank, workspace, case, (1, 3), **options)
                    for name, output in again.items():
                        check_bits(output, results[name], f"{name}, {shape}")


@each_world(2, 3)
def test_protocol_is_chosen_by_capacity(ranks: Ranks) -> None:
    case = dense_case(ranks.size, 5, 64)

    @ranks.with_workspace(case, max_oneshot_token_num=2)
    def body(rank: Rank, workspace: Workspace) -> None:
        assert (workspace.max_token_num, workspace.max_oneshot_token_num) == (5, 2)
        assert workspace.fits(2, 64, use_oneshot=True)
        assert not workspace.fits(3, 64, use_oneshot=True)
        assert workspace.fits(5, 64)
        check(case, finalize(rank, workspace, case))
        check(case, finalize(rank, workspace, case, use_oneshot=False))
        check(case.first(2), finalize(rank, workspace, case.first(2), use_oneshot=True))
        with pytest.raises(ArgumentError, match=r"5 tokens.*one-shot capacity.*\(2 such") as caught:
            finalize(rank, workspace, case, use_oneshot=True)
        rank.same(str(caught.value))
        with pytest.raises(ArgumentError, match="use_oneshot must be True, False or None"):
            finalize(rank, workspace, case, use_oneshot="no")


# ---- bounded waits -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7])
@each_world(2, 3)
def test_missing_rank_is_named_by_its_owners(ranks: Ranks, tokens: int) -> None:
    """Who waits for an owner, which waits for the missing rank, hears whom the owner blames."""
    bound, missing = 1.0, ranks.size - 1
    case = dense_case(ranks.size, tokens, 264)

    @ranks.with_workspace(case, timeout_s=bound)
    def body(rank: Rank, workspace: Workspace) -> None:
        finalize(rank, workspace, case, use_oneshot=False)
        inputs = {name: rank.put(x) for name, x in case.arrays(rank.rank).items()}
        norm = rank.put(case.rows[0] * 0)
        arrays = {name: buffer.array for name, buffer in inputs.items()}
        rank.meet()
        begin = time.monotonic()

        def call() -> None:
            case.function(workspace=workspace, norm_out=norm.array, use_oneshot=False, **arrays,
                          **case.numbers)  # fmt: skip
            rank.wait()
            assert time.monotonic() - begin < bound + 2

        if rank.rank != missing:
            call()
            assert np.isnan(norm.read()).all()
            with pytest.raises(PeerTimeoutError) as caught:
                workspace.check()
            assert (caught.value.missing_rank, caught.value.launch) == (missing, 1)
        rank.meet()
        if rank.rank == missing:
            # No owner has sent a total that lacks a part.
            words = np.frombuffer(_totals(workspace, case), np.uint32)
            assert (words == abi.SENTINEL).all()
            begin = time.monotonic()
            call()  # sees that the others have given up
        rank.meet()


def _totals(workspace: Workspace, case: Case) -> bytes:
    """The slots of totals in the epoch of launch 1."""
    tokens, hidden_dim = case.shape
    row_bytes = hidden_dim * 2
    rows = workspace.world_size * -(-tokens // workspace.world_size)
    begin = workspace._memory.slab.pointer + abi.SLAB_HEADER_BYTES + workspace._params.epoch_bytes
    return workspace._backend.read(begin + rows * row_bytes, tokens * row_bytes)


# ---- the halves ----------------------------------------------------------------------------------


def scatter(rank: Rank, workspace: Workspace, case: Case, **options: Any) -> Array:
    """The own totals; every rank calls."""
    tokens, hidden_dim = case.shape
    share = workspace.share(tokens)
    finalizes = case.operation == "moe_finalize"
    inputs = case.arrays(rank.rank)
    for name in ("residual_in", "rms_gamma"):
        inputs.pop(name, None)
    if finalizes:
        options["routed_scaling_factor"] = case.factor
    results = launch(
        rank,
        workspace,
        moe_finalize_reduce_scatter if finalizes else reduce_scatter,
        inputs,
        {"reduce_scatter_out": (share.stop - share.start, hidden_dim)},
        launches=tokens > 0,
        dtype=case.dtype,
        comm_dtype=case.comm_dtype,
        **options,
    )
    return results["reduce_scatter_out"]


def gather(
    rank: Rank,
    workspace: Workspace,
    case: Case,
    rows: Array,
    outputs: tuple[str, ...] = ("allgather_out", "residual_out", "norm_out"),
    in_place: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Array]:
    """The outputs by the all-reduce's names."""
    inputs = {"allgather_in": rows, **case.arrays(rank.rank)}
    inputs = {name: inputs[name] for name in ("allgather_in", "residual_in", "rms_gamma")
              if name in inputs}  # fmt: skip
    results = launch(
        rank,
        workspace,
        allgather_residual_rmsnorm,
        inputs,
        {name: (in_place or {}).get(name, case.shape) for name in outputs},
        launches=case.shape[0] > 0,
        dtype=case.dtype,
        rms_eps=case.eps,
        weight_bias=case.bias,
        **options,
    )
    return {name.replace("allgather_out", "allreduce_out"): x for name, x in results.items()}


HALVES = ["moe_finalize_reduce_scatter", "reduce_scatter", "allgather"]


@pytest.mark.parametrize(
    ("ranks", "hidden_dim", "dtypes"),
    [
        (size, hidden_dim, dtypes)
        for hidden_dim, dtypes, counts in (
            (264, (BF16, None), (1, 2, 3, 8)),
            (64, (F16, None), (2, 16)),
            (1032, (F32, None), (2, 3)),
            (520, (BF16, F32), (2, 3)),
        )
        for size in worlds(*counts)
    ],
    indirect=["ranks"],
)
@pytest.mark.parametrize("name", ["moe_finalize", "allreduce"])
def test_halves_make_the_whole(
    ranks: Ranks, hidden_dim: int, dtypes: tuple[DType, DType | None], name: str
) -> None:
    counts = edges(ranks.size)
    case = PRODUCERS[name](ranks.size, max(counts), hidden_dim, *dtypes)
    operations = [case.operation, *HALVES]

    @ranks.with_workspace(case, operations=operations)
    def body(rank: Rank, workspace: Workspace) -> None:
        whole = finalize(rank, workspace, case, use_oneshot=True)
        for count in (*counts, 0):
            part = case.first(count)
            total = scatter(rank, workspace, part)
            expected = whole["allreduce_out"][:count][workspace.share(count)]
            check_bits(total, expected, f"own totals of {count}")
            results = gather(rank, workspace, part, total)
            for output, found in results.items():
                if dtypes[1] is None or output == "allreduce_out":
                    check_bits(found, whole[output][:count], f"{output} of {count}")
            if count:
                norm = part.norm_of(results["residual_out"])
                far = ref.ulp_distance(results["norm_out"], norm, case.dtype)
                assert far.max() <= (8 if case.dtype is F32 else 1)


@pytest.mark.parametrize("clusters", [1, 2, 3])
@each_world(2, 3, 4)
def test_halves_by_few_clusters(ranks: Ranks, clusters: int) -> None:
    tokens = 3 * ranks.size + 1
    case = random_case(ranks.size, tokens, 520)
    shapes = [LaunchShape(1, 96, "rows"), LaunchShape(2, 32, "rows2"), LaunchShape(1, 64, "long"),
              None]  # fmt: skip

    @ranks.with_workspace(case, operations=["moe_finalize", *HALVES])
    def body(rank: Rank, workspace: Workspace) -> None:
        whole = finalize(rank, workspace, case)
        with crowded(workspace, clusters):
            for shape in shapes:
                for count in (tokens, 1, ranks.size - 1, tokens):
                    part = case.first(count)
                    total = scatter(rank, workspace, part, launch_shape=shape)
                    expected = whole["allreduce_out"][:count][workspace.share(count)]
                    check_bits(total, expected, f"own totals, {shape}")
                    results = gather(rank, workspace, part, total, launch_shape=shape)
                    for name, output in results.items():
                        check_bits(output, whole[name][:count], f"{name}, {shape}")


@each_world(2, 3)
def test_a_fast_rank_cannot_run_away_in_the_halves(ranks: Ranks) -> None:
    """One token: but for greetings its owner waits for nobody, or the others do. One rank late."""
    cases = [dense_case(ranks.size, 1, 64, residual=False, seed=seed) for seed in range(6)]

    @ranks.with_workspace(cases[0], operations=["allreduce", *HALVES], timeout_s=3.0)
    def body(rank: Rank, workspace: Workspace) -> None:
        totals = [finalize(rank, workspace, case)["allreduce_out"] for case in cases]
        own = [total[workspace.share(1)] for total in totals]
        parts = [rank.put(case.rows[rank.rank]) for case in cases]
        shares = [rank.put(x) for x in own]
        scattered = [rank.put(x * 0) for x in own]
        gathered = [rank.put(x * 0) for x in totals]
        options = {"workspace": workspace, "dtype": BF16, "stream": rank.stream}
        for late in range(rank.size):
            rank.meet()
            if rank.rank == late:
                time.sleep(0.1)
            for part, share in zip(parts, scattered, strict=True):
                reduce_scatter(part.array, reduce_scatter_out=share.array, **options)
            rank.meet()
            if rank.rank == late:
                time.sleep(0.1)
            for share, whole in zip(shares, gathered, strict=True):
                allgather_residual_rmsnorm(share.array, allgather_out=whole.array, **options)
            rank.meet()
            for found, expected in zip(scattered + gathered, own + totals, strict=True):
                check_bits(found.read(), expected)


@each_world(2, 3)
def test_outputs_of_the_gather_and_in_place(ranks: Ranks) -> None:
    case = dense_case(ranks.size, 7, 264, gamma=F32)
    places = [{}, {"residual_out": "residual_in"}, {"norm_out": "residual_in"},
              {"allgather_out": "residual_in"}]  # fmt: skip

    @ranks.with_workspace(case, operations=["allreduce", "allgather"])
    def body(rank: Rank, workspace: Workspace) -> None:
        whole = finalize(rank, workspace, case)
        rows = whole["allreduce_out"][workspace.share(7)]
        for place in places:
            for name, output in gather(rank, workspace, case, rows, in_place=place).items():
                check_bits(output, whole[name], f"{name}, {place}")
        for names in (("norm_out",), ("residual_out",), ("allgather_out",)):
            for name, output in gather(rank, workspace, case, rows, names).items():
                check_bits(output, whole[name], name)
        with pytest.raises(ArgumentError, match="at least one of allgather_out"):
            gather(rank, workspace, case, rows, ())
        with pytest.raises(ArgumentError, match=r"allgather_in must have the \d rows that rank"):
            gather(rank, workspace, case.first(4), whole["allreduce_out"][:3])
        with pytest.raises(ArgumentError, match=r"reduce_scatter_out must have shape \[share"):
            launch(
                rank, workspace, reduce_scatter, {"allreduce_in": case.rows[0]},
                {"reduce_scatter_out": (7, 264)}, dtype=BF16,
            )  # fmt: skip
