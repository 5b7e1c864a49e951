"""Ranks that die or come late. Ranks are processes here, so that one can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from cases import BF16, Buffer, Case, Rank, backend, check, finalize, random_case

from cupy_moe_ar import (
    PeerTimeoutError,
    PlannedCall,
    UnsupportedError,
    Workspace,
    plan_moe_finalize_allreduce_fusion,
)
from cupy_moe_ar import reference as ref
from cupy_moe_ar.cuda_backend import device_count
from cupy_moe_ar.group import staged
from cupy_moe_ar.testing import Outcome, WorkerGroup, spawn_ranks

BOUND_S = 1.0
QUEUED = 60  # launches of one graph


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def values(outcomes: list[Outcome], dead: int | None = None) -> list[Any]:
    """What the ranks returned; all but the dead one must have."""
    for rank, outcome in enumerate(outcomes):
        if rank == dead:
            assert outcome.exitcode == -signal.SIGKILL, outcome
        else:
            assert (outcome.error, outcome.exitcode) == (None, 0), outcome.error
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank != dead]


# ---- the group -----------------------------------------------------------------------------------


def use_group(group: WorkerGroup, dead: int) -> tuple[list[int], float]:
    rank, size = group.Get_rank(), group.Get_size()
    assert group.allgather((rank, size)) == [(r, size) for r in range(size)]
    assert group.bcast(f"from {rank}", root=1) == "from 1"
    assert group.meet(10.0)
    if rank == dead:
        die()
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"ranks \[{dead}\] have ended"):
        group.barrier()
    assert not group.meet(10.0)
    with pytest.raises(ConnectionError):
        staged(group, "a step", lambda: None)
    with pytest.raises(ConnectionError):
        Workspace(group, max_token_num=1, hidden_dim=64, backend="cpu")
    supported, why = Workspace.is_supported(group, backend="cpu")
    assert (supported, "have ended" in why) == (False, True)
    seconds = time.monotonic() - begin
    left = group.without(dead)
    return left.allgather(left.Get_rank()), seconds


def test_group_of_processes_outlives_a_member() -> None:
    for told, seconds in values(spawn_ranks(3, use_group, 1), dead=1):
        assert told == [0, 1]
        assert seconds < 5


def fail(group: WorkerGroup) -> str:
    if group.Get_rank() == 1:
        raise UnsupportedError("on purpose")
    with pytest.raises(ConnectionError):
        group.barrier()
    return "went on"


def test_a_failure_is_told_and_a_hang_is_ended() -> None:
    well, failed = spawn_ranks(2, fail)
    assert well == Outcome("went on", None, 0)
    assert (failed.value, failed.exitcode) == (None, 1)
    assert "UnsupportedError: on purpose" in str(failed.error)
    (hung,) = spawn_ranks(1, hang, timeout_s=2.0)
    assert hung.exitcode == -signal.SIGKILL


def hang(group: WorkerGroup) -> None:
    time.sleep(100)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """A rank that goes on alone would spin on its GPU until it gives up."""
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from cupy_moe_ar.testing import spawn_ranks\n"
        "def rank(group, folder):\n"
        "    (pathlib.Path(folder) / f'{os.getpid()}.pid').touch()\n"
        "    time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "    spawn_ranks(2, rank, sys.argv[1])\n"
    )
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as parent:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert all(map(runs, ranks))
        parent.kill()
    while any(map(runs, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- dead peers ----------------------------------------------------------------------------------


def plan(rank: Rank, workspace: Workspace, case: Case) -> tuple[PlannedCall, Buffer]:
    """Plan the case's call; return it and its norm_out."""
    arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
    norm = rank.put(np.zeros(case.shape, ref.numpy_dtype(case.dtype)))
    planned = plan_moe_finalize_allreduce_fusion(
        workspace=workspace, **arrays, norm_out=norm.array, **case.numbers
    )
    rank.wait()
    return planned, norm


def survive(group: WorkerGroup, phase: str, dead: int) -> None:
    """One rank: the dead one is killed, the others raise, close and go on without it."""
    rank = Rank(group)
    with rank.on_device():
        case = random_case(rank.size, 5, 264)
        workspace = rank.workspace(case, timeout_s=BOUND_S)
        path = workspace._memory.slab._path if backend() == "cpu" else ""
        paths = group.allgather(path)
        for _ in range(3 if phase == "between" else 0):
            check(case, finalize(rank, workspace, case))
        planned, norm = plan(rank, workspace, case)
        group.barrier()
        if rank.rank == dead:
            if phase == "during":
                threading.Timer(0.2, die).start()
                planned.run()  # waits for the others, who sleep
                rank.wait()
            die()
        if phase == "during":
            time.sleep(0.5)

        launches = 3 if phase == "between" else 0
        begin = time.monotonic()
        planned.run()
        rank.wait()
        if phase == "during" and backend() == "cuda" and not np.isnan(norm.read()).any():
            workspace.check()  # what the dead rank had to send it sent before it died
            launches += 1
            planned.run()
            rank.wait()
        first = norm.read()
        with pytest.raises(PeerTimeoutError, match=f"waited in vain for rank {dead}") as caught:
            workspace.check()
        assert (caught.value.rank, caught.value.missing_rank) == (rank.rank, dead)
        assert caught.value.launch == launches
        left = Rank(group.without(dead))
        left.device, left.stream = rank.device, rank.stream
        with pytest.raises(PeerTimeoutError):
            finalize(left, workspace, case)
        with pytest.raises(PeerTimeoutError):
            planned.run()
        workspace.check = lambda: None  # type: ignore[method-assign] # as if already queued
        for _ in range(QUEUED - 1):
            planned.run()
        rank.wait()
        seconds = time.monotonic() - begin
        assert seconds < BOUND_S + 2, seconds
        del workspace.check
        check_finished_rows(case, first)
        assert np.isnan(norm.read()).all()

        begin = time.monotonic()
        workspace.close()
        assert time.monotonic() - begin < 1
        assert not any(map(os.path.exists, filter(None, paths)))
        rebuild(group.without(dead))


def check_finished_rows(case: Case, norm: np.ndarray) -> None:
    """Rows of a launch that gave up are right or NaN, and not all are right."""
    unfinished = np.isnan(norm).any(axis=1)
    assert unfinished.any()
    assert np.isnan(norm[unfinished]).all()
    right = case.norm_of(case.float32.residual_out)
    assert right is not None
    far = ref.ulp_distance(norm[~unfinished], right[~unfinished], BF16)
    assert far.max(initial=0) <= 1


def rebuild(group: WorkerGroup) -> None:
    rank = Rank(group)
    case = random_case(rank.size, 5, 264, seed=1)
    with rank.on_device(), rank.workspace(case) as workspace:
        for _ in range(3):
            check(case, finalize(rank, workspace, case))


@pytest.mark.parametrize("phase", ["before", "during", "between"])
@pytest.mark.parametrize(("size", "dead"), [(2, 0), (3, 1), (4, 3)])
def test_killed_rank_is_named_in_time(size: int, dead: int, phase: str) -> None:
    if backend() == "cuda" and device_count() < size:
        pytest.skip("on GPUs a rank each")
    values(spawn_ranks(size, survive, phase, dead), dead)


# ---- late peers ----------------------------------------------------------------------------------


def come_late(group: WorkerGroup, seconds: float) -> None:
    """Each rank in turn is late by half the bound."""
    rank = Rank(group)
    case = random_case(rank.size, 5, 264)
    with rank.on_device(), rank.workspace(case, timeout_s=2 * seconds) as workspace:
        launch, norm = plan(rank, workspace, case)
        for late in range(rank.size):
            group.barrier()
            begin = time.monotonic()
            if rank.rank == late:
                time.sleep(seconds)
            launch.run()
            rank.wait()
            assert time.monotonic() - begin > 0.9 * seconds
            workspace.check()
            right = case.norm_of(case.float32.residual_out)
            assert right is not None
            assert ref.ulp_distance(norm.read(), right, BF16).max() <= 1


def test_late_rank_loses_nothing() -> None:
    values(spawn_ranks(3, come_late, 0.6))
