"""Memory of the same size on every rank, which every rank can write: who maps what, and how.

A slab is one allocation a rank. `SymmetricMemory` is a collective over two kinds of slab: CUDA
memory, shared by CUDA IPC handles between processes and by peer access within one, and host memory,
shared through POSIX shared memory or, within a process, as it is. The only place that knows hosts
and processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .abi import SENTINEL, SLAB_FAREWELL_OFFSET, SLAB_HEADER_BYTES, SLAB_PROBE_OFFSET
from .errors import UnsupportedError
from .group import Group, meet, staged
from .launch import on_device
from .sharing import Place, has_ended, why_not_exported, why_not_shared

__all__ = ["CudaSlab", "HostSlab", "Slab", "SymmetricMemory"]

_log = logging.getLogger(__name__)


class _UnreachableError(Exception):
    """A peer's memory cannot be mapped; `peer_access` as `why_not_shared` takes it."""

    def __init__(self, words: str, peer_access: bool | None = None) -> None:
        self.peer_access = peer_access
        super().__init__(words)


class Slab(Protocol):
    """One rank's allocation: header zero, every slot word the sentinel."""

    nbytes: int
    pointer: int
    place: Place
    unmap_s: float  # that a peer in another process may take to unmap it after its farewell

    def export(self) -> object:
        """Return what another process needs to map this slab."""

    def open(self, exported: Any, pointer: int, place: Place) -> int:
        """Map the slab of a peer at `place`; return its address here."""

    def all_mapped(self) -> None:
        """Every peer has mapped this slab."""

    def write_word(self, address: int, value: int) -> None:
        """Write 64 bits at an address in the own or in a mapped slab."""

    def read_words(self, address: int, count: int) -> Sequence[int]:
        """Read 64-bit words of the own slab."""

    def close_peers(self) -> None:
        """Unmap the peers' slabs."""

    def free(self) -> None:
        """Free the own slab; no peer may have it mapped."""


class HostSlab:
    """Host memory for the CPU backend."""

    unmap_s = 0.0  # the kernel counts mappings

    def __init__(self, nbytes: int, place: Place) -> None:
        """Allocate and initialise."""
        self.nbytes = nbytes
        self.place = place
        self._path, descriptor = _shared_file(nbytes)
        try:
            self._own = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self._peers: list[tuple[mmap.mmap, Any]] = []
        self._anchor = ctypes.c_char.from_buffer(self._own)
        self.pointer = ctypes.addressof(self._anchor)
        slots = nbytes - SLAB_HEADER_BYTES
        block = SENTINEL.to_bytes(4, "little") * (1 << 18)
        for begin in range(0, slots, len(block)):
            chunk = block[: min(len(block), slots - begin)]
            ctypes.memmove(self.pointer + SLAB_HEADER_BYTES + begin, chunk, len(chunk))

    def export(self) -> object:
        """Return what another process needs to map this slab."""
        return self._path

    def open(self, exported: Any, pointer: int, place: Place) -> int:
        """Map the slab of a peer at `place`; return its address here."""
        if place.process == self.place.process:
            return pointer
        try:
            descriptor = os.open(exported, os.O_RDWR)
        except OSError as error:
            raise _UnreachableError(str(error)) from error
        try:
            mapping = mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        anchor = ctypes.c_char.from_buffer(mapping)
        self._peers.append((mapping, anchor))
        return ctypes.addressof(anchor)

    def all_mapped(self) -> None:
        """Remove the name: the memory then goes with the last process, however that ends."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def write_word(self, address: int, value: int) -> None:
        """Write 64 bits at an address in the own or in a mapped slab."""
        ctypes.c_uint64.from_address(address).value = value

    def read_words(self, address: int, count: int) -> Sequence[int]:
        """Read 64-bit words of the own slab."""
        return list((ctypes.c_uint64 * count).from_address(address))

    def close_peers(self) -> None:
        """Unmap the peers' slabs."""
        while self._peers:
            mapping, anchor = self._peers.pop()
            del anchor
            mapping.close()

    def free(self) -> None:
        """Free the own slab; no peer may have it mapped."""
        self.all_mapped()
        if self.pointer:
            self.pointer = 0
            del self._anchor
            self._own.close()
        _remove_orphans()


def _shared_file(nbytes: int) -> tuple[str, int]:
    """Create a file in /dev/shm or, where that is missing or too small, in the temporary folder."""
    _remove_orphans()
    here = Place.here()
    prefix = f"moe_ar-{re.sub('[^0-9]', '', here.pid_namespace)}-{here.pid}-"
    problems = []
    for folder in _folders():
        try:
            descriptor, path = tempfile.mkstemp(prefix=prefix, dir=folder)
        except OSError as error:
            problems.append(f"{folder}: {error}")
            continue
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # now, not by SIGBUS later
            return path, descriptor
        except OSError as error:
            os.close(descriptor)
            os.unlink(path)
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            problems.append(f"{folder}: {error}")
    raise UnsupportedError(
        f"no room for {nbytes} bytes of shared memory ({'; '.join(problems)}); enlarge /dev/shm "
        "(docker run --shm-size), let TMPDIR name a larger folder, or lower max_token_num"
    )


def _folders() -> tuple[str, str]:
    return "/dev/shm", tempfile.gettempdir()


def _remove_orphans() -> None:
    """Remove files of processes that were killed before all peers had mapped them."""
    here = Place.here()
    for folder in _folders():
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                found = re.match(r"moe_ar-(\d+)-(\d+)-", name)
                if not found or f"[{found[1]}]" not in here.pid_namespace:
                    continue
                if has_ended(here, replace(here, pid=int(found[2]))):
                    with contextlib.suppress(OSError):  # another's, or removed meanwhile
                        os.unlink(os.path.join(folder, name))


class CudaSlab:
    """Device memory for the CUDA backend."""

    unmap_s = 1.0  # CUDA leaves it open what comes of mappings of memory that has been freed

    def __init__(self, nbytes: int, device: int, place: Place) -> None:
        """Allocate with cudaMalloc (a pool's memory cannot be exported), initialise, wait.

        Args:
            nbytes: Of the slab.
            device: CUDA ordinal; the current device.
            place: Of this rank.
        """
        from cupy.cuda import runtime

        self.nbytes = nbytes
        self.device = device
        self.place = place
        self._runtime = runtime
        self._opened: list[int] = []
        self.pointer = int(runtime.malloc(nbytes))
        try:
            runtime.memset(self.pointer, 0, SLAB_HEADER_BYTES)
            from cuda.bindings import driver

            words = (nbytes - SLAB_HEADER_BYTES) // 4
            (status,) = driver.cuMemsetD32(self.pointer + SLAB_HEADER_BYTES, SENTINEL, words)
            if status:
                raise UnsupportedError(f"cannot initialise the slab: {status.name}")
            runtime.deviceSynchronize()
        except BaseException:
            runtime.free(self.pointer)
            raise

    def export(self) -> object:
        """Return what another process needs to map this slab."""
        try:
            return bytes(self._runtime.ipcGetMemHandle(self.pointer))
        except self._runtime.CUDARuntimeError as error:
            raise UnsupportedError(why_not_exported(self.place, str(error))) from error

    def open(self, exported: Any, pointer: int, place: Place) -> int:
        """Map the slab of a peer at `place`; return its address here."""
        runtime = self._runtime
        device = self.place.visible.index(place.gpu) if place.gpu in self.place.visible else None
        reachable: bool | None = None
        if device not in (None, self.device):
            reachable = bool(runtime.deviceCanAccessPeer(self.device, device))
        if place.process != self.place.process:
            lazy_enable_peer_access = 1
            try:
                opened = int(runtime.ipcOpenMemHandle(exported, lazy_enable_peer_access))
            except runtime.CUDARuntimeError as error:
                raise _UnreachableError(str(error), reachable) from error
            self._opened.append(opened)
            return opened
        if device != self.device:
            if reachable is False:
                raise _UnreachableError("", reachable)
            try:
                runtime.deviceEnablePeerAccess(device)
            except runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    raise _UnreachableError(str(error), reachable) from error
        return pointer

    def all_mapped(self) -> None:
        """Nothing to do: a handle is no name that could leak."""

    def write_word(self, address: int, value: int) -> None:
        """Write 64 bits at an address in the own or in a mapped slab."""
        word = ctypes.c_uint64(value)
        host_to_device = 1
        with on_device(self.device):
            self._runtime.memcpy(address, ctypes.addressof(word), 8, host_to_device)
            self._runtime.deviceSynchronize()  # such a copy may return before it has arrived

    def read_words(self, address: int, count: int) -> Sequence[int]:
        """Read 64-bit words of the own slab."""
        words = (ctypes.c_uint64 * count)()
        device_to_host = 2
        with on_device(self.device):
            self._runtime.memcpy(ctypes.addressof(words), address, 8 * count, device_to_host)
        return list(words)

    def close_peers(self) -> None:
        """Unmap the peers' slabs."""
        with on_device(self.device):
            while self._opened:
                self._runtime.ipcCloseMemHandle(self._opened.pop())

    def free(self) -> None:
        """Free the own slab; no peer may have it mapped."""
        if self.pointer:
            with on_device(self.device):
                self._runtime.free(self.pointer)
            self.pointer = 0


class SymmetricMemory:
    """Every rank's slab, as mapped on this rank.

    Attributes:
        slab: The own one.
        pointers: Address of each rank's slab here, in rank order; the own one included.
        places: Of each rank.
    """

    def __init__(self, group: Group, allocate: Callable[[], Slab]) -> None:
        """Allocate, exchange, map and probe; collective, and the same error on every rank.

        Args:
            group: The ranks.
            allocate: Returns this rank's initialised slab.
        """
        self.group = group
        rank = group.Get_rank()
        slab: Slab | None = None

        def create() -> None:
            nonlocal slab
            slab = allocate()

        def check_hosts() -> None:
            for peer, place in enumerate(self.places):
                if place.host != self.places[rank].host:
                    raise UnsupportedError(why_not_shared(self.places, rank, peer))

        def export() -> tuple[int, object]:
            assert slab is not None
            # Threads of one process do without, also where there is no CUDA IPC.
            needed = any(place.process != slab.place.process for place in self.places)
            return slab.pointer, slab.export() if needed else None

        def open_peer(peer: int) -> int:
            assert slab is not None
            if peer == rank:
                return slab.pointer
            pointer, exported = told[peer]
            try:
                return slab.open(exported, pointer, self.places[peer])
            except _UnreachableError as error:
                access = error.peer_access
                raise UnsupportedError(
                    why_not_shared(self.places, rank, peer, peer_access=access, error=str(error))
                ) from error

        _free_kept()
        try:
            staged(group, "allocating the workspace", create)
            assert slab is not None
            self.places: list[Place] = group.allgather(slab.place)
            staged(group, "sharing the workspace", check_hosts)
            told = group.allgather(staged(group, "exporting the workspace", export))
            self.pointers = staged(
                group,
                "mapping the peers' memory",
                lambda: tuple(map(open_peer, range(len(told)))),
            )
            slab.all_mapped()
            self.slab: Slab = slab
            self._probe()
        except BaseException:
            if slab is not None:
                slab.close_peers()
            with contextlib.suppress(Exception):  # a peer may be gone
                group.barrier()
            if slab is not None:
                slab.free()
            raise

    def _probe(self) -> None:
        """See every rank's write arrive at every other: a mapping alone proves nothing."""
        rank, size = self.group.Get_rank(), self.group.Get_size()
        first = self.slab.pointer + SLAB_PROBE_OFFSET

        def word(writer: int, owner: int) -> int:
            return 0x6D6F655F61720000 + (writer << 8) + owner

        def write() -> None:
            for owner, pointer in enumerate(self.pointers):
                address = pointer + SLAB_PROBE_OFFSET + 8 * rank
                self.slab.write_word(address, word(rank, owner))

        def read() -> None:
            found = self.slab.read_words(first, size)
            wrong = [peer for peer in range(size) if found[peer] != word(peer, rank)]
            if wrong:
                raise UnsupportedError(
                    f"what ranks {wrong} wrote into the memory of rank {rank} did not arrive: peer "
                    "access is reported but does not work (IOMMU or ACS settings, driver)"
                )

        staged(self.group, "probing the peers' memory", write)
        staged(self.group, "probing the peers' memory", read)

    def close(self, seconds: float) -> None:
        """Unmap, meet, free, meet; collective. Without a peer for `seconds` the slab is kept.

        The own launches must have ended; so for `abandon`.
        """
        self._leave()
        if not meet(self.group, seconds):
            self._keep()
            return
        self.slab.free()
        meet(self.group, seconds)
        _free_kept()

    def abandon(self) -> None:
        """Unmap the peers' slabs without them; the own one is kept while they may write to it."""
        self._leave()
        self._keep()

    def _leave(self) -> None:
        rank = self.group.Get_rank()
        for owner, pointer in enumerate(self.pointers):
            if owner == rank:
                continue
            try:
                self.slab.write_word(pointer + SLAB_FAREWELL_OFFSET + 8 * rank, 1)
            except Exception as error:  # it then keeps its slab for longer than it must
                _log.info("rank %d could not take leave of rank %d: %s", rank, owner, error)
        self.slab.close_peers()

    def _keep(self) -> None:
        _free_kept()
        kept = _Kept(self.slab, self.group.Get_rank(), self.places)
        with _kept_lock:
            users = kept.free()
            if users:
                _kept.append(kept)
        if users:
            _log.warning(
                "%d bytes stay allocated until ranks %s have left the workspace or ended: they may "
                "still write there",
                self.slab.nbytes,
                ", ".join(map(str, users)),
            )


class _Kept:
    """A slab whose rank has left, but maybe not all that write to it."""

    def __init__(self, slab: Slab, rank: int, places: Sequence[Place]) -> None:
        self._slab = slab
        self._rank = rank
        self._places = places
        self._left_at: dict[int, float] = {}

    def free(self) -> list[int]:
        """Free the slab unless ranks may still write to it or have it mapped; return those."""
        peers = [rank for rank in range(len(self._places)) if rank != self._rank]
        try:
            first = self._slab.pointer + SLAB_FAREWELL_OFFSET
            left = self._slab.read_words(first, len(self._places))
        except Exception:  # the device has failed
            return peers
        here, now = self._slab.place, time.monotonic()

        def has_left(peer: int) -> bool:
            if not left[peer]:
                return False
            place = self._places[peer]
            since = now - self._left_at.setdefault(peer, now)
            return place.process == here.process or since >= self._slab.unmap_s

        users = [
            peer for peer in peers if not has_left(peer) and not has_ended(here, self._places[peer])
        ]
        if not users:
            self._slab.free()
        return users


_kept: list[_Kept] = []
_kept_lock = threading.Lock()


def _free_kept() -> None:
    """Free what this process has kept and nobody can write to any more."""
    with _kept_lock:
        _kept[:] = [kept for kept in _kept if kept.free()]
