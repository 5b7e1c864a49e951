"""The workspace: sizes, life, what it prepares, faults that every rank sees, bounded waits."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    TIMEOUT_S,
    Case,
    Rank,
    Ranks,
    backend,
    check,
    current_rank,
    each_world,
    finalize,
    random_case,
    see_saw,
)

from cupy_moe_ar import (
    ArgumentError,
    DType,
    PeerTimeoutError,
    UnsupportedError,
    Workspace,
    WorkspaceError,
    moe_finalize_allreduce_fusion,
)
from cupy_moe_ar import reference as ref
from cupy_moe_ar.cpu_backend import CpuBackend
from cupy_moe_ar.cuda_backend import CudaBackend
from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.symmetric import CudaSlab, HostSlab
from cupy_moe_ar.testing import run_ranks


def ready(rank: Rank, workspace: Workspace, case: Case) -> Callable[[], np.ndarray]:
    """Return what launches, waits and returns norm_out; to be called 8 times at most."""
    arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
    norms = [rank.put(np.zeros_like(case.residual)) for _ in range(8)]

    def launch() -> np.ndarray:
        norm = norms.pop()
        moe_finalize_allreduce_fusion(
            workspace=workspace, **arrays, norm_out=norm.array, **case.numbers
        )
        rank.wait()
        return norm.read()

    return launch


# ---- sizes ---------------------------------------------------------------------------------------


def test_c6_bytes_required_is_exact() -> None:
    def required(**sizes: Any) -> int:
        return Workspace.bytes_required(**{"world_size": 2, "hidden_dim": 4096, **sizes})

    rest = 2 << 20  # header, rounded up
    assert required(max_token_num=131072) == 2 * 2**31 + rest  # two epochs of 2**31 bytes
    assert required(max_token_num=131072, comm_dtype="float32") == 2 * 2**32 + rest
    assert required(max_token_num=131072, dtype="float32") == 2 * 2**32 + rest
    huge = {"max_token_num": 2**40, "world_size": 16}
    assert required(**huge, max_oneshot_token_num=2**40) == 2 * 16 * 2**53 + rest
    assert required(**huge) == required(**huge, max_oneshot_token_num=0)
    two_shot = required(**huge, max_oneshot_token_num=0)
    assert two_shot == 2 * 2 * 2**53 + 2 * rest  # and a row for each rank
    assert required(max_token_num=1) == rest
    large = {"world_size": 8, "max_token_num": 2048, "hidden_dim": 7168}
    assert required(**large) == required(**large, max_oneshot_token_num=512) < 250e6


@each_world(2)
def test_c6_capacity_is_in_bytes(ranks: Ranks) -> None:
    sizes = [(16, 1024), (8, 2048), (256, 64)]
    cases = [random_case(ranks.size, *size) for size in sizes]
    too_many = random_case(ranks.size, 17, 1024)

    @ranks.with_workspace(cases[0])
    def body(rank: Rank, workspace: Workspace) -> None:
        capacity = {"world_size": rank.size, "max_token_num": 16, "hidden_dim": 1024}
        assert workspace.nbytes == Workspace.bytes_required(**capacity, max_oneshot_token_num=16)
        for case in cases * 2:
            assert workspace.fits(*case.shape)
            check(case, finalize(rank, workspace, case))
            with pytest.raises(ArgumentError, match=r"17 tokens.*capacity") as caught:
                finalize(rank, workspace, too_many)
            rank.same(str(caught.value))
        assert workspace.fits(16, 1024, "float16")
        assert workspace.fits(8, 1024, "float32")
        assert workspace.fits(8, 1024, comm_dtype="float32", use_oneshot=True)
        assert not workspace.fits(9, 1024, comm_dtype="float32")
        assert workspace.fits(16, 1024, use_oneshot=False)
        for wrong in ((17, 1024), (9, 2048), (1, 1028), (1, 65536), (-1, 1024)):
            assert not workspace.fits(*wrong)


@each_world(2, 3)
def test_one_workspace_serves_every_dtype_wire_and_shape(ranks: Ranks) -> None:
    cases = [
        random_case(ranks.size, 7, 1032, 8, BF16),
        random_case(ranks.size, 7, 64, 1, F16),
        random_case(ranks.size, 7, 520, 6, BF16, F32),
        random_case(ranks.size, 7, 264, 4, F32),
        random_case(ranks.size, 7, 512, 10, F16, F32),
    ]

    @ranks.with_workspace(cases[0], max_token_num=8)
    def body(rank: Rank, workspace: Workspace) -> None:
        for case in cases[1:]:
            with pytest.raises(WorkspaceError, match="is not prepared for") as caught:
                finalize(rank, workspace, case)
            names = case.dtype.value, (case.comm_dtype or case.dtype).value
            remedy = "call workspace.prepare(dtype='{}', comm_dtype='{}') on every rank"
            assert remedy.format(*names) in str(caught.value)
            rank.same(str(caught.value))
            workspace.prepare(dtype=case.dtype, comm_dtype=case.comm_dtype)
        with pytest.raises(ArgumentError, match=r"dtype must be .*int32"):
            workspace.prepare(dtype="int32")
        with pytest.raises(ArgumentError, match=r"operations must be among .*sort"):
            workspace.prepare(operations=["sort"])
        for count in (7, 1, 3, 7, 2):
            for case in cases:
                check(case.first(count), finalize(rank, workspace, case.first(count)))


class CountingGroup:
    """A group that counts what is asked of it."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name in ("allgather", "bcast", "barrier")
        return getattr(self.group, name)


@each_world(2)
def test_calls_do_not_communicate_on_the_host(ranks: Ranks) -> None:
    case = random_case(ranks.size, 3, 64)

    @ranks.run
    def body(rank: Rank) -> None:
        group = CountingGroup(rank.group)
        with rank.workspace(case, comm=group) as workspace:
            built = group.calls
            see_saw(rank, workspace, case)
            assert group.calls == built > 0


# ---- groups --------------------------------------------------------------------------------------


@each_world(2, 4)
def test_c10_subgroups(ranks: Ranks) -> None:
    """Halves beside the whole, the whole's device map reversed, closed in different order."""
    colors = [rank * 2 // ranks.size for rank in range(ranks.size)]
    halves = [random_case(colors.count(color), 5, 264) for color in (0, 1)]
    whole = random_case(ranks.size, 5, 520)

    @ranks.run
    def body(rank: Rank) -> None:
        color = colors[rank.rank]
        half = rank.split(color)
        options: dict[str, Any] = {}
        if backend() == "cuda":
            import cupy

            def current() -> tuple[int, int]:
                return cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr

            pool = [cupy.empty(size, np.uint8) for size in (1, 1000, 12345, 3 << 20)]
            before = current()
            options["device"] = (rank.size - 1 - rank.rank) % cupy.cuda.runtime.getDeviceCount()
        with_half = half.workspace(halves[color])
        elsewhere = rank.workspace(whole, **options)
        with_all = rank.workspace(whole)
        assert (with_half.rank, with_half.world_size) == (half.rank, half.size)
        if backend() == "cuda":
            assert (elsewhere.device, current(), len(pool)) == (options["device"], before, 4)
        for _ in range(4):
            check(halves[color], finalize(half, with_half, halves[color]))
            check(whole, finalize(rank, with_all, whole))
        elsewhere.close()
        for workspace in (with_half, with_all) if color else (with_all, with_half):
            workspace.close()
            workspace.close()


BACKEND: Any = CpuBackend if backend() == "cpu" else CudaBackend
SLAB: Any = HostSlab if backend() == "cpu" else CudaSlab


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("owner", "method", "step"),
    [
        (BACKEND, "__init__", "choosing"),
        (SLAB, "__init__", "allocating"),
        (SLAB, "export", "exporting"),
        (SLAB, "open", "mapping"),
        (SLAB, "read_words", "probing"),
        (BACKEND, "load", "loading"),
        (BACKEND, "bind", "warming up"),
    ],
)
@each_world(2, 3)
def test_c10_failure_on_one_rank_is_everyones(
    ranks: Ranks, owner: Any, method: str, step: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, method)
    case = random_case(ranks.size, 3, 64)

    def planted(*arguments: Any, **options: Any) -> Any:
        if current_rank() == failing:
            raise UnsupportedError("injected")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, method, planted)
    if method == "export":  # which threads of one process do without
        locate = BACKEND.locate

        def elsewhere(self: Any) -> None:
            locate(self)
            self.place = replace(self.place, pid=1000 + current_rank())

        monkeypatch.setattr(BACKEND, "locate", elsewhere)

    @ranks.run
    def build(rank: Rank) -> None:
        with pytest.raises(UnsupportedError, match=f"{step}.*rank {failing}: injected") as caught:
            rank.workspace(case)
        rank.same(str(caught.value))
        supported = Workspace.is_supported(rank.group, backend=backend(), device=rank.device)
        rank.same(supported)
        assert (supported[0], "injected" in supported[1]) == (False, True)

    monkeypatch.undo()

    @ranks.with_workspace(case)
    def build_again(rank: Rank, workspace: Workspace) -> None:
        check(case, finalize(rank, workspace, case))


@each_world(1, 2, 3, 16)
def test_is_supported(ranks: Ranks) -> None:
    @ranks.run
    def body(rank: Rank) -> None:
        answer = Workspace.is_supported(rank.group, backend=backend(), device=rank.device)
        assert answer == (True, f"{backend()}, {rank.size} ranks")
        assert not Workspace.is_supported(rank.group, backend="tpu")[0]
        assert not Workspace.is_supported(object())[0]


def test_init_all_builds_every_rank_in_this_process() -> None:
    options = {"max_token_num": 3, "hidden_dim": 64, "backend": backend(), "timeout_s": TIMEOUT_S}
    workspaces = Workspace.init_all(3, **options)
    case = random_case(3, 3, 64)

    def body(group: Any) -> None:
        rank = Rank(group)
        with rank.on_device(), workspaces[rank.rank] as workspace:
            assert workspace.device == (-1 if rank.device is None else rank.device)
            check(case, finalize(rank, workspace, case))

    run_ranks(3, body)
    with pytest.raises(ArgumentError, match="devices must name 3 devices"):
        Workspace.init_all(3, devices=[0], **options)


# ---- arguments of the constructor ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_dim": 60}, ["hidden_dim must be a positive multiple of 8", "got 60"]),
        ({"hidden_dim": 32776}, ["hidden_dim must be at most 32768", "got 32776"]),
        ({"hidden_dim": 32768, "dtype": "float32"}, ["at most 16384", "got 32768"]),
        ({"hidden_dim": "64"}, ["hidden_dim must be a positive integer", "got '64'"]),
        ({"max_token_num": 0}, ["max_token_num must be a positive integer", "got 0"]),
        ({"max_token_num": 2.5}, ["max_token_num must be a positive integer", "got 2.5"]),
        ({"dtype": "int32"}, ["dtype must be bfloat16, float16 or float32", "int32"]),
        ({"comm_dtype": "float16"}, ["comm_dtype must be bfloat16", "float32", "got float16"]),
        ({"backend": "tpu"}, ["backend must be 'cuda', 'cpu' or 'auto'", "got 'tpu'"]),
        ({"timeout_s": 0}, ["timeout_s must be a positive number", "got 0"]),
        ({"device": 99}, ["device must be", "99"]),
        ({"hidden_dim": 0, "max_token_num": -1, "backend": "tpu", "timeout_s": "soon"},
         ["hidden_dim must", "max_token_num must", "backend must", "timeout_s must"]),
    ],
    ids=str,
)  # fmt: skip
@each_world(2)
def test_wrong_options(ranks: Ranks, options: dict[str, Any], words: list[str]) -> None:
    @ranks.run
    def body(rank: Rank) -> None:
        with pytest.raises((ArgumentError, UnsupportedError)) as caught:
            rank.workspace(**options)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        rank.same(str(caught.value))
        rank.workspace().close()


@pytest.mark.parametrize(
    ("option", "values"), [("hidden_dim", (64, 128)), ("dtype", ("bfloat16", "float16"))]
)
@each_world(2, 3)
def test_options_that_differ_between_ranks(ranks: Ranks, option: str, values: Any) -> None:
    @ranks.run
    def body(rank: Rank) -> None:
        with pytest.raises(ArgumentError, match="must be the same on every rank") as caught:
            rank.workspace(**{option: values[rank.rank == 1]})
        assert all(str(value) in str(caught.value) for value in values)
        rank.same(str(caught.value))


def test_more_than_16_ranks_are_refused() -> None:
    def body(group: Any) -> None:
        with pytest.raises(ArgumentError, match="1 to 16 ranks; got 17"):
            Workspace(group, max_token_num=1, hidden_dim=64, backend=backend())

    run_ranks(17, body)


@pytest.mark.parametrize(
    ("value", "nanoseconds"), [("2.5", 2_500_000_000), ("none", 0), ("", 20_000_000_000)]
)
@each_world(1)
def test_environment(
    ranks: Ranks, value: str, nanoseconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_AR_TIMEOUT_S", "soon")
    monkeypatch.setenv("MOE_AR_BACKEND", "tpu")
    with pytest.raises(ArgumentError) as caught:
        ranks.run(lambda rank: rank.workspace(backend=None).close())
    assert "MOE_AR_TIMEOUT_S must be a positive number" in str(caught.value)
    assert "got 'soon'" in str(caught.value)
    assert "MOE_AR_BACKEND must be 'cuda', 'cpu' or 'auto'; got 'tpu'" in str(caught.value)
    monkeypatch.setenv("MOE_AR_TIMEOUT_S", value)

    @ranks.with_workspace()
    def body(rank: Rank, workspace: Workspace) -> None:
        assert workspace._params.timeout_ns == nanoseconds


# ---- life ----------------------------------------------------------------------------------------


@each_world(1, 2)
def test_closed_workspace(ranks: Ranks) -> None:
    case = random_case(ranks.size, 3, 64)

    @ranks.run
    def body(rank: Rank) -> None:
        workspace = rank.workspace(case)
        workspace.close()
        workspace.close()
        with pytest.raises(WorkspaceError, match=r"moe_finalize_allreduce_fusion.*closed"):
            ready(rank, workspace, case)()
        with pytest.raises(WorkspaceError, match="closed"):
            workspace.prepare(dtype="float16")


@each_world(2, 3)
def test_exception_leaves_without_the_peers(ranks: Ranks) -> None:
    """The rank that fails does not wait, and what the others still write to it hits nothing."""
    case = random_case(ranks.size, 3, 64)

    @ranks.run
    def body(rank: Rank) -> None:
        workspace = rank.workspace(case, timeout_s=0.5)
        finalize(rank, workspace, case)
        launch = None if rank.rank == 0 else ready(rank, workspace, case)
        if rank.rank == 0:
            with pytest.raises(ZeroDivisionError), workspace:
                _ = 1 / 0
            del workspace
            gc.collect()
        rank.meet()
        if launch:
            assert np.isnan(launch()).all()
            with pytest.raises(PeerTimeoutError, match="in vain for rank 0"):
                workspace.check()
            workspace.close()


def test_forgotten_workspace_warns() -> None:
    def body(group: Any) -> None:
        workspace = Rank(group).workspace()
        memory, device = workspace._memory, workspace._backend
        forget = [workspace]
        del workspace
        with pytest.warns(ResourceWarning, match="rank 0 was not closed"):
            forget.clear()
        memory.close(10.0)
        device.close()

    run_ranks(1, body)


@pytest.mark.skipif(backend() != "cpu", reason="about host memory")
@each_world(2)
def test_mapped_memory_has_no_name_that_could_stay(ranks: Ranks) -> None:
    @ranks.with_workspace()
    def body(rank: Rank, workspace: Workspace) -> None:
        assert not os.path.exists(workspace._memory.slab._path)


@each_world(1)
def test_what_is_told_is_logged(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO", logger="cupy_moe_ar"):
        ranks.run(lambda rank: rank.workspace().close())
    assert "bytes shared by this rank" in caplog.text
    assert capfd.readouterr() == ("", "")


# ---- bounded waits -------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [None, F32])
@each_world(2, 3, 4)
def test_missing_rank_is_named_in_time(ranks: Ranks, wire: DType | None) -> None:
    """The last rank does not launch: the others give up, and every later launch ends at once."""
    bound, missing = 1.0, ranks.size - 1
    case = random_case(ranks.size, 5, 264, comm_dtype=wire)

    @ranks.with_workspace(case, timeout_s=bound)
    def body(rank: Rank, workspace: Workspace) -> None:
        finalize(rank, workspace, case)
        launch = ready(rank, workspace, case)
        rank.meet()
        begin = time.monotonic()
        if rank.rank != missing:
            assert np.isnan(launch()).all()
            assert 0.9 * bound < time.monotonic() - begin < bound + 2
            with pytest.raises(PeerTimeoutError) as caught:
                workspace.check()
            error = caught.value
            assert (error.rank, error.missing_rank, error.launch) == (rank.rank, missing, 1)
            assert 0 <= error.token < 5
            with pytest.raises(PeerTimeoutError, match=f"waited in vain for rank {missing}"):
                launch()
        rank.meet()
        workspace.check = lambda: None  # as if all that follows had been queued before
        begin = time.monotonic()
        if rank.rank == missing:  # rows that the others had sent before they gave up are right
            norm = launch()
            sent = ~np.isnan(norm).any(axis=1)
            right = case.norm_of(case.float32.residual_out)[sent]
            assert ref.ulp_distance(norm[sent], right, BF16).max(initial=0) <= 1
        rank.meet()
        for _ in range(3):
            assert np.isnan(launch()).all()
        assert time.monotonic() - begin < 0.8 * bound
        rank.meet()
        del workspace.check
        with pytest.raises(PeerTimeoutError, match=f"in vain for rank {missing}"):
            workspace.check()

    @ranks.with_workspace(case)
    def build_again(rank: Rank, workspace: Workspace) -> None:
        check(case, finalize(rank, workspace, case))


def test_close_does_not_wait_for_ever_for_a_peer_that_left() -> None:
    def body(group: ThreadGroup) -> float:
        options: dict[str, Any] = {"max_token_num": 1, "hidden_dim": 64, "backend": "cpu"}
        begin = time.monotonic()
        try:
            with Workspace(group, **options, timeout_s=1.0):
                begin = time.monotonic()
                if group.Get_rank() == 1:
                    raise InterruptedError
        except InterruptedError:
            pass
        return time.monotonic() - begin

    stayed, left = run_ranks(2, body)
    assert left < 0.5
    assert 0.9 < stayed < 5
