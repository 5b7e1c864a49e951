"""A workspace is bound to one stream. The rule is the host's, so it needs no device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe_ar import Workspace, WorkspaceError
from cupy_moe_ar.cpu_backend import CpuBackend
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
