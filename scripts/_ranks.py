"""One rank of a script: starting it, its device, stream and arrays, and its stopwatch."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from cupy_moe_ar import Workspace
from cupy_moe_ar.group import Group, as_group
from cupy_moe_ar.launch import device_limits
from cupy_moe_ar.terminal import parse, positive, progress
from cupy_moe_ar.testing import Device, choose_backend, run_ranks

__all__ = ["Rank", "choose_backend", "parse", "positive", "start", "table"]

GRAPH_LAUNCHES = 20


def start(body: Callable[[Group], int], in_process: int | None) -> NoReturn:
    """Run `body` on every rank and exit with the highest of the statuses that it returns.

    A rank that raises ends all of them, since the others may be waiting for it on the device.

    Args:
        body: Gets the rank's group.
        in_process: Number of ranks, each a thread; None takes those of MPI's world.
    """
    with progress():
        _start(body, in_process)


def _start(body: Callable[[Group], int], in_process: int | None) -> NoReturn:
    if in_process is None:
        sys.exit(_run_mpi(body))
    if in_process > 8:  # else two streams may share a queue, where one's kernel blocks the other's
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    def guarded(group: Group) -> int:
        try:
            return body(group)
        except BaseException:
            _report(group.Get_rank())
            os._exit(1)

    sys.exit(max(run_ranks(in_process, guarded)))


def _run_mpi(body: Callable[[Group], int]) -> int:
    world: Group | None = None
    try:
        world = as_group(None)
        status: int = max(world.allgather(body(world)))
        return status
    except BaseException:
        _report(world.Get_rank() if world else "unknown")
        if world and world.Get_size() > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
        return 1


def _report(rank: object) -> None:
    sys.stdout.flush()
    print(f"[rank {rank}] {traceback.format_exc()}", end="", file=sys.stderr, flush=True)


class Rank(Device):
    """The device, stream and arrays of one rank.

    Attributes:
        group: All ranks.
        index: The own one.
        size: Their number.
        device_name: For people.
    """

    def __init__(self, group: Group, workspace: Workspace) -> None:
        """Make the workspace's device, and a stream, those of the calling thread."""
        super().__init__(workspace.device)
        self.group = group
        self.index = group.Get_rank()
        self.size = group.Get_size()
        self.device_name = "CPU emulator"
        if self.on_gpu:
            import cupy

            self._cupy = cupy
            limits = device_limits(self.device)
            self.device_name = f"{limits.name} ({limits.pci_bus_id})"
            self._events = cupy.cuda.Event(), cupy.cuda.Event()

    def say(self, text: str = "") -> None:
        """Print on rank 0."""
        if self.index == 0:
            print(text, flush=True)

    def meet(self) -> None:
        """Wait for the own stream, then for the other ranks.

        Between the first and the last rank's launch nobody may allocate: ranks of one process
        would wait for each other.
        """
        self.synchronize()
        self.group.barrier()

    def same_bits(self, *arrays: np.ndarray[Any, Any]) -> bool:
        """Whether all ranks hold the same bits."""
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
        return len(set(self.group.allgather(digest))) == 1

    def time_us(self, enqueue: Callable[[], None], replays: int | None = None) -> float:
        """Return the microseconds of one launch: of the ranks' medians the largest.

        On a GPU 20 launches are captured in a CUDA graph, which is replayed `replays` (50) times
        between two events, after half as many times to warm up: after three, what was timed first
        took up to 6% more than later. On the CPU it is called `replays` (3) times.
        Every rank calls this; the first call of `enqueue` is made before the capture.

        Args:
            enqueue: Enqueues one launch on the own stream.
            replays: Number of samples.
        """
        self.meet()
        enqueue()
        if not self.on_gpu:
            samples = [self._wall_us(enqueue) for _ in range(replays or 3)]
        else:
            self.synchronize()
            self.stream.begin_capture()
            for _ in range(GRAPH_LAUNCHES):
                enqueue()
            graph = self.stream.end_capture()
            graph.upload(self.stream)
            self.meet()
            replays = replays or 50
            warm_ups = -(-replays // 2)
            samples = [
                self.event_us(lambda: graph.launch(self.stream)) for _ in range(warm_ups + replays)
            ]
            samples = [sample / GRAPH_LAUNCHES for sample in samples[warm_ups:]]
        return float(max(self.group.allgather(statistics.median(samples))))

    def event_us(self, enqueue: Callable[[], None]) -> float:
        """Return the microseconds between two events around what `enqueue` enqueues."""
        begin, end = self._events
        begin.record(self.stream)
        enqueue()
        end.record(self.stream)
        self.stream.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) * 1e3

    def _wall_us(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def host_us(self, call: Callable[[], object], batches: int = 20, batch: int = 100) -> float:
        """Return the host's microseconds of one call: of the ranks' medians the largest.

        The stream is synchronised after every `batch` calls, so that its queue is never full.
        """
        self.meet()
        samples = []
        for _ in range(batches):
            samples += [self._wall_us(call) for _ in range(batch)]
            self.synchronize()
        return float(max(self.group.allgather(statistics.median(samples))))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
