"""The CUDA backend: cubins on one device, launched through the driver."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence

from . import abi
from .compile import Variant, compile_all, nvrtc_version
from .errors import UnsupportedError
from .group import Group, staged
from .launch import (
    Kernel,
    KernelLaunch,
    active_clusters,
    device_limits,
    driver_version,
    is_capturing,
    load,
    max_cluster_size,
    occupancy,
    on_device,
    runs_under_mps,
    stream_device,
    version_problem,
)
from .plan import KernelLimits, LaunchShape, RowPlan, all_shapes
from .sharing import Place
from .symmetric import CudaSlab, SymmetricMemory

__all__ = ["CudaBackend", "backend_of", "choose_device", "device_count", "place_on"]

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_DEFAULT_STREAMS = (0, 1, 2)  # legacy, legacy by its name, per thread: of any device
_log = logging.getLogger(__name__)


def device_count() -> int:
    """Return the number of visible CUDA devices.

    Raises:
        UnsupportedError: CuPy or a driver is missing.
    """
    try:
        from cupy.cuda import runtime

        return int(runtime.getDeviceCount())
    except ImportError as error:
        raise UnsupportedError(f"CuPy is not usable: {error}") from error
    except runtime.CUDARuntimeError as error:
        raise UnsupportedError(f"CUDA is not usable: {error}") from error


def backend_of(group: Group) -> str:
    """Return "cuda" where every rank sees a device, else "cpu"; collective."""
    try:
        usable = device_count() > 0
    except UnsupportedError as error:
        _log.info("rank %d uses the CPU backend: %s", group.Get_rank(), error)
        usable = False
    return "cuda" if all(group.allgather(usable)) else "cpu"


def choose_device(device: int | None, local_rank: int) -> int:
    """Return the ordinal to use: as given, else the thread's current one, else by local rank."""
    count = device_count()
    if count == 0:
        raise UnsupportedError("no CUDA device is visible (see CUDA_VISIBLE_DEVICES)")
    if device is not None:
        if not 0 <= device < count:
            raise UnsupportedError(f"device must be in 0..{count - 1}; got {device}")
        return device
    from cupy.cuda import driver, runtime

    if driver.ctxGetCurrent():
        return int(runtime.getDevice())
    return local_rank % count


def place_on(device: int) -> Place:
    """Return the place of this process on a CUDA device, given by its ordinal."""
    from cupy.cuda import runtime

    limits = device_limits(device)
    bus_ids = tuple(map(runtime.deviceGetPCIBusId, range(device_count())))
    return Place.here().with_gpu(
        gpu=bus_ids[device],
        gpu_uuid=limits.uuid,
        gpu_name=limits.name,
        visible=bus_ids,
        mps=runs_under_mps(device),
    )


class CudaBackend:
    """Enqueues launches of one rank.

    If the thread has no current device yet, `device` becomes it; else it is put back after each
    call.
    """

    name = "cuda"

    def __init__(self, device: int, sm_margin: int) -> None:
        """Look at the device."""
        from cupy.cuda import driver, runtime

        self._runtime = runtime
        self.device = device
        self.ranks_on_device = 1
        self._sm_margin = sm_margin
        if not driver.ctxGetCurrent():
            runtime.setDevice(device)
        with on_device(self.device):
            self.device_limits = device_limits(device)
        self.locate()
        if not 0 <= sm_margin < self.device_limits.sm_count:
            raise UnsupportedError(
                f"sm_margin must be in 0..{self.device_limits.sm_count - 1}; got {sm_margin}"
            )
        self.description = f"{self.device_limits.name} ({self.device_limits.pci_bus_id})"
        self._kernels: dict[Variant, dict[str, Kernel]] = {}
        self._launches: dict[tuple[Variant, RowPlan, bool], KernelLaunch] = {}
        self._control = 0
        self._record_host = 0

    @property
    def record(self) -> abi.TimeoutRecord:
        """Where a kernel notes why it gave up: host memory mapped into the device."""
        return abi.TimeoutRecord.from_address(self._record_host)

    def locate(self) -> None:
        """Look where this process runs."""
        with on_device(self.device):
            self.place: Place = place_on(self.device)

    def allocate(self, group: Group, nbytes: int) -> tuple[SymmetricMemory, int]:
        """Allocate slabs of `nbytes` and, once, the control block; return them and its address."""
        with on_device(self.device):
            staged(group, "allocating the control block", self._allocate_control)
            memory = SymmetricMemory(group, lambda: CudaSlab(nbytes, self.device, self.place))
            self._reset(memory.pointers)
        return memory, self._control

    def _allocate_control(self) -> None:
        runtime = self._runtime
        mapped = 2
        if not self._record_host:
            self._record_host = runtime.hostAlloc(ctypes.sizeof(abi.TimeoutRecord), mapped)
        if not self._control:
            self._control = runtime.malloc(ctypes.sizeof(abi.ControlBlock))

    def detach(self) -> None:
        """Forget the slabs, which are about to go; the control block keeps its address.

        A graph that is replayed nevertheless then faults at once: its slabs lie at address 0.
        """
        with on_device(self.device):
            self._reset(())

    def _reset(self, pointers: Sequence[int]) -> None:
        ctypes.memset(self._record_host, 0, ctypes.sizeof(abi.TimeoutRecord))
        control = abi.ControlBlock()
        control.slab[: len(pointers)] = pointers
        control.record = self._record_host  # the same address on the device (unified memory)
        self._runtime.memcpy(
            self._control, ctypes.addressof(control), ctypes.sizeof(control), _HOST_TO_DEVICE
        )
        self._runtime.deviceSynchronize()

    def compile(self, variants: Iterable[Variant]) -> None:
        """Compile what is not in the cache yet."""
        try:
            problem = version_problem(nvrtc_version(), driver_version())
        except Exception:  # prebuilt cubins need no NVRTC
            problem = None
        if problem:
            raise UnsupportedError(problem)
        compile_all(variants, self.device_limits.arch)

    def load(self, variants: Iterable[Variant]) -> dict[Variant, dict[LaunchShape, int]]:
        """Load compiled variants; return how many clusters of each shape run side by side."""
        arch = self.device_limits.arch
        resident = {}
        with on_device(self.device):
            for (variant, _), path in compile_all(variants, arch).items():
                if variant not in self._kernels:
                    loaded = load(path, *variant.kernels.values())
                    self._kernels[variant] = dict(zip(variant.kernels, loaded, strict=True))
                resident[variant] = self._resident_clusters(self._kernels[variant])
        return resident

    def _resident_clusters(self, kernels: dict[str, Kernel]) -> dict[LaunchShape, int]:
        sms = self.device_limits.sm_count
        clusters_exist = self.device_limits.compute_capability[0] >= 9
        largest = max_cluster_size(kernels["row"], abi.MAX_BLOCK_THREADS) if clusters_exist else 1
        resident = {}
        for shape in all_shapes():
            if shape.cluster_blocks > largest or shape.kernel not in kernels:
                continue
            kernel = kernels[shape.kernel]
            if shape.cluster_blocks == 1:
                count = occupancy(kernel, shape.block_threads) * sms
            else:
                count = active_clusters(kernel, shape.block_threads, shape.cluster_blocks)
            share = count * (sms - self._sm_margin) // (sms * self.ranks_on_device)
            if count >= self.ranks_on_device:  # one a rank is enough to finish; it may cost margin
                resident[shape] = max(share, 1)
        return resident

    def limits(self, resident: dict[LaunchShape, int]) -> KernelLimits:
        """Wrap the group's minimum."""
        sms = (self.device_limits.sm_count - self._sm_margin) // self.ranks_on_device
        return KernelLimits(resident, sms)

    def bind(
        self, variant: Variant, plan: RowPlan, params: abi.Params, programmatic: bool
    ) -> Callable[[int], None]:
        """Return what enqueues one launch with these parameters on a stream; it keeps them."""
        launch = self.launcher(variant, plan, programmatic).launch
        current, device = self._runtime.getDevice, self.device

        def enqueue(stream: int, params: abi.Params = params) -> None:
            if current() == device:
                launch(address, stream)
                return
            with on_device(self.device):
                launch(address, stream)

        address = ctypes.addressof(params)
        return enqueue

    def launcher(self, variant: Variant, plan: RowPlan, programmatic: bool) -> KernelLaunch:
        """Return the prepared launch of a plan; `programmatic` counts from sm_90 on."""
        programmatic = programmatic and self.device_limits.compute_capability[0] >= 9
        key = (variant, plan, programmatic)
        launch = self._launches.get(key)
        if launch is None:
            launch = KernelLaunch(
                self._kernels[variant][plan.shape.kernel],
                plan.grid_blocks,
                plan.shape.block_threads,
                cluster=plan.shape.cluster_blocks,
                programmatic=programmatic,
            )
            self._launches[key] = launch
        return launch

    def capturing(self, stream: int) -> bool:
        """Whether what is launched on a stream is captured in a CUDA graph."""
        return is_capturing(stream)

    def stream_fault(self, stream: int) -> str | None:
        """Say why launches cannot go to a stream."""
        if stream in _DEFAULT_STREAMS:
            return None
        device = stream_device(stream)
        if device == self.device:
            return None
        return f"stream must belong to cuda:{self.device}; got one of cuda:{device}"

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy device memory to the host; waits for the device."""
        data = ctypes.create_string_buffer(nbytes)
        with on_device(self.device):
            self._runtime.deviceSynchronize()
            self._runtime.memcpy(ctypes.addressof(data), address, nbytes, _DEVICE_TO_HOST)
        return data.raw

    def give_up(self, rank: int) -> None:
        """End the waits of this rank's launches as if they had timed out, and wait for them."""
        runtime = self._runtime
        word = ctypes.c_uint32(1 + rank)  # ControlBlock.broken
        non_blocking = 1
        with on_device(self.device):
            stream = runtime.streamCreateWithFlags(non_blocking)
            try:
                runtime.memcpyAsync(
                    self._control + abi.ControlBlock.broken.offset,
                    ctypes.addressof(word),
                    ctypes.sizeof(word),
                    _HOST_TO_DEVICE,
                    stream,
                )
                runtime.streamSynchronize(stream)
            finally:
                runtime.streamDestroy(stream)
            runtime.deviceSynchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        with on_device(self.device):
            self._runtime.deviceSynchronize()

    def close(self) -> None:
        """Free what is this rank's alone."""
        with on_device(self.device):
            if self._control:
                self._runtime.free(self._control)
                self._control = 0
            if self._record_host:
                self._runtime.freeHost(self._record_host)
                self._record_host = 0
        self._launches.clear()
        self._kernels.clear()
