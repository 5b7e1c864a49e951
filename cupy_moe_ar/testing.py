"""Help for tests and scripts: ranks in threads or in processes that may be killed; arrays."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .cuda_backend import backend_of
from .group import Group, ThreadGroup, run_threads

__all__ = ["Device", "Outcome", "WorkerGroup", "choose_backend", "run_ranks", "spawn_ranks"]

_T = TypeVar("_T")
_COLLECTIVE_S = 60.0  # that a collective of worker processes waits for a living member


def run_ranks(world_size: int, body: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Run `body(group)` on each of `world_size` ranks, each a thread of this process.

    Args:
        world_size: Number of ranks.
        body: Gets the rank's member of the group, which is what `Workspace` takes as `comm`.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: What the first failing rank raised.

    Example:
        >>> run_ranks(2, lambda group: group.allgather(group.Get_rank()))
        [[0, 1], [0, 1]]
    """
    return run_threads(world_size, body)


def choose_backend(group: Group, backend: str | None = None) -> str:
    """Return the backend that a workspace of these ranks would take, by its rules; collective.

    Args:
        group: The ranks.
        backend: "cuda", "cpu", "auto", or None: what `MOE_AR_BACKEND` says, else "auto".
    """
    named = backend or os.environ.get("MOE_AR_BACKEND") or "auto"
    return backend_of(group) if named == "auto" else named


class Device:
    """Arrays where a workspace has its own, and a stream there.

    Attributes:
        device: CUDA ordinal, or -1.
        stream: CuPy stream of its own, which does not wait for the legacy default stream; None on
            the CPU.
    """

    def __init__(self, device: int) -> None:
        """Make the device, and a stream on it, those of the calling thread.

        Args:
            device: `Workspace.device`.
        """
        self.device = device
        self.stream: Any = None
        if self.on_gpu:
            import cupy

            cupy.cuda.Device(device).use()
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.stream.use()

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.device >= 0

    def put(self, array: NDArray[Any]) -> Any:
        """Copy to the device; bfloat16 goes as uint16, for CuPys that do not know it."""
        if not self.on_gpu:
            return array.copy()
        import cupy

        return cupy.asarray(array.view(np.uint16) if array.dtype.name == "bfloat16" else array)

    def get(self, array: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy to the host what `put`, or something with as many bytes an element, has made."""
        host: NDArray[Any] = array.get() if self.on_gpu else array.copy()
        return host.view(dtype)

    def synchronize(self) -> None:
        """Wait for the own stream."""
        if self.stream is not None:
            self.stream.synchronize()


@dataclass(frozen=True)
class Outcome:
    """How a spawned rank ended.

    Attributes:
        value: What its function returned; None if it did not.
        error: The traceback of what it raised, or how it ended otherwise; None if it returned.
        exitcode: 0, 1 after an exception, or minus the number of the signal that killed it.
    """

    value: Any
    error: str | None
    exitcode: int


def spawn_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0
) -> list[Outcome]:
    """Run `function(group, *args)` on each of `world_size` ranks, each a process of its own.

    A rank may die, by a signal too, without harm to the others: a collective of a group with a dead
    member raises `ConnectionError` at once, and `WorkerGroup.without` is the group of those left.

    Args:
        world_size: Number of ranks.
        function: Can be pickled, and so can `args` and what it returns: a function of a module.
            As with `multiprocessing`, a script that calls this does so under
            `if __name__ == "__main__"`.
        args: Passed to every rank.
        timeout_s: Seconds after which ranks that still run are killed.

    Returns:
        How each rank ended, in rank order.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world_size)]
    processes = [
        context.Process(
            target=_work, args=(theirs, world_size, rank, function, args), name=f"rank {rank}"
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    hub = _Hub([ours for ours, _ in pipes])
    deadline = time.monotonic() + timeout_s
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the own end sees the process go
        hub.serve(deadline)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        late = [process.is_alive() for process in processes if process.pid]
        for process in processes:
            if process.pid:
                process.kill()
                process.join()
        for ours, _ in pipes:
            ours.close()
    outcomes = []
    for rank, (process, killed) in enumerate(zip(processes, late, strict=True)):
        exitcode = process.exitcode or 0
        value, error = hub.results.get(rank, (None, f"ended with exit code {exitcode}"))
        if killed:
            error = error or f"did not end within {timeout_s} s"
        outcomes.append(Outcome(None if value is None else pickle.loads(value), error, exitcode))
        process.close()
    return outcomes


class WorkerGroup:
    """Ranks that are processes which `spawn_ranks` started.

    Every collective raises `ConnectionError` if a member has ended, and `TimeoutError` if one does
    not come within a minute; the group must not be used any more then.
    """

    def __init__(self, link: _Link, members: Iterable[int]) -> None:
        """Make the group of some of the spawned ranks; for `spawn_ranks`."""
        self._link = link
        self._members = tuple(members)

    def Get_rank(self) -> int:
        """Return the own rank."""
        return self._members.index(self._link.rank)

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return len(self._members)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        told = self._link.exchange(self._members, pickle.dumps(sendobj), _COLLECTIVE_S)
        return [pickle.loads(data) for data in told]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return self.allgather(obj if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.allgather(None)

    def meet(self, seconds: float) -> bool:
        """Wait for every rank to come here; return False if one is gone or after `seconds`."""
        try:
            self._link.exchange(self._members, b"", seconds)
        except OSError:  # both errors are
            return False
        return True

    def without(self, *ranks: int) -> WorkerGroup:
        """Return the group of the other ranks, in their order; no collective."""
        left = [member for rank, member in enumerate(self._members) if rank not in ranks]
        return WorkerGroup(self._link, left)


class _Link:
    """A worker's end of its pipe to the hub."""

    def __init__(self, connection: Any, rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._numbers = itertools.count()

    def exchange(self, members: tuple[int, ...], data: bytes, seconds: float) -> list[bytes]:
        number = next(self._numbers)
        self._connection.send((number, members, data))
        deadline = time.monotonic() + seconds
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            answered, told, gone = self._connection.recv()
            if answered != number:  # to one that was given up
                continue
            if gone:
                raise ConnectionError(f"spawned ranks {gone} have ended")
            return told  # type: ignore[no-any-return]
        raise TimeoutError(f"not all of the spawned ranks {members} came within {seconds:.3g} s")


class _Hub:
    """The parent's part: hands on what workers tell each other, and notices who has ended."""

    def __init__(self, connections: list[Any]) -> None:
        self._rank_of = {connection: rank for rank, connection in enumerate(connections)}
        self._connections = connections
        self._ended: set[int] = set()
        self._waiting: dict[tuple[int, ...], dict[int, tuple[int, bytes]]] = {}
        self.results: dict[int, tuple[bytes | None, str | None]] = {}

    def serve(self, deadline: float) -> None:
        """Return once every worker has ended, or at the deadline."""
        while len(self._ended) < len(self._connections):
            living = [c for c in self._connections if self._rank_of[c] not in self._ended]
            ready = multiprocessing.connection.wait(living, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                self._hear(connection)

    def _hear(self, connection: Any) -> None:
        rank = self._rank_of[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        if message is None or message[0] == "done":
            if message:
                self.results[rank] = message[1:]
            self._ended.add(rank)
            for members in [members for members in self._waiting if rank in members]:
                self._answer(members)
            return
        number, members, data = message
        self._waiting.setdefault(members, {})[rank] = number, data
        if len(self._waiting[members]) == len(members) or not self._ended.isdisjoint(members):
            self._answer(members)

    def _answer(self, members: tuple[int, ...]) -> None:
        told = self._waiting.pop(members)
        gone = sorted(self._ended.intersection(members))
        data = [] if gone else [told[member][1] for member in members]
        for member, (number, _) in told.items():
            try:
                self._connections[member].send((number, data, gone))
            except OSError:  # it has ended, which its own pipe will tell
                continue


def _end_with_parent() -> None:
    """Have the system kill this process when its parent ends, even by SIGKILL."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):  # other systems have none
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it has ended already
        os._exit(1)


def _work(
    connection: Any, world_size: int, rank: int, function: Callable[..., Any], args: Any
) -> None:
    value: bytes | None = None
    error: str | None = None
    _end_with_parent()
    try:
        group = WorkerGroup(_Link(connection, rank), range(world_size))
        value = pickle.dumps(function(group, *args))
    except BaseException:
        error = traceback.format_exc()
    connection.send(("done", value, error))
    if error:
        sys.exit(1)
