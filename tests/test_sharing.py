"""Why ranks cannot share memory, or share a GPU slowly: conclusions from planted facts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Rank, Ranks, check, current_rank, each_world, finalize, random_case
from test_dead_peers import values

from cupy_moe_ar import UnsupportedError, cuda_backend, launch, symmetric
from cupy_moe_ar.cpu_backend import CpuBackend
from cupy_moe_ar.cuda_backend import CudaBackend
from cupy_moe_ar.plan import LaunchShape
from cupy_moe_ar.sharing import Place, has_ended, why_not_exported, why_not_shared, why_slow
from cupy_moe_ar.symmetric import CudaSlab, HostSlab, SymmetricMemory
from cupy_moe_ar.testing import WorkerGroup, run_ranks, spawn_ranks

GPUS = ("0000:0F:00.0", "0000:2D:00.0")
LINUX = "Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP"


def place(rank: int, **facts: Any) -> Place:
    """A rank of a healthy host: a process and a GPU each, all GPUs visible to all."""
    healthy: dict[str, Any] = {
        "host": "node7 b007",
        "pid": 100 + rank,
        "pid_namespace": "pid:[40]",
        "ipc_namespace": "ipc:[39]",
        "kernel": LINUX,
        "gpu": GPUS[rank],
        "gpu_uuid": f"uuid-{rank}",
        "gpu_name": "NVIDIA H200",
        "visible": GPUS,
    }
    return Place(**{**healthy, **facts})


WSL = {"kernel": "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d)"}
GVISOR = {"kernel": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"}
MIG = {"gpu_name": "NVIDIA H200 MIG 3g.71gb"}
HOST_MEMORY = {"gpu": "", "gpu_uuid": "", "visible": ()}


@pytest.mark.parametrize(
    ("facts", "peer_facts", "access", "why", "remedy"),
    [
        ({}, {"host": "node8 b008"}, None, "on different hosts", "Split_type"),
        ({"host": "a "}, {"host": "b "}, None, "on different hosts", "Split_type"),
        ({}, {"host": "pod3 b007"}, None, "different containers of one machine", "one container"),
        (WSL, WSL, True, "no CUDA IPC under WSL2", "threads of one process"),
        (GVISOR, GVISOR, True, "under gVisor, which has no CUDA IPC", "runc"),
        ({"kernel": "Linux version 4.19.0-gvisor"}, {}, True, "under gVisor", "runc"),
        (MIG, MIG, False, "a MIG instance can neither", "nvidia-smi -mig 0"),
        ({}, {**MIG, "pid": 100}, False, "a MIG instance can neither", "one instance"),
        ({}, {"ipc_namespace": "ipc:[77]"}, True, "in different containers", "--ipc=host"),
        ({}, {"pid_namespace": "pid:[77]", "pid": 100}, True, "in different containers",
         "--pid=host"),
        ({"visible": GPUS[:1], "visible_devices": "0"},
         {"visible": GPUS[1:], "visible_devices": "1"}, None,
         f"not visible to the other: they see {GPUS[0]} (CUDA_VISIBLE_DEVICES=0) and {GPUS[1]} "
         "(CUDA_VISIBLE_DEVICES=1)", "Workspace(device=...)"),
        ({}, {"visible": GPUS[1:]}, True, "not visible to the other", "CUDA_VISIBLE_DEVICES"),
        ({}, {}, False, "no peer access (P2P)", "nvidia-smi topo -p2p r"),
        ({}, {"pid": 100}, False, "no peer access (P2P)", "nvidia-smi topo -p2p r"),
        ({}, {}, True, "CUDA IPC does not work here", "--ipc=host"),
        ({"gpu": GPUS[1], "gpu_uuid": "uuid-1"}, MIG, None, "CUDA IPC does not work here", "Xid"),
        (WSL | HOST_MEMORY, WSL | HOST_MEMORY, None, "cannot open the other's file", "TMPDIR"),
    ],
)  # fmt: skip
def test_reason_and_remedy(
    facts: Any, peer_facts: Any, access: bool | None, why: str, remedy: str
) -> None:
    places = [place(0, **facts), place(1, **peer_facts)]
    words = why_not_shared(places, 0, 1, peer_access=access, error="cudaErrorX: so it is")
    before, _, after = words.partition(". Remedy: ")
    assert before.startswith("rank 0 (host ")
    assert why in before
    assert remedy in after
    assert after.endswith(". The attempt said: cudaErrorX: so it is")
    assert words == why_not_shared(places, 1, 0, peer_access=access, error="cudaErrorX: so it is")


@pytest.mark.parametrize("cause", [WSL, GVISOR, MIG])
def test_what_is_not_to_blame(cause: dict[str, str]) -> None:
    """Threads of one process need no IPC, and two processes in one MIG instance may use it."""
    one = place(0, **cause)
    same = replace(one, pid=101) if cause is MIG else place(1, pid=100, **cause)
    words = why_not_shared([one, same], 0, 1, peer_access=False)
    assert not any(word in words for word in ("WSL", "gVisor", "MIG"))


@pytest.mark.parametrize(
    ("facts", "why"),
    [(WSL, "WSL2"), (GVISOR, "gVisor"), ({}, "CUDA IPC does not work for this process")],
)
def test_memory_that_cannot_be_offered(facts: dict[str, str], why: str) -> None:
    words = why_not_exported(place(0, **facts), "cudaErrorNotSupported")
    assert why in words
    assert "Workspace.init_all" in words
    assert words.endswith("cudaErrorNotSupported")


# ---- where the reasons are asked for -------------------------------------------------------------


@each_world(2, 3)
def test_every_rank_hears_the_reason(ranks: Ranks) -> None:
    """The ranks are as in processes of their own, and the last one's file cannot be opened."""

    class Slab(HostSlab):
        def export(self) -> object:
            path = super().export()
            return f"{path}-of-another" if current_rank() == ranks.size - 1 else path

    @ranks.run
    def body(rank: Rank) -> None:
        here = replace(Place.here(), pid=1000 + rank.rank)
        pair = rf"rank 0 \(host \S+\) and rank {rank.size - 1} \(.*one cannot open the other's file"
        with pytest.raises(UnsupportedError, match=rf"mapping.*{pair}.*No such file") as caught:
            SymmetricMemory(rank.group, lambda: Slab(2 << 20, here))
        rank.same(str(caught.value))


def test_threads_of_one_process_need_no_export() -> None:
    """So the remedy for a host without CUDA IPC is one."""

    class Slab(HostSlab):
        def export(self) -> object:
            raise UnsupportedError("no CUDA IPC")

    def body(group: Any) -> None:
        SymmetricMemory(group, lambda: Slab(2 << 20, Place.here())).close(10.0)

    run_ranks(3, body)


class FakeRuntime:
    """What a CudaSlab asks of the runtime when it maps a peer's slab."""

    CUDARuntimeError = OSError

    def __init__(self, peer_access: bool) -> None:
        self.peer_access = peer_access

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:  # noqa: N802
        assert (device, peer) == (0, 1)
        return int(self.peer_access)

    def ipcOpenMemHandle(self, handle: object, flags: int) -> int:  # noqa: N802
        raise OSError("cudaErrorInvalidDevice")

    def ipcGetMemHandle(self, pointer: int) -> bytes:  # noqa: N802
        raise OSError("cudaErrorNotSupported")


@pytest.mark.parametrize(
    ("peer_facts", "access", "found"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"gpu": GPUS[0], "gpu_uuid": "uuid-0"}, True, None),
        ({"gpu": "0000:FF:00.0"}, True, None),
        ({"pid": 100}, False, False),
    ],
)
def test_what_a_gpu_slab_finds_out(
    peer_facts: Any, access: bool, found: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = CudaSlab.__new__(CudaSlab)
    slab.device, slab.pointer, slab.place = 0, 0, place(0)
    slab._runtime, slab._opened = FakeRuntime(access), []
    with pytest.raises(symmetric._UnreachableError) as caught:
        slab.open(b"handle", 0x1000, place(1, **peer_facts))
    assert caught.value.peer_access is found
    with pytest.raises(UnsupportedError, match="CUDA IPC does not work for this process"):
        slab.export()


# ---- processes that have ended -------------------------------------------------------------------


def test_ended_processes_are_known() -> None:
    here = Place.here()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        there = replace(here, pid=child.pid)
        assert not has_ended(here, there)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet waited for
        assert has_ended(here, there)
    finally:
        child.kill()
        child.communicate()
    assert has_ended(here, there)
    for unknown in (
        {"host": "node8 b008"},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"mps": True},
    ):
        assert not has_ended(here, replace(there, **unknown))  # type: ignore[arg-type]
    nowhere = replace(here, pid_namespace="")
    assert not has_ended(nowhere, replace(nowhere, pid=child.pid))


# ---- several processes on one GPU ----------------------------------------------------------------


def crowd(*gpus: int, mps: bool = False, threads: bool = False) -> list[Place]:
    return [
        replace(place(gpu, mps=mps), pid=100 if threads else 100 + rank)
        for rank, gpu in enumerate(gpus)
    ]


@pytest.mark.parametrize(
    ("places", "warns"),
    [
        (crowd(0, 1), []),
        (crowd(0, 0), [0]),
        (crowd(0, 1, 0, 1), [0, 1]),
        (crowd(1, 0, 0), [1]),
        (crowd(0, 0, 0, mps=True), []),
        (crowd(0, 0, mps=True)[:1] + crowd(0, 0)[1:], [0]),
        (crowd(0, 0, threads=True), []),
        ([replace(x, gpu="", gpu_uuid="") for x in crowd(0, 0)], []),
    ],
    ids=range(8),
)
def test_who_warns_of_time_slices(places: list[Place], warns: list[int]) -> None:
    told = [why_slow(rank, places) for rank in range(len(places))]
    assert [rank for rank, words in enumerate(told) if words] == warns
    for words in filter(None, told):
        assert "without CUDA MPS" in words
        assert "take turns in slices of milliseconds" in words
        assert "nvidia-cuda-mps-control -d" in words
    if warns == [1]:
        assert f"ranks 1, 2 share GPU {GPUS[0]}" in str(told[1])


def test_a_workspace_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of the CPU backend that are said to lie on one GPU, in processes of their own."""
    original = CpuBackend.locate

    def planted(self: CpuBackend) -> None:
        original(self)
        self.place = replace(
            self.place, pid=1000 + current_rank(), gpu=GPUS[0], gpu_uuid="uuid-0", visible=GPUS
        )

    monkeypatch.setattr(CpuBackend, "locate", planted)
    case = random_case(3, 5, 264)

    def body(group: Any) -> None:
        rank = Rank(group)
        with rank.workspace(case, backend="cpu") as workspace:
            for _ in range(3):
                check(case, finalize(rank, workspace, case))

    run_ranks(3, body)
    (record,) = (record for record in caplog.records if "CUDA MPS" in record.message)
    assert (record.levelname, record.name) == ("WARNING", "cupy_moe_ar.workspace")
    assert "ranks 0, 1, 2 share GPU" in record.message


def share_one_gpu(group: WorkerGroup) -> int:
    """Launch on GPU 0 with ranks in other processes; return how many warnings this rank logged."""
    import cupy

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cupy_moe_ar").addHandler(handler)
    rank = Rank(group)
    case = random_case(rank.size, 5, 264)
    cupy.cuda.Device(0).use()
    with (
        cupy.cuda.Stream(non_blocking=True) as rank.stream,
        rank.workspace(case, device=0) as workspace,
    ):
        for _ in range(5):
            check(case, finalize(rank, workspace, case))
    return sum("CUDA MPS" in words for words in told)


@pytest.mark.gpu
def test_ranks_that_take_turns_on_a_gpu_finish() -> None:
    warnings = [0, 0, 0] if launch.runs_under_mps(0) else [1, 0, 0]
    assert values(spawn_ranks(3, share_one_gpu)) == warnings


@pytest.mark.parametrize(
    ("status", "enabled", "pipe", "expected"),
    [(0, 1, False, True), (0, 0, True, False), (1, 0, True, True), (1, 0, False, False)],
)
def test_mps_is_found(
    status: int, enabled: int, pipe: bool, expected: bool, monkeypatch: Any, tmp_path: Any
) -> None:
    """By the driver's word or, where it has none, by the daemon's pipe."""
    driver = SimpleNamespace(
        CUdevice=int,
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED=133),
        cuDeviceGetAttribute=lambda code, device: (status, enabled),
    )
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if pipe:
        (tmp_path / "control").touch()
    assert launch.runs_under_mps(0) is expected
    if status:  # bindings too old to know the attribute
        del driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        assert launch.runs_under_mps(0) is expected


# ---- room on a shared GPU ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "margin", "alone", "in_fours"),
    [
        (1, 0, 528, 60),
        (1, 66, 264, 30),
        (4, 0, 132, 15),
        (4, 66, 66, 7),
        (16, 131, 1, 1),  # less than a cluster each, but one each fits
        (61, 0, 8, None),  # 60 clusters of 4 for 61 ranks: some would wait for room
    ],
)
def test_plans_leave_room_for_the_other_ranks_of_a_gpu(
    ranks: int, margin: int, alone: int, in_fours: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """132 SMs hold 4 blocks each, or 60 clusters of 4 blocks together."""
    monkeypatch.setattr(cuda_backend, "max_cluster_size", lambda kernel, block: 4)
    monkeypatch.setattr(cuda_backend, "occupancy", lambda kernel, block: 4)
    monkeypatch.setattr(cuda_backend, "active_clusters", lambda *shape: 240 // shape[-1])
    limits = launch.DeviceLimits("H200", (9, 0), "sm_90a", 132, 2048, "uuid-0", GPUS[0])
    backend = CudaBackend.__new__(CudaBackend)
    backend.device_limits, backend._sm_margin, backend.ranks_on_device = limits, margin, ranks
    resident = backend._resident_clusters({"row": launch.Kernel("row", 1)})
    assert {shape.kernel for shape in resident} == {"row"}
    assert resident.get(LaunchShape(1, 128, "row")) == alone
    assert resident.get(LaunchShape(4, 128, "row")) == in_fours
    assert LaunchShape(8, 128, "row") not in resident
    for shape, count in resident.items():
        assert count * ranks * shape.cluster_blocks <= 528
