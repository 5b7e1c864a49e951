"""The CPU backend: the kernels' own sources, run by the emulator in this thread."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from . import abi
from .compile import CPU, Variant, compile_all
from .errors import CompileError, WorkspaceError
from .group import Group
from .plan import KernelLimits, LaunchShape, RowPlan, all_shapes
from .sharing import Place
from .symmetric import HostSlab, SymmetricMemory

__all__ = ["CpuBackend"]


class _LaunchConfig(ctypes.Structure):
    # MoeArEmulatorConfig
    _fields_ = (
        ("grid_blocks", ctypes.c_uint32),
        ("block_threads", ctypes.c_uint32),
        ("cluster_blocks", ctypes.c_uint32),
        ("resident_clusters", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("watchdog_seconds", ctypes.c_double),
        ("order", ctypes.c_void_p),
        ("number", ctypes.c_uint64),
    )


class _Order(ctypes.Structure):
    # MoeArEmulatorOrder
    _fields_ = (("triggered", ctypes.c_uint64), ("ended", ctypes.c_uint64))


class CpuBackend:
    """Runs launches of one rank. A launch returns when it is done, unless they may overlap.

    Attributes:
        seed: 0 runs threads in a fixed order; any other value picks a random interleaving.
        resident_clusters: Clusters that run side by side; 1 proves that one is enough to finish.
        overlap: For tests. A programmatic launch begins once the one before it has triggered, and
            returns once it has triggered itself; `synchronize` waits until it has ended.
    """

    name = "cpu"
    device = -1
    ranks_on_device = 1
    description = "CPU emulator"

    def __init__(self) -> None:
        """Read `MOE_AR_CPU_SEED`, the seed of the thread interleaving (default 0)."""
        self.seed = int(os.environ.get("MOE_AR_CPU_SEED", "0"))
        self.resident_clusters = 1
        self.overlap = False
        self._order = _Order()
        self._overlapping: list[Future[None]] = []  # all launches of the order so far
        # A launch cannot trigger before the one before it has ended.
        self._threads = ThreadPoolExecutor(2, "moe_ar-launch")
        self.locate()
        self._libraries: dict[Variant, ctypes.CDLL] = {}
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._record = abi.TimeoutRecord()

    @property
    def record(self) -> abi.TimeoutRecord:
        """Where a kernel notes why it gave up."""
        return self._record

    def locate(self) -> None:
        """Look where this process runs."""
        self.place: Place = Place.here()

    def allocate(self, group: Group, nbytes: int) -> tuple[SymmetricMemory, int]:
        """Allocate slabs of `nbytes` and, once, the control block; return them and its address."""
        if self._memory is None:
            self._memory = ctypes.create_string_buffer(ctypes.sizeof(abi.ControlBlock) + 128)
        memory = SymmetricMemory(group, lambda: HostSlab(nbytes, self.place))
        return memory, self._reset(memory.pointers)

    def detach(self) -> None:
        """Forget the slabs, which are about to go; the control block keeps its address."""
        self._reset(())

    def _reset(self, pointers: Sequence[int]) -> int:
        assert self._memory is not None
        address = -(-ctypes.addressof(self._memory) // 128) * 128
        ctypes.memset(address, 0, ctypes.sizeof(abi.ControlBlock))
        ctypes.memset(ctypes.addressof(self._record), 0, ctypes.sizeof(self._record))
        control = abi.ControlBlock.from_address(address)
        control.slab[: len(pointers)] = pointers
        control.record = ctypes.addressof(self._record)
        return address

    def compile(self, variants: Iterable[Variant]) -> None:
        """Compile what is not in the cache yet."""
        compile_all(variants, CPU)

    def load(self, variants: Iterable[Variant]) -> dict[Variant, dict[LaunchShape, int]]:
        """Load compiled variants; return how many clusters of each shape run side by side."""
        for (variant, _), path in compile_all(variants, CPU).items():
            try:
                self._libraries[variant] = ctypes.CDLL(str(path))
            except OSError as error:
                raise CompileError(f"cannot load {path}: {error}") from error
            self._libraries[variant].moe_ar_emulator_error.restype = ctypes.c_char_p
        # Clusters run one after the other: the grid is as wide as anyone likes.
        resident = {}
        for variant in variants:
            kernels = variant.kernels
            resident[variant] = {s: 1 << 20 for s in all_shapes() if s.kernel in kernels}
        return resident

    def limits(self, resident: dict[LaunchShape, int]) -> KernelLimits:
        """Wrap the group's minimum; the emulator has as many SMs as a large GPU."""
        return KernelLimits(resident, 132)

    def bind(
        self, variant: Variant, plan: RowPlan, params: abi.Params, programmatic: bool
    ) -> Callable[[int], None]:
        """Return what runs one launch with these parameters to its end; it keeps them."""
        library = self._libraries[variant]
        kernel = library[variant.kernels[plan.shape.kernel]]

        def run(stream: int) -> None:
            config = _LaunchConfig(
                grid_blocks=plan.grid_blocks,
                block_threads=plan.shape.block_threads,
                cluster_blocks=plan.shape.cluster_blocks,
                resident_clusters=self.resident_clusters,
                seed=self.seed,
                watchdog_seconds=0.0,  # the kernel bounds its own waits
            )
            if programmatic and self.overlap:
                self._begin(launch, config)
            else:
                self.synchronize()
                launch(config)

        def launch(config: _LaunchConfig) -> None:
            status = library.moe_ar_emulator_launch(
                kernel, ctypes.byref(params), ctypes.byref(config)
            )
            if status:
                words = library.moe_ar_emulator_error().decode()
                raise WorkspaceError(f"{variant.kernel_name} failed in the emulator: {words}")

        return run

    def _begin(self, launch: Callable[[_LaunchConfig], None], config: _LaunchConfig) -> None:
        config.number = len(self._overlapping)
        config.order = ctypes.addressof(self._order)
        self._overlapping.append(self._threads.submit(launch, config))
        while self._order.triggered <= config.number and not self._overlapping[-1].done():
            time.sleep(20e-6)

    def stream_fault(self, stream: int) -> str | None:
        """Nothing is wrong with any stream."""
        return None

    def capturing(self, stream: int) -> bool:
        """There are no streams."""
        return False

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy memory of the backend."""
        return ctypes.string_at(address, nbytes)

    def give_up(self, rank: int) -> None:
        """Nothing runs that could wait for a peer."""

    def synchronize(self) -> None:
        """Wait for launches that overlap; raises what failed in one."""
        if not self._overlapping:
            return
        overlapping, self._overlapping = self._overlapping, []
        wait(overlapping)
        self._order = _Order()
        for future in overlapping:
            future.result()

    def close(self) -> None:
        """Drop the control block."""
        self._threads.shutdown()
        self._memory = None
