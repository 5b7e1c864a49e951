"""What is held after workspaces are gone: file descriptors, shared memory, mappings, GPU memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import (
    Case,
    Rank,
    backend,
    check_bits,
    current_rank,
    random_case,
)
from test_dead_peers import die, values

from cupy_moe_ar import (
    ArgumentError,
    PeerTimeoutError,
    UnsupportedError,
    Workspace,
    cpu_backend,
    moe_finalize_allreduce_fusion,
)
from cupy_moe_ar.cpu_backend import CpuBackend
from cupy_moe_ar.cuda_backend import device_count
from cupy_moe_ar.sharing import Place
from cupy_moe_ar.symmetric import CudaSlab, HostSlab, SymmetricMemory
from cupy_moe_ar.testing import WorkerGroup, run_ranks, spawn_ranks

SHARED = Path("/dev/shm")
on_cpu = pytest.mark.skipif(backend() != "cpu", reason="about host memory")


def mapped() -> set[str]:
    """Slabs that this process has mapped, of whichever rank."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/moe_ar-" in line}


def named(pid: int | None = None) -> list[Path]:
    """Files of shared memory that a process made and that still have a name."""
    return list(SHARED.glob(f"moe_ar-*-{pid or os.getpid()}-*"))


def held() -> tuple[Any, ...]:
    """All that a leak would add to."""
    gc.collect()
    descriptors: Counter[str] = Counter()
    own = f"/proc/{os.getpid()}/"  # which another thread lists at the moment
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            name = os.readlink(entry)
            if not name.startswith(own):
                descriptors[name] += 1
    return descriptors, threading.active_count(), sorted(mapped()), named()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look kernels up in the cache once: it takes three quarters of a cycle's time."""
    once = functools.cache(cpu_backend.compile_all)
    monkeypatch.setattr(
        cpu_backend, "compile_all", lambda variants, target: once(tuple(variants), target)
    )


@pytest.fixture(params=["threads", "processes"])
def as_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ranks are threads; the second time they map each other's slabs as processes do."""
    if request.param == "processes":
        original = CpuBackend.locate

        def planted(self: CpuBackend) -> None:
            original(self)
            # No process has such a number, so peers that have not left count as alive.
            self.place = replace(self.place, pid=2**30 + current_rank(), mps=True)

        monkeypatch.setattr(CpuBackend, "locate", planted)
    return str(request.param)


def user(rank: Rank, case: Case) -> Callable[..., np.ndarray]:
    """Return what launches the case's call, with arrays that are made now, and waits."""
    arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
    out = rank.put(np.zeros_like(case.residual))

    def use(workspace: Workspace, **wrong: Any) -> np.ndarray:
        moe_finalize_allreduce_fusion(
            workspace=workspace,
            **{**arrays, **wrong},
            residual_out=out.array,
            **case.numbers,
        )
        rank.wait()
        return out.read()

    return use


def cycles(group: Any, count: int, case: Case) -> None:
    """Open, use, close."""
    rank = Rank(group)
    with rank.on_device():
        use = user(rank, case)
        for _ in range(count):
            with rank.workspace(case) as workspace:
                residual = use(workspace)
                rank.meet()
        check_bits(residual, case.float32.residual_out)


@on_cpu
@pytest.mark.usefixtures("compiled")
def test_a_thousand_cycles_leave_nothing(as_in: str) -> None:
    count = 1000 if as_in == "threads" else 200
    case = random_case(2, 1, 64)
    run_ranks(2, lambda group: cycles(group, 10, case))
    before, maps = held(), mappings()
    run_ranks(2, lambda group: cycles(group, count, case))
    assert held() == before
    assert mappings() - maps < count // 10  # stacks and heaps come and go


# ---- errors --------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(owner: Any, method: str) -> Iterator[None]:
    """Rank 1 fails in a method."""
    original = getattr(owner, method)

    def planted(*arguments: Any, **options: Any) -> Any:
        if current_rank() == 1:
            raise UnsupportedError("injected")
        return original(*arguments, **options)

    setattr(owner, method, planted)
    try:
        yield
    finally:
        setattr(owner, method, original)


@on_cpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (CpuBackend, "__init__"),
        (HostSlab, "__init__"),
        (HostSlab, "export"),
        (HostSlab, "open"),
        (HostSlab, "read_words"),
        (CpuBackend, "load"),
        (CpuBackend, "bind"),
    ],
)
def test_failed_construction_leaves_nothing(owner: Any, method: str, as_in: str) -> None:
    if (method, as_in) == ("export", "threads"):
        pytest.skip("threads of one process export nothing")
    case = random_case(3, 1, 64)

    def fail(group: Any) -> None:
        rank = Rank(group)
        for _ in range(5):
            with pytest.raises(UnsupportedError, match="rank 1: injected"):
                rank.workspace(case)

    with failing(owner, method):
        run_ranks(3, fail)
        before = held()
        assert not mapped()
        run_ranks(3, fail)
    assert held() == before


@on_cpu
@pytest.mark.usefixtures("compiled")
def test_errors_of_calls_leave_nothing(as_in: str) -> None:
    """Calls that are rejected, and blocks that an error ends on all ranks."""
    case = random_case(2, 1, 64)

    def misuse(group: Any) -> None:
        rank = Rank(group)
        use = user(rank, case)

        def block() -> None:
            with rank.workspace(case) as workspace:
                use(workspace)
                use(workspace, rms_gamma=np.zeros(3))

        for _ in range(10):
            with pytest.raises(ArgumentError, match="rms_gamma"):
                block()

    run_ranks(2, misuse)
    before = held()
    assert not mapped()
    run_ranks(2, misuse)
    assert held() == before


# ---- slabs that are kept -------------------------------------------------------------------------


@on_cpu
def test_a_slab_is_kept_until_its_last_writer_has_left(
    as_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks leave by an exception, one after the other."""
    case = random_case(3, 1, 64)
    assert not mapped()

    def body(group: Any) -> None:
        rank = Rank(group)
        workspace = rank.workspace(case)
        for leaving in range(3):
            rank.meet()
            assert len(mapped()) == 3, leaving
            rank.meet()
            if rank.rank == leaving:
                with pytest.raises(ZeroDivisionError), workspace:
                    _ = 1 / 0
        rank.meet()
        assert not mapped()

    run_ranks(3, body)
    told = [record.message for record in caplog.records if "stay allocated" in record.message]
    assert len(told) == 2
    assert "until ranks 1, 2 have left the workspace or ended" in told[0]
    assert "until ranks 2 have left the workspace or ended" in told[1]


@on_cpu
def test_a_slab_is_kept_while_a_peer_may_be_unmapping_it() -> None:
    """As on GPUs, where a rank says farewell in memory that it then unmaps."""

    class Slab(HostSlab):
        unmap_s = 0.5

    def body(group: Any, other_process: bool) -> None:
        rank = Rank(group)
        place = Place.here()
        if other_process:
            place = replace(place, pid=2**30 + rank.rank, mps=True)
        memories = [SymmetricMemory(group, lambda: Slab(2 << 20, place)) for _ in range(3)]
        for leaving in range(2):
            if rank.rank == leaving:
                memories[0].abandon()
            rank.meet()
        memories[1].close(10.0)
        rank.meet()
        assert len(mapped()) == (4 if other_process else 2)
        time.sleep(0.6)
        rank.meet()
        memories[2].close(10.0)  # looks for the farewells to the first
        rank.meet()
        assert not mapped()

    assert not mapped()
    for other_process in (False, True):
        run_ranks(2, lambda group, there=other_process: body(group, there))


@on_cpu
@pytest.mark.usefixtures("compiled")
def test_broken_workspaces_leave_nothing(as_in: str) -> None:
    """Rank 1 does not launch; all close."""
    case = random_case(2, 1, 64)

    def body(group: Any) -> None:
        rank = Rank(group)
        use = user(rank, case)
        with rank.workspace(case, timeout_s=0.1) as workspace:
            if rank.rank == 0:
                assert np.isnan(use(workspace)).all()
                with pytest.raises(PeerTimeoutError):
                    workspace.check()

    before = held()
    assert not mapped()
    for _ in range(5):
        run_ranks(2, body)
    assert held() == before


def survive(group: WorkerGroup, dead: int) -> None:
    """The dead one is killed while the others wait for it in a launch."""
    rank, left = Rank(group), group.without(dead)
    case, smaller = random_case(rank.size, 1, 64), random_case(rank.size - 1, 1, 64)
    cycles(group, 2, case)
    before = held()
    workspace = rank.workspace(case, timeout_s=0.5)
    use = user(rank, case)
    if rank.rank == dead:
        die()
    assert np.isnan(use(workspace)).all()
    workspace.close()
    left.barrier()
    cycles(left, 2, smaller)
    assert held() == before


@on_cpu
@pytest.mark.parametrize("size", [2, 3])
def test_killed_peers_leave_nothing(size: int) -> None:
    values(spawn_ranks(size, survive, 1), dead=1)


def build_beside_a_dying_rank(group: WorkerGroup, dead: int) -> int:
    """The dead one is killed when its shared memory still has a name."""
    rank, left = Rank(group), group.without(dead)
    case, smaller = random_case(rank.size, 1, 64), random_case(rank.size - 1, 1, 64)
    pid = group.bcast(os.getpid(), root=dead)
    cycles(left, 2, smaller) if rank.rank != dead else None
    before = held()
    if rank.rank == dead:
        HostSlab.export = lambda self: die()  # type: ignore[method-assign]
        rank.workspace(case)
    with pytest.raises(ConnectionError):
        rank.workspace(case)
    left.barrier()
    cycles(left, 2, smaller)
    assert held() == before
    return pid


@on_cpu
def test_a_rank_killed_while_building_leaves_nothing() -> None:
    for pid in values(spawn_ranks(3, build_beside_a_dying_rank, 1), dead=1):
        assert not named(pid)


@on_cpu
def test_files_of_living_and_of_foreign_processes_stay() -> None:
    """Only a process that has ended, of the own PID namespace, has orphans."""
    here = Place.here()
    namespace = "".join(filter(str.isdigit, here.pid_namespace))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ended := 2**22 + 1, 0)  # beyond the largest process number
        raise AssertionError
    kept = [
        SHARED / f"moe_ar-{namespace}-{os.getpid()}-test",
        SHARED / f"moe_ar-{namespace}-{os.getppid()}-test",
        SHARED / f"moe_ar-1{namespace}-{ended}-test",
        SHARED / f"moe_ar-{ended}-test",
    ]
    orphan = SHARED / f"moe_ar-{namespace}-{ended}-test"
    try:
        for path in (*kept, orphan):
            path.touch()
        HostSlab(2 << 20, here).free()
        assert not orphan.exists()
        assert all(path.exists() for path in kept)
    finally:
        for path in (*kept, orphan):
            path.unlink(missing_ok=True)


# ---- GPUs ----------------------------------------------------------------------------------------


def free_bytes(device: int) -> int:
    import cupy

    gc.collect()
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.deviceSynchronize()
        free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free)


def leave_gpu_memory(group: Any, count: int) -> None:
    """Cycles, and blocks that an error ends, leave the memory of this rank's device as it was."""
    case = random_case(2, 1, 64)
    device = group.Get_rank() % device_count()

    def everything(count: int) -> None:
        cycles(group, count, case)
        rank = Rank(group)
        with rank.on_device():
            for _ in range(count // 10):
                with pytest.raises(ZeroDivisionError), rank.workspace(case):
                    _ = 1 / 0
                rank.meet()
            time.sleep(1.5 * CudaSlab.unmap_s)
            rank.workspace(case).close()  # gives back what was kept for a peer that has left since
            rank.meet()

    everything(10)
    group.barrier()
    before = free_bytes(device), held()[0]
    group.barrier()
    everything(count)
    group.barrier()
    assert (free_bytes(device), held()[0]) == before
    group.barrier()


@pytest.mark.gpu
def test_gpu_memory_of_threads() -> None:
    run_ranks(2, lambda group: leave_gpu_memory(group, 100))


@pytest.mark.gpu
def test_gpu_memory_of_processes() -> None:
    values(spawn_ranks(2, leave_gpu_memory, 50))


def survive_on_gpu(group: WorkerGroup) -> None:
    """Rank 1 is killed; rank 0 frees its slab and the mapping of the dead one's."""
    alone = group.without(1)
    rank = Rank(group)
    case, own_case = random_case(2, 1, 64), random_case(1, 1, 64)
    if rank.rank == 0:
        cycles(alone, 2, own_case)
    group.barrier()
    before = free_bytes(0) if rank.rank == 0 else 0
    group.barrier()
    with rank.on_device():
        workspace = rank.workspace(case, max_token_num=1 << 20, timeout_s=1.0)  # 512 MiB
        use = user(rank, case)
        group.barrier()
        if rank.rank == 1:
            die()
        assert np.isnan(use(workspace)).all()
        workspace.close()
        nbytes = workspace.nbytes
        del use
    deadline = time.monotonic() + 20
    while before - free_bytes(0) > nbytes // 2:  # the dead process's own memory takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.1)
        cycles(alone, 1, own_case)


@pytest.mark.gpu
def test_gpu_memory_after_a_killed_peer() -> None:
    values(spawn_ranks(2, survive_on_gpu), dead=1)
