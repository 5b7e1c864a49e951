"""The CUDA driver: what a device can do, loading a cubin, launching one of its kernels.

CuPy loads modules; launches go through `cuda.bindings`, since CuPy cannot launch clusters or with
programmatic stream serialization. Every function works on the calling thread's current device
unless it takes one. It raises an `UnsupportedError` where this machine cannot do what was asked,
and a `WorkspaceError` on any other error of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnsupportedError, WorkspaceError

__all__ = [
    "DeviceLimits",
    "Kernel",
    "KernelLaunch",
    "active_clusters",
    "arch_for",
    "device_limits",
    "driver_version",
    "is_capturing",
    "load",
    "max_cluster_size",
    "occupancy",
    "on_device",
    "runs_under_mps",
    "stream_device",
    "version_problem",
]

# A plain cubin also runs on later minor versions (not between desktop and Jetson, which is 8.7).
# An `a` target has all the instructions of its device and runs on exactly that compute capability,
# so sm_120a does not serve 12.1.
_ARCHES = {
    (8, 0): "sm_80",
    (8, 6): "sm_80",
    (8, 7): "sm_87",
    (8, 9): "sm_80",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
_UNSUPPORTED = ("NO_BINARY", "UNSUPPORTED", "NOT_SUPPORTED", "INSUFFICIENT_DRIVER", "NO_DEVICE")


@dataclass(frozen=True)
class DeviceLimits:
    """What launch plans need to know of a device.

    Attributes:
        name: Marketing name.
        compute_capability: (major, minor).
        arch: Target to compile for, such as `sm_90a`.
        sm_count: Number of streaming multiprocessors.
        max_threads_per_sm: Threads that one of them holds at a time.
        uuid: Identity across processes and hosts; under MIG, of the instance.
        pci_bus_id: Identity on this host.
    """

    name: str
    compute_capability: tuple[int, int]
    arch: str
    sm_count: int
    max_threads_per_sm: int
    uuid: str
    pci_bus_id: str


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: its CUfunction, and what keeps its module loaded."""

    name: str
    function: int
    owner: object = None


class KernelLaunch:
    """One launch, prepared once and then repeated at the cost of a driver call.

    Not thread-safe: the stream and the parameters' address pass through this object.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        block: int,
        *,
        cluster: int = 1,
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Prepare a launch.

        Args:
            kernel: Its only parameter is one by-value struct.
            grid: Number of CTAs, a multiple of `cluster`.
            block: Threads per CTA.
            cluster: CTAs per cluster; more than 1 needs sm_90.
            shared_bytes: Dynamic shared memory per CTA.
            programmatic: Let the kernel start before its predecessor on the stream has ended (it
                executes `griddepcontrol.wait`); needs sm_90.
        """
        if grid % cluster:
            raise ValueError(f"grid must be a multiple of cluster = {cluster}; got {grid}")
        driver = _driver()
        self.kernel = kernel
        self.config = _config(kernel, grid, block, cluster, shared_bytes, programmatic)
        self._function = driver.CUfunction(kernel.function)
        self._arguments = (ctypes.c_void_p * 1)()
        self._arguments_address = ctypes.addressof(self._arguments)
        self._stream = 0
        self._new_stream = driver.CUstream
        self._launch = driver.cuLaunchKernelEx

    def launch(self, parameters: int, stream: int) -> None:
        """Enqueue the kernel.

        Args:
            parameters: Host address of the parameter struct, which is copied before this returns.
            stream: CUstream handle; 0 is the legacy default stream.
        """
        if stream != self._stream:
            self.config.hStream = self._new_stream(stream)
            self._stream = stream
        self._arguments[0] = parameters
        # The bindings take the address of a void*[] as it is, without building one.
        (status,) = self._launch(self.config, self._function, self._arguments_address, 0)
        if status:
            _check((status,), f"launching {self.kernel.name}")


def load(cubin: Path, *names: str) -> tuple[Kernel, ...]:
    """Load a cubin on the current device and return its kernels of these names."""
    import cupy

    try:
        module = cupy.RawModule(path=str(cubin))
        functions = [module.get_function(name) for name in names]
        pointers = [function.kernel.ptr for function in functions]
    except cupy.cuda.driver.CUDADriverError as error:
        raise UnsupportedError(f"cannot load {', '.join(names)} from {cubin}: {error}") from error
    return tuple(map(Kernel, names, pointers, functions))


def arch_for(major: int, minor: int) -> str:
    """Return the compile target for a compute capability; an error lists the supported ones."""
    if (major, minor) not in _ARCHES:
        known = ", ".join(f"{a}.{b}" for a, b in _ARCHES)
        raise UnsupportedError(f"compute capability {major}.{minor} is not supported, only {known}")
    return _ARCHES[major, minor]


def device_limits(device: int) -> DeviceLimits:
    """Return the limits of a CUDA device, given by its ordinal among the visible ones."""
    driver = _driver()
    handle = _check(driver.cuDeviceGet(device), f"opening CUDA device {device}")

    def get(call: Any, *arguments: Any) -> Any:
        return _check(call(*arguments, handle), f"querying CUDA device {device}")

    def attribute(name: str) -> int:
        code = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(get(driver.cuDeviceGetAttribute, code))

    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    # The second version tells MIG instances apart; CUDA 13 gave it the plain name.
    get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    return DeviceLimits(
        name=_text(get(driver.cuDeviceGetName, 128)),
        compute_capability=capability,
        arch=arch_for(*capability),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        max_threads_per_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        uuid=str(uuid.UUID(bytes=get(get_uuid).bytes)),
        pci_bus_id=_text(get(driver.cuDeviceGetPCIBusId, 32)),
    )


def _text(padded: bytes) -> str:
    """Decode a C string; the bindings return its whole buffer."""
    return padded.partition(b"\0")[0].decode().strip()


def occupancy(kernel: Kernel, block: int, shared_bytes: int = 0) -> int:
    """Return how many CTAs of `block` threads one SM holds at a time."""
    driver = _driver()
    _config(kernel, 1, block, 1, shared_bytes)
    ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    count = ask(driver.CUfunction(kernel.function), block, shared_bytes)
    return int(_check(count, f"computing the occupancy of {kernel.name}"))


def max_cluster_size(kernel: Kernel, block: int, shared_bytes: int = 0) -> int:
    """Return the largest cluster, in CTAs, that this device runs of the kernel; needs sm_90."""
    driver = _driver()
    _opt_in(kernel, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
    config = _config(kernel, 16, block, 1, shared_bytes)
    size = driver.cuOccupancyMaxPotentialClusterSize(driver.CUfunction(kernel.function), config)
    return int(_check(size, f"computing the largest cluster of {kernel.name}"))


def active_clusters(kernel: Kernel, block: int, cluster: int, shared_bytes: int = 0) -> int:
    """Return how many clusters of `cluster` CTAs the device holds at a time; needs sm_90."""
    driver = _driver()
    config = _config(kernel, cluster, block, cluster, shared_bytes)
    count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(kernel.function), config)
    return int(_check(count, f"computing the resident clusters of {kernel.name}"))


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version, as (major, minor), that the driver supports."""
    version = int(_check(_driver().cuDriverGetVersion(), "reading the driver's version"))
    return version // 1000, version % 1000 // 10


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device the calling thread's current one for a while."""
    from cupy.cuda import runtime

    current = runtime.getDevice()
    if current == device:
        yield
        return
    runtime.setDevice(device)
    try:
        yield
    finally:
        runtime.setDevice(current)


def runs_under_mps(device: int) -> bool:
    """Whether this process is a client of CUDA MPS on a device, given by its ordinal."""
    driver = _driver()
    code = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if code is not None:
        status, enabled = driver.cuDeviceGetAttribute(code, driver.CUdevice(device))
        if not status:
            return bool(enabled)
    # Older drivers do not know: then by the daemon's pipe, where clients look for it.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(folder) / "control").exists()


def is_capturing(stream: int) -> bool:
    """Whether launches on a stream (a CUstream handle) are captured in a graph, not executed."""
    driver = _driver()
    capture = driver.cuStreamIsCapturing(driver.CUstream(stream))
    return int(_check(capture, "asking whether a stream is being captured")) != 0


def stream_device(stream: int) -> int:
    """Return the ordinal of the device that a stream (a CUstream handle) belongs to."""
    driver = _driver()
    context = _check(driver.cuStreamGetCtx(driver.CUstream(stream)), "asking for a stream's device")
    _check(driver.cuCtxPushCurrent(context), "entering a stream's context")
    try:
        return int(_check(driver.cuCtxGetDevice(), "asking for a stream's device"))
    finally:
        _check(driver.cuCtxPopCurrent(), "leaving a stream's context")


def version_problem(nvrtc: tuple[int, int], driver: tuple[int, int]) -> str | None:
    """Say why a driver may refuse the cubins of an NVRTC, both by CUDA version; else None.

    A driver runs cubins of every older CUDA and, within its major version, of newer ones.
    """
    if nvrtc[0] <= driver[0]:
        return None
    return (
        "NVRTC is of CUDA {}.{}, but the driver supports CUDA {}.{} at most: "
        "update the driver, or uninstall the CUDA {} packages (cuda-bindings, nvidia-cuda-nvrtc, "
        "CuPy) and pip install 'cupy_moe_ar[cuda{}]'"
    ).format(*nvrtc, *driver, nvrtc[0], driver[0])


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver

        _check(driver.cuInit(0), "initialising CUDA")
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"CUDA is not usable: {error}. It takes an NVIDIA driver and pip install "
            "'cupy_moe_ar[cuda12]' or, where the driver is of CUDA 13, 'cupy_moe_ar[cuda13]'"
        ) from error
    return driver


def _check(result: tuple[Any, ...], doing: str) -> Any:
    """Return what follows the status of a call of the bindings, or raise."""
    status, *values = result
    if not status:
        return values[0] if values else None
    unsupported = any(word in status.name for word in _UNSUPPORTED)
    raise (UnsupportedError if unsupported else WorkspaceError)(f"{doing}: {status.name}")


def _config(
    kernel: Kernel, grid: int, block: int, cluster: int, shared: int, programmatic: bool = False
) -> Any:
    driver = _driver()
    ids = driver.CUlaunchAttributeID
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        attributes.append(attribute)
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 8:
        _opt_in(kernel, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
    if shared > 48 * 1024:
        _opt_in(kernel, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _opt_in(kernel: Kernel, name: str, value: int) -> None:
    driver = _driver()
    code = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    function = driver.CUfunction(kernel.function)
    _check(driver.cuFuncSetAttribute(function, code, value), f"setting {name} of {kernel.name}")
