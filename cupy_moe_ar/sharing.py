"""Where ranks run, and what follows: can two share memory, do those of one GPU run side by side.

What is found out (`Place`) is apart from what is concluded, so that conclusions need no GPU.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .group import host_identity

__all__ = ["Place", "has_ended", "why_not_exported", "why_not_shared", "why_slow"]

_THREADS = "run the ranks as threads of one process (Workspace.init_all)"


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: `group.host_identity()`: the host's name and the kernel's boot id.
        pid: Of its process, within `pid_namespace`.
        pid_namespace: As /proc names it; "" where it does not. So is the next.
        ipc_namespace: Containers have their own unless they are told otherwise.
        kernel: /proc/version.
        gpu: PCI bus id; "" on the CPU backend, and so are the next two.
        gpu_uuid: Of the MIG instance where there is one.
        gpu_name: Marketing name.
        visible: PCI bus ids of all GPUs that the process sees.
        visible_devices: `CUDA_VISIBLE_DEVICES`; None if it is not set.
        mps: Whether the process is a client of CUDA MPS.
    """

    host: str
    pid: int
    pid_namespace: str = ""
    ipc_namespace: str = ""
    kernel: str = ""
    gpu: str = ""
    gpu_uuid: str = ""
    gpu_name: str = ""
    visible: tuple[str, ...] = ()
    visible_devices: str | None = None
    mps: bool = False

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process, without a GPU."""
        kernel = ""
        with contextlib.suppress(OSError):
            kernel = Path("/proc/version").read_text().strip()
        return cls(
            host=host_identity(),
            pid=os.getpid(),
            pid_namespace=_namespace("pid"),
            ipc_namespace=_namespace("ipc"),
            kernel=kernel,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def with_gpu(
        self, *, gpu: str, gpu_uuid: str, gpu_name: str, visible: tuple[str, ...], mps: bool
    ) -> Place:
        """Return the same place with a GPU."""
        return replace(
            self, gpu=gpu, gpu_uuid=gpu_uuid, gpu_name=gpu_name, visible=visible, mps=mps
        )

    @property
    def process(self) -> tuple[str, str, int]:
        """Which process it is: two containers may both have a process 1."""
        return self.host, self.pid_namespace, self.pid


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def has_ended(own: Place, peer: Place) -> bool:
    """Whether a peer's process is known to have ended, so that nothing of it writes any more.

    False where that cannot be known: other hosts and PID namespaces, and clients of CUDA MPS, whose
    kernels run in the server and may outlive them for a moment.
    """
    if peer.mps or not own.pid_namespace or own.process[:2] != peer.process[:2]:
        return False
    try:
        # Not kill(pid, 0): a process that nobody has waited for yet still takes signals.
        descriptor = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def why_not_shared(
    places: Sequence[Place],
    rank: int,
    peer: int,
    *,
    peer_access: bool | None = None,
    error: str = "",
) -> str:
    """Say why two ranks cannot share memory, and what to do; the same words for both of them.

    Args:
        places: Of every rank.
        rank: One of the two.
        peer: The other.
        peer_access: Whether the driver says that the GPU of one can reach the other's; None if it
            was not asked.
        error: What the attempt said; "" where there was none.
    """
    first, second = sorted((rank, peer))
    one, other = places[first], places[second]
    why, remedy = (
        _apart(one, other)
        or (_gpu_cause(one, other, peer_access) if one.gpu else None)
        or (
            "one cannot open the other's file of shared memory",
            "run all ranks as one user, with the same TMPDIR, in one container or in containers "
            "with a common /dev/shm (docker run --ipc=host)",
        )
    )
    pair = f"rank {first} ({_at(one)}) and rank {second} ({_at(other)}) cannot share memory"
    return f"{pair}: {why}. Remedy: {remedy}" + (f". The attempt said: {error}" if error else "")


def why_not_exported(own: Place, error: str) -> str:
    """Say why a rank cannot offer GPU memory to other processes, and what to do."""
    why, remedy = _no_ipc(own) or (
        "CUDA IPC does not work for this process",
        f"see what the attempt said; or {_THREADS}",
    )
    return f"{why}. Remedy: {remedy}. The attempt said: {error}"


def _at(place: Place) -> str:
    return f"host {place.host.partition(' ')[0]}" + (place.gpu and f", GPU {place.gpu}")


def _apart(one: Place, other: Place) -> tuple[str, str] | None:
    if one.host == other.host:
        return None
    boots = {place.host.partition(" ")[2] for place in (one, other)}
    if len(boots) == 1 and "" not in boots:
        return (
            "they are in different containers of one machine",
            "run all ranks of a workspace in one container",
        )
    return (
        "they are on different hosts, and memory is shared within one host only",
        "use one workspace for each host's ranks (comm.Split_type(MPI.COMM_TYPE_SHARED))",
    )


def _no_ipc(place: Place) -> tuple[str, str] | None:
    kernel = place.kernel.lower()
    if "microsoft" in kernel:
        return "there is no CUDA IPC under WSL2", f"{_THREADS}, or use Linux without Windows"
    # Older versions do not name gVisor, but all have this date.
    if "gvisor" in kernel or "sun jan 10 15:06:54 pst 2016" in kernel:
        return (
            "the container runs under gVisor, which has no CUDA IPC",
            f"use another container runtime (runc), or {_THREADS}",
        )
    return None


def _gpu_cause(one: Place, other: Place, peer_access: bool | None) -> tuple[str, str]:
    processes = one.process != other.process
    no_ipc = _no_ipc(one) if processes else None
    if no_ipc:
        return no_ipc
    if one.gpu_uuid != other.gpu_uuid and " MIG " in f"{one.gpu_name} {other.gpu_name}":
        return (
            "a MIG instance can neither reach another GPU or instance nor map its memory",
            "turn MIG off (nvidia-smi -mig 0), or let all ranks use one instance",
        )
    if (one.pid_namespace, one.ipc_namespace) != (other.pid_namespace, other.ipc_namespace):
        return (
            "they are in different containers (IPC or PID namespaces)",
            "run them in one container, or all with docker run --ipc=host --pid=host",
        )
    if one.gpu not in other.visible or other.gpu not in one.visible:
        sees = (
            f"{', '.join(place.visible)} (CUDA_VISIBLE_DEVICES={place.visible_devices or ''})"
            for place in (one, other)
        )
        return (
            f"one's GPU is not visible to the other: they see {' and '.join(sees)}",
            "let CUDA_VISIBLE_DEVICES name the GPUs of all ranks, in the same order on all of "
            "them, and choose by Workspace(device=...)",
        )
    if peer_access is False:
        return (
            "the two GPUs have no peer access (P2P)",
            "use GPUs for which `nvidia-smi topo -p2p r` says OK; the IOMMU, virtual machines and "
            "drivers of consumer GPUs may forbid it",
        )
    return (
        "CUDA IPC does not work here, although nothing known forbids it",
        "in a container use docker run --ipc=host (Kubernetes: hostIPC: true); look for Xid and "
        f"IOMMU messages in dmesg; or {_THREADS}",
    )


def why_slow(rank: int, places: Sequence[Place]) -> str | None:
    """Say why ranks of this rank's GPU do not run side by side.

    Returns:
        None if they do, or if a lower rank of that GPU says so.
    """
    own = places[rank]
    together = [r for r, place in enumerate(places) if own.gpu and place.gpu_uuid == own.gpu_uuid]
    processes = {places[r].process for r in together}
    if len(processes) < 2 or rank != together[0] or all(places[r].mps for r in together):
        return None
    return (
        f"ranks {', '.join(map(str, together))} share GPU {own.gpu} without CUDA MPS: their "
        f"{len(processes)} processes take turns in slices of milliseconds, so a launch takes "
        "milliseconds too, not microseconds. Results are right. Start MPS before the ranks "
        "(nvidia-cuda-mps-control -d), or give each rank a GPU"
    )
