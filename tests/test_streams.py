"""Streams: a workspace is bound to one, two workspaces may use two at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import Case, Rank, Ranks, check_bits, each_world, random_case

from cupy_moe_ar import (
    ArgumentError,
    Workspace,
    WorkspaceError,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
)
from cupy_moe_ar.cpu_backend import CpuBackend
from cupy_moe_ar.cuda_backend import device_count
from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.workspace import Launch


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """One rank; stream 0xC is being captured."""
    (group,) = ThreadGroup.create(1)
    options: dict[str, Any] = {"max_token_num": 1, "hidden_dim": 64, "operations": []}
    monkeypatch.setattr(CpuBackend, "capturing", lambda self, stream: stream == 0xC)
    with Workspace(group, backend="cpu", **options) as workspace:
        yield workspace


def test_another_stream_is_refused(workspace: Workspace) -> None:
    streams: list[int] = []
    first, second = Launch(workspace, streams.append), Launch(workspace, streams.append)
    first.run(0xA)
    second.run(0xA)
    for launch in (first, second):
        with pytest.raises(WorkspaceError, match=r"bound to stream 0xa .*launch on 0xb.*rebind"):
            launch.run(0xB)
    first.run(0xA)  # the refused call has done no harm
    assert streams == [0xA] * 3
    workspace.rebind_stream()
    second.run(0xB)
    with pytest.raises(WorkspaceError, match="bound to stream 0xb"):
        first.run(0xA)
    assert streams == [0xA] * 3 + [0xB]


def test_a_stream_of_another_device_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "stream must belong to cuda:0; got one of cuda:1"
    monkeypatch.setattr(CpuBackend, "stream_fault", lambda self, s: fault if s == 0xF else None)
    streams: list[int] = []
    launch = Launch(workspace, streams.append)
    with pytest.raises(ArgumentError, match=fault):
        launch.run(0xF)
    launch.run(0xA)
    assert streams == [0xA]


@pytest.mark.gpu
def test_a_real_stream_of_another_device_is_refused() -> None:
    cupy = pytest.importorskip("cupy")
    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (group,) = ThreadGroup.create(1)
    options: dict[str, Any] = {"max_token_num": 1, "hidden_dim": 64, "dtype": "float16"}
    with cupy.cuda.Device(1):
        theirs = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(0), Workspace(group, backend="cuda", device=0, **options) as workspace:
        x, out = cupy.ones((2, 1, 64), cupy.float16)
        call = {"workspace": workspace, "allreduce_in": x, "allreduce_out": out}
        for stream in (theirs, theirs.ptr):
            with pytest.raises(ArgumentError, match=r"belong to cuda:0; got .* cuda:1"):
                allreduce_fusion(**call, stream=stream)
        allreduce_fusion(**call, stream=cupy.cuda.Stream(non_blocking=True))


def test_the_legacy_default_stream_is_a_stream(workspace: Workspace) -> None:
    launch = Launch(workspace, lambda stream: None)
    launch.run(0)
    with pytest.raises(WorkspaceError, match=r"bound to stream 0x0"):
        launch.run(0xA)


def test_capture_binds_nothing(workspace: Workspace) -> None:
    launch = Launch(workspace, lambda stream: None)
    launch.run(0xC)
    launch.run(0xA)
    launch.run(0xC)
    launch.run(0xA)
    with pytest.raises(WorkspaceError):
        launch.run(0xB)


def test_closed_workspace_binds_nothing(workspace: Workspace) -> None:
    workspace.close()
    with pytest.raises(WorkspaceError, match="closed"):
        workspace.rebind_stream()
    with pytest.raises(WorkspaceError, match="closed"):
        Launch(workspace, lambda stream: None).run(0xA)


def test_device_says_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_moe_ar import launch

    driver = SimpleNamespace(
        CUstream=int, cuStreamIsCapturing=lambda stream: (0, 1 if stream == 0xC else 0)
    )
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    assert launch.is_capturing(0xC)
    assert not launch.is_capturing(0xA)


# ---- two workspaces ------------------------------------------------------------------------------


class Lane:
    """A workspace and its stream; on the CPU backend, where launches block, a thread is one."""

    def __init__(self, rank: Rank, workspace: Workspace, case: Case, launches: int) -> None:
        self.workspace, self.case = workspace, case
        arrays = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
        self.options: dict[str, Any] = {**arrays, **case.numbers}
        self.written = [rank.put(np.zeros_like(case.residual)) for _ in range(launches)]
        self.left = iter(self.written)
        self.waiting: list[Future[None]] = []
        self.thread = self.stream = None
        if rank.stream is None:
            self.thread = ThreadPoolExecutor(1)
        else:
            import cupy

            self.stream = cupy.cuda.Stream(non_blocking=True)

    def launch(self) -> None:
        options = {**self.options, "residual_out": next(self.left).array, "stream": self.stream}
        if self.thread is None:
            moe_finalize_allreduce_fusion(workspace=self.workspace, **options)
            return
        done = self.thread.submit(
            moe_finalize_allreduce_fusion, workspace=self.workspace, **options
        )
        self.waiting.append(done)

    def wait(self) -> None:
        if self.thread is None:
            self.stream.synchronize()
            return
        for done in self.waiting:
            done.result()
        self.thread.shutdown()

    def check(self) -> None:
        assert next(self.left, None) is None
        self.workspace.check()
        for buffer in self.written:
            check_bits(buffer.read(), self.case.float32.residual_out)


def use_two(rank: Rank, cases: list[Case], launches: int, **options: Any) -> None:
    """Launch on two workspaces in turns, with nothing between the launches of one and the other."""
    with rank.workspace(cases[0], **options) as one, rank.workspace(cases[1], **options) as other:
        order = np.random.default_rng(0).permutation([0] * launches + [1] * launches)
        lanes = [Lane(rank, *lane, launches) for lane in zip((one, other), cases, strict=True)]
        rank.meet()
        for index in order:  # the same on every rank
            lanes[index].launch()
        for lane in lanes:
            lane.wait()
        rank.meet()
        for lane in lanes:
            lane.check()
        rank.meet()


@each_world(2, 3)
def test_two_workspaces_on_two_streams(ranks: Ranks) -> None:
    cases = [random_case(ranks.size, 5, 264), random_case(ranks.size, 3, 1032, seed=1)]

    @ranks.run
    def body(rank: Rank) -> None:
        use_two(rank, cases, 10)


@pytest.mark.gpu
@each_world(2)
def test_two_workspaces_share_a_gpu_with_margins(ranks: Ranks) -> None:
    """Grids that would fill the GPU leave half of it to each other."""
    from cupy_moe_ar.launch import device_limits

    cases = [random_case(ranks.size, 96, 7168), random_case(ranks.size, 128, 4096, seed=1)]

    @ranks.run
    def body(rank: Rank) -> None:
        assert rank.device is not None
        use_two(rank, cases, 20, sm_margin=device_limits(rank.device).sm_count // 2)
