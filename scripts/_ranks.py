"""One rank of a script: starting it, its device, stream and arrays, and its stopwatch."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from cupy_moe_ar import UnsupportedError, Workspace
from cupy_moe_ar.cuda_backend import device_count
from cupy_moe_ar.group import Group, as_group
from cupy_moe_ar.launch import device_limits
from cupy_moe_ar.testing import run_ranks

__all__ = ["Rank", "choose_backend", "parse", "positive", "start", "table"]

GRAPH_LAUNCHES = 20
WARM_UPS = 3
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; of all processes that mpirun started, only the first complains."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0":
        return parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_args()


def start(body: Callable[[Group], int], in_process: int | None) -> NoReturn:
    """Run `body` on every rank and exit with the highest of the statuses that it returns.

    A rank that raises ends all of them, since the others may be waiting for it on the device.

    Args:
        body: Gets the rank's group.
        in_process: Number of ranks, each a thread; None takes those of MPI's world.
    """
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


def choose_backend(group: Group) -> str:
    """Return what `MOE_AR_BACKEND` says, else "cuda" where every rank sees a GPU, else "cpu"."""
    if os.environ.get("MOE_AR_BACKEND"):
        return os.environ["MOE_AR_BACKEND"]
    try:
        usable = device_count() > 0
    except UnsupportedError:
        usable = False
    return "cuda" if all(group.allgather(usable)) else "cpu"


class Rank:
    """The device, stream and arrays of one rank.

    Attributes:
        group: All ranks.
        index: The own one.
        size: Their number.
        device: CUDA ordinal, or -1.
        stream: CuPy stream of its own, which does not wait for the legacy default stream; None on
            the CPU.
        device_name: For people.
    """

    def __init__(self, group: Group, workspace: Workspace) -> None:
        """Make the workspace's device, and a stream, those of the calling thread."""
        self.group = group
        self.index = group.Get_rank()
        self.size = group.Get_size()
        self.device = workspace.device
        self.stream: Any = None
        self.device_name = "CPU emulator"
        if self.on_gpu:
            import cupy

            self._cupy = cupy
            cupy.cuda.Device(self.device).use()
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.stream.use()
            limits = device_limits(self.device)
            self.device_name = f"{limits.name} ({limits.pci_bus_id})"
            self._events = cupy.cuda.Event(), cupy.cuda.Event()

    @property
    def on_gpu(self) -> bool:
        """Whether there is a device."""
        return self.device >= 0

    def say(self, text: str = "") -> None:
        """Print on rank 0."""
        if self.index == 0:
            print(text, flush=True)

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        """Copy to the device; bfloat16 goes as uint16, for CuPys that do not know it."""
        if not self.on_gpu:
            return array.copy()
        bits = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        return self._cupy.asarray(bits)

    def get(self, array: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Copy to the host what `put`, or something with as many bytes an element, has made."""
        host: np.ndarray[Any, Any] = self._cupy.asnumpy(array) if self.on_gpu else array.copy()
        return host.view(dtype)

    def synchronize(self) -> None:
        """Wait for the own stream."""
        if self.stream is not None:
            self.stream.synchronize()

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

        On a GPU 20 launches are captured in a CUDA graph, which is replayed 3 times to warm up and
        then `replays` (50) times between two events. On the CPU it is called `replays` (3) times.
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
            samples = [
                self.event_us(lambda: graph.launch(self.stream))
                for _ in range(WARM_UPS + (replays or 50))
            ]
            samples = [sample / GRAPH_LAUNCHES for sample in samples[WARM_UPS:]]
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


def positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive; got {value}")
    return value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
