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
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

from .abi import SENTINEL, SLAB_HEADER_BYTES, SLAB_PROBE_OFFSET
from .errors import UnsupportedError
from .group import Group, host_identity, meet, staged

__all__ = ["CudaSlab", "HostSlab", "Slab", "SymmetricMemory"]

_log = logging.getLogger(__name__)
_abandoned: list[Slab] = []


class Slab(Protocol):
    """One rank's allocation: header zero, every slot word the sentinel."""

    pointer: int

    def export(self) -> object:
        """Return what another process needs to map this slab."""

    def open(self, exported: Any, same_process: bool, pointer: int, place: Any) -> int:
        """Map a peer's slab; return its address here."""

    def place(self) -> Any:
        """Return what peers should know of where the slab lies."""

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

    def __init__(self, nbytes: int) -> None:
        """Allocate and initialise."""
        self.nbytes = nbytes
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

    def place(self) -> Any:
        """Return what peers should know of where the slab lies."""
        return None

    def open(self, exported: Any, same_process: bool, pointer: int, place: Any) -> int:
        """Map a peer's slab; return its address here."""
        if same_process:
            return pointer
        descriptor = os.open(exported, os.O_RDWR)
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


def _shared_file(nbytes: int) -> tuple[str, int]:
    """Create a file in /dev/shm or, where that is missing or too small, in the temporary folder."""
    problems = []
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="moe_ar-", dir=folder)
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


class CudaSlab:
    """Device memory for the CUDA backend; every method runs with `device` current."""

    def __init__(self, nbytes: int, device: int) -> None:
        """Allocate with cudaMalloc (a pool's memory cannot be exported), initialise, wait."""
        from cupy.cuda import runtime

        self.nbytes = nbytes
        self.device = device
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
        return bytes(self._runtime.ipcGetMemHandle(self.pointer))

    def place(self) -> Any:
        """Return what peers should know of where the slab lies."""
        return self.device, self._runtime.deviceGetPCIBusId(self.device)

    def open(self, exported: Any, same_process: bool, pointer: int, place: Any) -> int:
        """Map a peer's slab; return its address here."""
        runtime = self._runtime
        if not same_process:
            lazy_enable_peer_access = 1
            try:
                opened = int(runtime.ipcOpenMemHandle(exported, lazy_enable_peer_access))
            except runtime.CUDARuntimeError as error:
                raise UnsupportedError(
                    f"cannot map the memory of the peer on GPU {place[1]} from GPU "
                    f"{self.place()[1]} by CUDA IPC: {error}. Both need peer access (nvidia-smi "
                    "topo -p2p r), and containers a common IPC namespace (docker run --ipc=host)"
                ) from error
            self._opened.append(opened)
            return opened
        if place[0] != self.device:
            if not runtime.deviceCanAccessPeer(self.device, place[0]):
                raise UnsupportedError(
                    f"CUDA devices {self.device} and {place[0]} have no peer access "
                    "(nvidia-smi topo -p2p r)"
                )
            try:
                runtime.deviceEnablePeerAccess(place[0])
            except runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    raise
        return pointer

    def all_mapped(self) -> None:
        """Nothing to do: a handle is no name that could leak."""

    def write_word(self, address: int, value: int) -> None:
        """Write 64 bits at an address in the own or in a mapped slab."""
        word = ctypes.c_uint64(value)
        host_to_device = 1
        self._runtime.memcpy(address, ctypes.addressof(word), 8, host_to_device)
        self._runtime.deviceSynchronize()  # such a copy may return before it has arrived

    def read_words(self, address: int, count: int) -> Sequence[int]:
        """Read 64-bit words of the own slab."""
        words = (ctypes.c_uint64 * count)()
        device_to_host = 2
        self._runtime.memcpy(ctypes.addressof(words), address, 8 * count, device_to_host)
        return list(words)

    def close_peers(self) -> None:
        """Unmap the peers' slabs."""
        while self._opened:
            self._runtime.ipcCloseMemHandle(self._opened.pop())

    def free(self) -> None:
        """Free the own slab; no peer may have it mapped."""
        if self.pointer:
            self._runtime.free(self.pointer)
            self.pointer = 0


class SymmetricMemory:
    """Every rank's slab, as mapped on this rank.

    Attributes:
        slab: The own one.
        pointers: Address of each rank's slab here, in rank order; the own one included.
    """

    def __init__(self, group: Group, allocate: Any) -> None:
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

        def check_host() -> None:
            for peer, (host, *_) in enumerate(told):
                if host != told[rank][0]:
                    raise UnsupportedError(
                        f"rank {rank} is on host {told[rank][0].split()[0]}, rank {peer} on "
                        f"{host.split()[0]}: memory is shared within one host only; use one "
                        "workspace for each host's ranks (Split_type(MPI.COMM_TYPE_SHARED))"
                    )

        def open_peers() -> tuple[int, ...]:
            assert slab is not None
            own_pid = os.getpid()
            return tuple(
                slab.pointer
                if peer == rank
                else slab.open(exported, pid == own_pid, pointer, place)
                for peer, (_, pid, pointer, exported, place) in enumerate(told)
            )

        try:
            staged(group, "allocating the workspace", create)
            assert slab is not None
            own = staged(
                group,
                "exporting the workspace",
                lambda: (
                    host_identity(),
                    os.getpid(),
                    slab.pointer,
                    slab.export() if group.Get_size() > 1 else None,
                    slab.place(),
                ),
            )
            told = group.allgather(own)
            staged(group, "sharing the workspace", check_host)
            self.pointers = staged(group, "mapping the peers' memory", open_peers)
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
        """Unmap, meet, free, meet; collective. Without a peer for `seconds` the slab stays."""
        self.slab.close_peers()
        if not meet(self.group, seconds):
            self._keep()
            return
        self.slab.free()
        meet(self.group, seconds)

    def abandon(self) -> None:
        """Unmap the peers' slabs without them; the own one stays, since they may still write."""
        self.slab.close_peers()
        self._keep()

    def _keep(self) -> None:
        _abandoned.append(self.slab)
        _log.warning(
            "%d bytes stay allocated until this process ends: peers may still write there",
            getattr(self.slab, "nbytes", 0),
        )
