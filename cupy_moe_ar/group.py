"""Groups of ranks: any object with mpi4py's `Get_rank, Get_size, allgather, bcast, barrier`."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from . import errors
from .errors import MoeArError, UnsupportedError

__all__ = [
    "Group",
    "ThreadGroup",
    "as_group",
    "host_identity",
    "meet",
    "mixed_mpi",
    "run_threads",
    "staged",
]

_T = TypeVar("_T")


class Group(Protocol):
    """What the package asks of a communicator; an mpi4py one has it.

    Ranks are those of this group, never of a larger one.
    """

    def Get_rank(self) -> int:
        """Return the own rank."""

    def Get_size(self) -> int:
        """Return the number of ranks."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return every rank's object, in rank order, on every rank."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object on every rank."""

    def barrier(self) -> None:
        """Return once every rank has come here."""


def as_group(comm: Any) -> Group:
    """Check that `comm` is a group; None means MPI's world (mpi4py is imported then).

    Raises:
        UnsupportedError: `comm` lacks a method, or the program was started by the `mpirun` of
            another MPI than mpi4py's, so that every process believes it is alone.
    """
    if comm is None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(
                f"comm is None, which means MPI's world, but mpi4py is not usable: {error}. "
                "pip install 'cupy_moe_ar[mpi]' brings an MPI; or pass any object with Get_rank, "
                "Get_size, allgather, bcast, barrier"
            ) from error
        comm = MPI.COMM_WORLD
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        # COMM_SELF means to be alone.
        if isinstance(comm, MPI.Comm) and comm != MPI.COMM_SELF:
            library = MPI.Get_library_version().split("\n")[0]
            problem = mixed_mpi(MPI.COMM_WORLD.Get_size(), os.environ, library)
            if problem:
                raise UnsupportedError(problem)
    missing = [
        name
        for name in ("Get_rank", "Get_size", "allgather", "bcast", "barrier")
        if not callable(getattr(comm, name, None))
    ]
    if missing:
        raise UnsupportedError(
            "comm must have Get_rank, Get_size, allgather, bcast and barrier as an mpi4py "
            f"communicator has; {type(comm).__name__} lacks {', '.join(missing)}"
        )
    return comm  # type: ignore[no-any-return]


def mixed_mpi(world_size: int, environment: Mapping[str, str], library: str) -> str | None:
    """Say that a launcher of another MPI started this process, and what to do; else None.

    Args:
        world_size: Size of MPI's world. Under another MPI's launcher every process is alone in it.
        environment: Where a launcher says how many processes it started.
        library: Name of mpi4py's MPI.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE"):
        if environment.get(name, "").isdigit():
            started = int(environment[name])
            break
    else:
        return None
    if world_size > 1 or started < 2:
        return None
    return (
        f"{started} processes were started together ({name}), but mpi4py sees 1 rank: mpirun is of "
        f"another MPI than mpi4py's ({library}). Start with that MPI's mpirun (`python -m mpi4py "
        "--mpi-lib-version` names it); a rank that is meant to be alone takes MPI.COMM_SELF"
    )


def staged(group: Group, step: str, action: Callable[[], _T]) -> _T:
    """Run one step of a collective; if it fails on any rank, all ranks raise the same error.

    Args:
        group: The ranks, all of which call this.
        step: Words for the message, such as "allocating the workspace".
        action: The rank's part; must not communicate.
    """
    result: Any = None
    outcome: tuple[str, str] | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        cause = error
        outcome = (type(error).__name__, str(error))
    outcomes = group.allgather(outcome)
    failed = [(rank, *told) for rank, told in enumerate(outcomes) if told is not None]
    if not failed:
        return result  # type: ignore[no-any-return]
    ranks_by_words: dict[str, list[int]] = {}
    for rank, _, words in failed:
        ranks_by_words.setdefault(words, []).append(rank)
    message = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in ranks_by_words.items()
    )
    kind = getattr(errors, failed[0][1], None)
    if not (isinstance(kind, type) and issubclass(kind, MoeArError)) or kind in (
        errors.ArgumentError,
        errors.PeerTimeoutError,
    ):
        kind = errors.WorkspaceError
    raise kind(f"{step}: {message}") from cause


def meet(group: Group, seconds: float) -> bool:
    """Wait for every rank to come here, but not for ever where the group can help it.

    Args:
        group: The ranks. A group with neither mpi4py's `Ibarrier` nor a `meet` waits unbounded.
        seconds: The bound. When it is over the group must not be used any more.

    Returns:
        Whether all came.
    """
    bounded = getattr(group, "meet", None)
    if callable(bounded):
        return bool(bounded(seconds))
    if not hasattr(group, "Ibarrier"):
        group.barrier()
        return True
    request = group.Ibarrier()
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def host_identity() -> str:
    """Name this host, so that processes that share memory and GPUs agree and others differ."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class ThreadGroup:
    """Ranks that are threads of this process."""

    class _Shared:
        def __init__(self, size: int) -> None:
            self.barrier = threading.Barrier(size)
            self.slots: list[Any] = [None] * size

    def __init__(self, rank: int, shared: _Shared) -> None:
        self._rank = rank
        self._shared = shared

    @classmethod
    def create(cls, size: int) -> list[ThreadGroup]:
        """Return one member for each of `size` threads."""
        shared = cls._Shared(size)
        return [cls(rank, shared) for rank in range(size)]

    def Get_rank(self) -> int:
        """Return the own rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return len(self._shared.slots)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        shared = self._shared
        shared.slots[self._rank] = sendobj
        shared.barrier.wait()
        gathered = list(shared.slots)
        shared.barrier.wait()
        return gathered

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return self.allgather(obj)[root]

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._shared.barrier.wait()

    def meet(self, seconds: float) -> bool:
        """Wait for every rank to come here; return False, and break the group, after `seconds`."""
        try:
            self._shared.barrier.wait(seconds)
        except threading.BrokenBarrierError:
            return False
        return True

    def abort(self) -> None:
        """Let every other member's pending and later calls raise `BrokenBarrierError`."""
        self._shared.barrier.abort()


def run_threads(size: int, body: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Run `body` once for each of `size` ranks, each in a thread of its own.

    Returns:
        Results in rank order.

    Raises:
        Exception: What the first failing rank raised. The others are released from pending
            collectives of the group, but a body must not wait for a failed rank otherwise.
    """
    members = ThreadGroup.create(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(member: ThreadGroup) -> None:
        try:
            results[member.Get_rank()] = body(member)
        except BaseException as error:
            failures.append(error)
            member.abort()

    threads = [
        threading.Thread(target=run, args=(member,), name=f"rank {rank}", daemon=True)
        for rank, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A broken barrier is what the other ranks see of the failure.
    failures.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if failures:
        raise failures[0]
    return results
