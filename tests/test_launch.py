from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from cupy_moe_ar import compile as compile_module
from cupy_moe_ar import launch as launch_module
from cupy_moe_ar.compile import Variant, compile_cuda, nvrtc_version
from cupy_moe_ar.errors import UnsupportedError, WorkspaceError
from cupy_moe_ar.launch import Kernel, KernelLaunch, arch_for, version_problem
from cupy_moe_ar.types import DType

KERNEL = Kernel("toy", 0x1234)


class FakeDriver:
    """The bindings' own classes, with the driver's functions recorded instead of called."""

    def __init__(self) -> None:
        self.bindings = pytest.importorskip("cuda.bindings.driver")
        self.status = self.bindings.CUresult.CUDA_SUCCESS
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            return getattr(self.bindings, name)

        def record(*arguments):
            self.calls.append((name, *arguments))
            return self.status, 7

        return record

    def cuLaunchKernelEx(self, config, function, arguments, extra):  # noqa: N802
        (parameters,) = (ctypes.c_void_p * 1).from_address(arguments)
        self.calls.append(
            (
                int(function),
                ctypes.c_int.from_address(parameters).value,
                int(config.hStream),
                extra,
            )
        )
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launch_module, "_driver", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_arch_of_a_capability(capability: tuple[int, int], arch: str):
    assert arch_for(*capability) == arch


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (13, 0)])
def test_other_capabilities_are_refused_with_a_list(capability: tuple[int, int]):
    with pytest.raises(UnsupportedError, match=r"{}\.{} is not .*8\.0, .*9\.0".format(*capability)):
        arch_for(*capability)


def test_the_device_of_a_stream_is_asked_in_its_context(driver: FakeDriver):
    assert launch_module.stream_device(0xA) == 7
    names = [name for name, *_ in driver.calls]
    assert names == ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxGetDevice", "cuCtxPopCurrent"]
    assert driver.calls[1][1] == 7


def test_plain_launch_has_no_attributes(driver: FakeDriver):
    config = KernelLaunch(KERNEL, 6, 256, shared_bytes=1024).config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (6, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert config.sharedMemBytes == 1024
    assert config.numAttrs == 0
    assert not driver.calls


def test_cluster_and_programmatic_launch_are_attributes(driver: FakeDriver):
    config = KernelLaunch(KERNEL, 8, 32, cluster=4, programmatic=True).config
    assert config.numAttrs == 2
    cluster, programmatic = config.attrs
    assert cluster.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    size = cluster.value.clusterDim
    assert (size.x, size.y, size.z) == (4, 1, 1)
    assert programmatic.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert programmatic.value.programmaticStreamSerializationAllowed == 1
    assert not driver.calls


def test_large_clusters_and_shared_memory_are_opted_in(driver: FakeDriver):
    KernelLaunch(KERNEL, 16, 32, cluster=16, shared_bytes=100_000)
    attributes = [(name, code.name, value) for name, _, code, value in driver.calls]
    assert attributes == [
        ("cuFuncSetAttribute", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
        ("cuFuncSetAttribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 100_000),
    ]


def test_grid_must_hold_whole_clusters(driver: FakeDriver):
    with pytest.raises(ValueError, match="multiple of cluster = 4; got 6"):
        KernelLaunch(KERNEL, 6, 32, cluster=4)


def test_launch_passes_parameters_and_stream(driver: FakeDriver):
    one, two = ctypes.c_int(11), ctypes.c_int(22)
    launch = KernelLaunch(KERNEL, 1, 32)
    for parameters, stream in ((one, 0), (one, 5), (two, 5), (two, 0)):
        launch.launch(ctypes.addressof(parameters), stream)
    assert driver.calls == [
        (0x1234, 11, 0, 0),
        (0x1234, 11, 5, 0),
        (0x1234, 22, 5, 0),
        (0x1234, 22, 0, 0),
    ]


def test_driver_errors_have_names(driver: FakeDriver):
    parameters = ctypes.c_int()
    launch = KernelLaunch(KERNEL, 1, 32)
    driver.status = driver.bindings.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(WorkspaceError, match="launching toy: CUDA_ERROR_LAUNCH_FAILED"):
        launch.launch(ctypes.addressof(parameters), 0)
    driver.status = driver.bindings.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(UnsupportedError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launch.launch(ctypes.addressof(parameters), 0)


def test_questions_about_a_kernel(driver: FakeDriver):
    assert launch_module.occupancy(KERNEL, 256) == 7
    assert launch_module.max_cluster_size(KERNEL, 256) == 7
    assert launch_module.active_clusters(KERNEL, 256, 4) == 7
    assert driver.calls[-1][2].attrs[0].value.clusterDim.x == 4


def test_version_problem_speaks_only_of_newer_major_versions():
    assert version_problem((12, 9), (13, 0)) is None
    assert version_problem((12, 9), (12, 4)) is None
    words = version_problem((13, 0), (12, 8))
    assert words is not None
    assert "CUDA 13.0" in words
    assert "12.8" in words
    assert "cupy_moe_ar[cuda12]" in words


def test_no_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    launch_module._driver.cache_clear()
    with pytest.raises(UnsupportedError, match=r"pip install 'cupy_moe_ar\[cuda12\]'"):
        launch_module.driver_version()


TOY = """
    struct Parameters { int* out; int value; };
    extern "C" __global__ void MOE_AR_KERNEL_NAME(const __grid_constant__ Parameters p) {
      extern __shared__ int shared[];
      unsigned blocks = 1;
    #if __CUDA_ARCH__ >= 900
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    #endif
      if (threadIdx.x == 0) p.out[blockIdx.x] += 1000 * p.value + 10 * blocks + gridDim.x;
    }
"""


class Parameters(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("value", ctypes.c_int))


@pytest.mark.gpu
def test_launches_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_module, "sources", lambda: tmp_path)
    (tmp_path / "oneshot.cu").write_text(TOY)
    variant = Variant("moe_finalize", "oneshot", DType.BFLOAT16, DType.BFLOAT16, 2)
    limits = launch_module.device_limits(cupy.cuda.Device().id)
    assert limits.sm_count > 0
    assert limits.max_threads_per_sm >= 1024
    assert limits.name
    assert limits.pci_bus_id == cupy.cuda.Device().pci_bus_id.rstrip("\0")
    assert version_problem(nvrtc_version(), launch_module.driver_version()) is None

    (kernel,) = launch_module.load(compile_cuda(variant, limits.arch), variant.kernel_name)
    assert 1 <= launch_module.occupancy(kernel, 256) <= limits.max_threads_per_sm // 256
    assert launch_module.occupancy(kernel, 256, 64 * 1024) >= 1
    clusters = limits.compute_capability >= (9, 0)
    if clusters:
        assert launch_module.max_cluster_size(kernel, 256) >= 8
        assert 1 <= launch_module.active_clusters(kernel, 256, 8) <= limits.sm_count
    with pytest.raises(UnsupportedError, match="no_such_kernel"):
        launch_module.load(compile_cuda(variant, limits.arch), "no_such_kernel")

    cases = [(1, False, 0), (1, False, 64 * 1024)]
    if clusters:
        largest = launch_module.max_cluster_size(kernel, 64)
        cases += [(4, False, 0), (8, True, 0), (largest, True, 1024)]
    stream = cupy.cuda.Stream(non_blocking=True)
    for cluster, programmatic, shared_bytes in cases:
        launch = KernelLaunch(
            kernel, 16, 64, cluster=cluster, shared_bytes=shared_bytes, programmatic=programmatic
        )
        out = cupy.zeros(16, cupy.int32)
        cupy.cuda.Device().synchronize()
        parameters = Parameters(out.data.ptr, 3)
        launch.launch(ctypes.addressof(parameters), stream.ptr)
        with stream:
            stream.begin_capture()
            parameters.value = 4
            launch.launch(ctypes.addressof(parameters), stream.ptr)
            graph = stream.end_capture()
        parameters.value = 5  # neither launch may see this
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        one = 10 * cluster + 16
        assert out.tolist() == [1000 * (3 + 4 + 4) + 3 * one] * 16
