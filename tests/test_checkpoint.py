"""Checkpoints: what ranks share is released and rebuilt, what was planned and captured stays."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import (
    Case,
    Rank,
    Ranks,
    backend,
    check,
    check_bits,
    control,
    current_rank,
    each_world,
    finalize,
    random_case,
)
from test_dead_peers import plan, values
from test_leaks import held, mapped

from cupy_moe_ar import (
    ArgumentError,
    PeerTimeoutError,
    UnsupportedError,
    Workspace,
    WorkspaceError,
    moe_finalize_allreduce_fusion,
)
from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.symmetric import CudaSlab, HostSlab
from cupy_moe_ar.testing import WorkerGroup, run_ranks, spawn_ranks


class Renumbered:
    """A group whose ranks count downwards."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.barrier = group.barrier
        self.Get_size = group.Get_size

    def Get_rank(self) -> int:
        return int(self._group.Get_size() - 1 - self._group.Get_rank())

    def allgather(self, thing: Any) -> list[Any]:
        told: list[Any] = self._group.allgather(thing)
        return told[::-1]

    def bcast(self, thing: Any, root: int = 0) -> Any:
        return self.allgather(thing)[root]


@contextlib.contextmanager
def occupied(address: int, nbytes: int) -> Iterator[None]:
    """Keep memory that was freed from being allocated again: surely on a CPU, likely on a GPU."""
    if backend() == "cuda":
        import cupy

        blocker = cupy.cuda.runtime.malloc(nbytes)
        yield
        cupy.cuda.runtime.free(blocker)
        return
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    size, flags = ctypes.c_size_t(nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = libc.mmap(ctypes.c_size_t(address), size, 0, flags, -1, ctypes.c_long(0))
    yield
    libc.munmap(ctypes.c_size_t(place), size)


def restore_elsewhere(rank: Rank, workspace: Workspace, comm: Any) -> None:
    """Prepare and restore such that the slab changes its address; the control block must not."""
    kept = workspace._params.control
    before = workspace._memory.slab.pointer
    workspace.checkpoint_prepare()
    assert not any(control(workspace).slab)
    rank.meet()
    with occupied(before, workspace.nbytes):
        rank.meet()
        workspace.checkpoint_restore(comm)
    assert workspace._memory.slab.pointer != before or backend() == "cuda"
    assert workspace._params.control == kept
    state = control(workspace)
    assert list(state.slab[: rank.size]) == list(workspace._memory.pointers)
    assert (set(state.epoch), state.launches, state.broken) == ({0}, 0, 0)
    rank.meet()


@each_world(2, 3)
def test_calls_go_on_after_a_restore(ranks: Ranks) -> None:
    """Planned, remembered and new calls; after an odd number of launches, so from either epoch."""
    case = random_case(ranks.size, 5, 264)
    other = random_case(ranks.size, 3, 520, seed=1)

    @ranks.with_workspace(case, max_token_num=8)
    def body(rank: Rank, workspace: Workspace) -> None:
        planned, norm = plan(rank, workspace, case)
        arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
        out = rank.put(np.zeros_like(case.residual))

        def launch_all() -> None:
            rank.meet()
            planned.run()
            moe_finalize_allreduce_fusion(
                workspace=workspace, **arrays, residual_out=out.array, **case.numbers
            )
            rank.meet()
            check_bits(out.read(), case.float32.residual_out)
            check_bits(norm.read(), expected)

        expected = finalize(rank, workspace, case)["norm_out"]
        for _ in range(3):
            launch_all()
            restore_elsewhere(rank, workspace, rank.split(0).group)
            launch_all()
            check(other, finalize(rank, workspace, other))
            workspace.check()
        workspace.prepare(dtype="float16")


@each_world(2)
def test_nothing_works_in_between(ranks: Ranks) -> None:
    case = random_case(ranks.size, 5, 264)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        with pytest.raises(WorkspaceError, match="the workspace is not prepared for a checkpoint"):
            workspace.checkpoint_restore(rank.group)
        planned, _ = plan(rank, workspace, case)
        workspace.checkpoint_prepare()
        words = r"is prepared for a checkpoint; every rank must call checkpoint_restore\(comm\)"
        for forbidden in (
            planned.run,
            lambda: plan(rank, workspace, case),
            lambda: moe_finalize_allreduce_fusion(
                np.zeros((1, 264)), workspace, expanded_idx_to_permuted_idx=np.zeros((1, 1))
            ),
            workspace.check,
            workspace.prepare,
            workspace.rebind_stream,
            workspace.checkpoint_prepare,
        ):
            with pytest.raises(WorkspaceError, match=words):
                forbidden()
        workspace.checkpoint_restore(rank.group)
        check(case, finalize(rank, workspace, case))
        workspace.close()
        for method in (workspace.checkpoint_prepare, lambda: workspace.checkpoint_restore(None)):
            with pytest.raises(WorkspaceError, match="the workspace is closed"):
                method()


@pytest.mark.skipif(backend() != "cpu", reason="about host memory")
@pytest.mark.parametrize("leave", ["close", "exception"])
def test_a_prepared_workspace_holds_nothing_and_can_be_left(leave: str) -> None:
    def body(group: Any) -> None:
        rank = Rank(group)
        workspace = rank.workspace()
        rank.meet()
        assert len(mapped()) == 2
        workspace.checkpoint_prepare()
        assert not mapped()
        if rank.rank == 1:  # needs no peer
            return
        if leave == "close":
            workspace.close()
            return
        with pytest.raises(ZeroDivisionError), workspace:
            _ = 1 / 0

    def forget(group: Any) -> None:
        workspace = Rank(group).workspace()
        workspace.checkpoint_prepare()
        with pytest.warns(ResourceWarning, match="was not closed"):
            del workspace

    before = held()
    with pytest.warns(ResourceWarning, match="rank 1 was not closed"):
        run_ranks(2, body)
    run_ranks(1, forget)
    assert held() == before


@each_world(2, 4)
def test_another_group_is_refused(ranks: Ranks) -> None:
    """The workspace can still be restored by the right one."""
    case = random_case(ranks.size, 5, 264)

    @ranks.run
    def body(rank: Rank) -> None:
        with rank.workspace(case) as workspace, rank.workspace(case, timeout_s=9) as second:
            half = rank.split(rank.rank * 2 // rank.size).group
            workspace.checkpoint_prepare()
            second.checkpoint_prepare()
            with pytest.raises(ArgumentError, match=f"comm must have {rank.size} ranks as before"):
                workspace.checkpoint_restore(half)
            number = f"rank 0: comm must number this rank {rank.size - 1} as before; got 0"
            with pytest.raises(ArgumentError, match=number) as caught:
                workspace.checkpoint_restore(Renumbered(rank.group))
            rank.same(sorted(caught.value.faults))
            mine = second if rank.rank == 1 else workspace
            with pytest.raises(ArgumentError, match="must be the same on every rank"):
                mine.checkpoint_restore(rank.group)
            for whole in (workspace, second):
                whole.checkpoint_restore(rank.split(0).group)
                check(case, finalize(rank, whole, case))


@each_world(2, 3)
def test_a_failed_restore_is_everyones_and_can_be_repeated(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(ranks.size, 5, 264)
    slab = HostSlab if backend() == "cpu" else CudaSlab
    original = slab.__init__
    failing = False

    def planted(*arguments: Any) -> None:
        if failing and current_rank() == 1:
            raise UnsupportedError("no memory")
        original(*arguments)

    monkeypatch.setattr(slab, "__init__", planted)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        nonlocal failing
        planned, norm = plan(rank, workspace, case)
        workspace.checkpoint_prepare()
        failing = True
        rank.meet()
        with pytest.raises(UnsupportedError, match="rank 1: no memory") as caught:
            workspace.checkpoint_restore(rank.group)
        rank.same(str(caught.value))
        with pytest.raises(WorkspaceError, match="is prepared for a checkpoint"):
            planned.run()
        failing = False
        rank.meet()
        workspace.checkpoint_restore(rank.group)
        planned.run()
        rank.wait()
        check(case, {"norm_out": norm.read(), **finalize(rank, workspace, case)})


def test_a_broken_workspace_is_refused() -> None:
    """Without the peers, and it can be closed."""
    case = random_case(2, 5, 264)

    def body(group: ThreadGroup) -> None:
        rank = Rank(group)
        with rank.on_device(), rank.workspace(case, timeout_s=0.3) as workspace:
            planned, norm = plan(rank, workspace, case)
            rank.meet()
            if rank.rank == 1:
                return
            planned.run()
            rank.wait()
            assert np.isnan(norm.read()).all()
            with pytest.raises(PeerTimeoutError, match="in vain for rank 1"):
                workspace.checkpoint_prepare()

    run_ranks(2, body)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    def body(group: ThreadGroup) -> None:
        rank = Rank(group)
        with rank.on_device(), rank.workspace(timeout_s=0.5) as workspace:
            if rank.rank == 1:
                time.sleep(1.5)
                return
            begin = time.monotonic()
            with pytest.raises(WorkspaceError, match=r"not all ranks came within 0\.5 s; close"):
                workspace.checkpoint_prepare()
            assert 0.4 < time.monotonic() - begin < 1.4

    run_ranks(2, body)


# ---- processes and graphs ------------------------------------------------------------------------


def restore_in_processes(group: WorkerGroup) -> None:
    rank = Rank(group)
    case = random_case(rank.size, 5, 264)
    with rank.on_device(), rank.workspace(case) as workspace:
        planned, norm = plan(rank, workspace, case)
        expected = finalize(rank, workspace, case)["norm_out"]
        for _ in range(3):
            restore_elsewhere(rank, workspace, group.without())
            planned.run()
            rank.wait()
            check_bits(norm.read(), expected)
            check(case, finalize(rank, workspace, case))


def test_ranks_in_processes_restore() -> None:
    values(spawn_ranks(2, restore_in_processes))


def replay(rank: Rank, case: Case, comm: Any) -> None:
    """Capture a graph of several launches; replay it before and after a checkpoint."""
    with rank.workspace(case) as workspace:
        planned, norm = plan(rank, workspace, case)
        expected = finalize(rank, workspace, case)["norm_out"]
        rank.meet()
        rank.stream.begin_capture()
        for _ in range(5):
            planned.run()
        graph = rank.stream.end_capture()
        graph.upload(rank.stream)
        for _ in range(3):
            for _ in range(3):
                norm.array.set(np.zeros_like(expected))
                rank.meet()
                graph.launch(rank.stream)
                rank.meet()
                check_bits(norm.read(), expected)
            assert control(workspace).launches >= 15
            restore_elsewhere(rank, workspace, comm)
        check(case, finalize(rank, workspace, case))


@pytest.mark.gpu
@each_world(2)
def test_captured_graphs_replay_after_a_restore(ranks: Ranks) -> None:
    case = random_case(ranks.size, 5, 264)

    @ranks.run
    def body(rank: Rank) -> None:
        replay(rank, case, rank.split(0).group)


def replay_in_processes(group: WorkerGroup) -> None:
    rank = Rank(group)
    with rank.on_device():
        replay(rank, random_case(rank.size, 5, 264), group.without())


@pytest.mark.gpu
def test_captured_graphs_replay_after_a_restore_in_processes() -> None:
    values(spawn_ranks(2, replay_in_processes))
