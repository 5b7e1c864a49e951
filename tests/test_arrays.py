"""Views of real NumPy arrays, of hand-made CuPy, PyTorch and CUDA objects, and of DLPack capsules.

The stand-ins have exactly the attributes that the libraries document, so none of them need be here;
the last tests repeat the essentials with the real libraries where they are installed.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import sys
import timeit
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_moe_ar import ArgumentError, Workspace, allreduce_fusion
from cupy_moe_ar.arrays import (
    CPU,
    ArrayView,
    current_stream,
    identity,
    overlap,
    stream_handle,
    view,
)
from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.types import DType

BF16, FP16, FP32, I32, U8 = (
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.INT32,
    DType.UINT8,
)
NUMPY_DTYPES = [
    (ml_dtypes.bfloat16, BF16),
    (np.float16, FP16),
    (np.float32, FP32),
    (np.int32, I32),
    (np.uint8, U8),
    (ml_dtypes.float8_e4m3fn, U8),
    (ml_dtypes.float8_e8m0fnu, U8),
    (ml_dtypes.float4_e2m1fn, U8),
    (np.uint16, None),
    (np.int8, None),
    (np.bool_, None),
    (np.float64, None),
    (np.int64, None),
    (np.complex64, None),
]


def library_class(package: str, name: str, **attributes: Any) -> type:
    """A class that calls itself `package.name`."""
    return type(name, (), {"__module__": package, **attributes})


def cupy_array(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: int
) -> Any:
    array = library_class("cupy", "ndarray")()
    array.data = SimpleNamespace(ptr=ptr)
    array.shape, array.strides = shape, strides
    array.dtype = np.dtype(dtype)
    array.itemsize = array.dtype.itemsize
    array.device = SimpleNamespace(id=device)
    return array


def jax_array(
    ptr: int,
    shape: tuple[int, ...],
    dtype: Any,
    platform: str = "gpu",
    ordinal: int = 0,
    order: tuple[int, ...] | None = None,
) -> Any:
    array = library_class("jaxlib._jax", "ArrayImpl")()
    array.unsafe_buffer_pointer = lambda: ptr
    array.shape, array.ndim, array.dtype = shape, len(shape), np.dtype(dtype)
    place = library_class("jaxlib._jax", "Device", platform=platform, local_hardware_id=ordinal)()
    array.devices = lambda: {place}
    if order is not None:
        array.format = SimpleNamespace(layout=SimpleNamespace(major_to_minor=order))
    return array


class TorchDtype:
    def __init__(self, name: str) -> None:
        self.name_ = name

    def __repr__(self) -> str:
        return f"torch.{self.name_}"


class TorchSize(tuple[int, ...]):
    """As `torch.Size`, a tuple that is not to leak into messages."""


class TorchDevice(SimpleNamespace):
    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def torch_tensor(
    ptr: int,
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    dtype: str,
    itemsize: int,
    device: str,
    index: int | None,
    base: type | None = None,
) -> Any:
    tensor = (base or library_class("torch", "Tensor"))()
    tensor.data_ptr = lambda: ptr
    tensor.shape = TorchSize(shape)
    tensor.stride = lambda: steps
    tensor.dtype = TorchDtype(dtype)
    tensor.element_size = lambda: itemsize
    tensor.device = TorchDevice(type=device, index=index)
    return tensor


def cuda_object(**interface: Any) -> Any:
    return SimpleNamespace(
        __cuda_array_interface__={
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            **interface,
        }
    )


class Capsule:
    """A DLPack capsule made byte by byte, with the memory that it points to, kept for ever."""

    all: ClassVar[list[Capsule]] = []

    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 3),
        steps: tuple[int, ...] | None = None,
        *,
        dtype: tuple[int, int, int] = (2, 32, 1),
        device: tuple[int, int] = (1, 0),
        data: int = 0x1000,
        offset: int = 0,
        version: tuple[int, int] | None = None,
        flags: int = 0,
        name: bytes | None = None,
    ) -> None:
        ndim = len(shape)
        self.shape = (ctypes.c_int64 * ndim)(*shape)
        self.steps = (ctypes.c_int64 * ndim)(*(steps or ()))
        tensor = struct.pack(
            "<QiiiBBHQQQ",
            data,
            *device,
            ndim,
            *dtype,
            ctypes.addressof(self.shape) if ndim else 0,
            0 if steps is None else ctypes.addressof(self.steps),
            offset,
        )
        if version is None:
            content = tensor + struct.pack("<QQ", 0, 0)
        else:
            content = struct.pack("<IIQQQ", *version, 0, 0, flags) + tensor
        self.name = name or (b"dltensor" if version is None else b"dltensor_versioned")
        self.memory = ctypes.create_string_buffer(content, len(content))
        self.capsule = self.new(ctypes.addressof(self.memory), self.name, None)
        self.all.append(self)


KINDS = pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=["old", "1.0", "1.3"])


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# NumPy


@pytest.mark.parametrize(("dtype", "expected"), NUMPY_DTYPES)
def test_numpy_dtypes(dtype: Any, expected: DType | None) -> None:
    array = np.zeros((3, 5), dtype)
    itemsize = array.dtype.itemsize
    assert view(array) == ArrayView(
        ptr=address(array),
        shape=(3, 5),
        strides=(5 * itemsize, itemsize),
        dtype=expected,
        device=CPU,
        readonly=False,
        source="numpy",
        itemsize=itemsize,
        dtype_name=np.dtype(dtype).name,
    )


def test_numpy_slices_keep_address_and_strides() -> None:
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    part = view(array[1::2, ::-3])
    assert part.ptr == address(array) + (1 * 10 + 9) * 4
    assert part.shape == (3, 4)
    assert part.strides == (80, -12)
    assert not part.contiguous
    assert view(array.T).strides == (4, 40)
    assert view(np.broadcast_to(array[0], (5, 10))).strides == (0, 4)


def test_numpy_readonly() -> None:
    array = np.zeros(4, np.int32)
    array.flags.writeable = False
    assert view(array).readonly
    assert view(np.broadcast_to(np.zeros(1), (4,))).readonly
    assert not view(np.zeros(4)).readonly


def test_numpy_subclass_and_no_dimensions() -> None:
    class Named(np.ndarray):
        pass

    array = np.zeros((2, 2), np.float16).view(Named)
    assert (view(array).source, view(array).ptr) == ("numpy", address(array))
    scalar = view(np.array(1.0, np.float32))
    assert (scalar.ndim, scalar.shape, scalar.nbytes, scalar.contiguous) == (0, (), 4, True)


@pytest.mark.parametrize("typestr", [">f4", ">u2"])
def test_foreign_byte_order_is_refused(typestr: str) -> None:
    for array in (np.zeros(3, typestr), cuda_object(typestr=typestr)):
        with pytest.raises(ValueError, match=f"'{typestr}'.*byte order"):
            view(array)
        with pytest.raises(ValueError, match="byte order"):  # also the second time
            view(array, dtype=FP32)


@pytest.mark.parametrize(
    "thing", [None, 3, 2.5, [1.0, 2.0], b"bytes", bytearray(8), np.float32(1), "float32", object()]
)
def test_what_is_no_array_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"expected .* got .*{type(thing).__name__}$"):
        view(thing)


# dtype=


@pytest.mark.parametrize("dtype", [BF16, "bfloat16", FP16])
@pytest.mark.parametrize("carrier", [np.uint16, np.int16, "V2"])
def test_dtype_names_what_a_carrier_holds(carrier: Any, dtype: Any) -> None:
    array = np.zeros((4, 8), carrier)
    assert view(array).dtype is None
    assert view(array, dtype=dtype) == view(array)._replace(
        dtype=DType.parse(dtype), dtype_name=DType.parse(dtype).value
    )


def test_dtype_that_agrees_changes_nothing() -> None:
    array = np.zeros(3, np.float32)
    assert view(array, dtype=FP32) == view(array, dtype="float32") == view(array)
    # FP8 arrays are bytes here and stay FP8 in messages.
    assert view(np.zeros(3, ml_dtypes.float8_e5m2), dtype=U8).dtype_name == "float8_e5m2"


@pytest.mark.parametrize(
    ("array", "dtype", "words"),
    [
        (np.zeros(3, np.uint16), FP32, "uint16 elements of 2 bytes .* float32, which has 4"),
        (np.zeros(3, np.float64), FP32, "float64 elements of 8 bytes"),
        (np.zeros(3, np.int8), BF16, "int8 elements of 1 bytes"),
        (np.zeros(3, np.float16), BF16, "holds float16 elements, not bfloat16"),
        (np.zeros(3, np.int32), FP32, "holds int32 elements, not float32"),
        (np.zeros(3, ml_dtypes.float8_e4m3fn), BF16, "holds float8_e4m3fn elements"),
        (np.zeros(3, np.uint16), "float7", "dtype must be one of"),
    ],
)
def test_dtype_that_contradicts_is_refused(array: Any, dtype: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        view(array, dtype=dtype)


# CuPy


def test_cupy_array() -> None:
    array = cupy_array(0x7F00_0000_1000, (4, 64), (256, 2), ml_dtypes.bfloat16, 3)
    # The interface must stay unread: CuPy builds a dictionary and asks for the stream there.
    type(array).__cuda_array_interface__ = property(lambda self: pytest.fail("was read"))
    expected = ArrayView(0x7F00_0000_1000, (4, 64), (256, 2), BF16, 3, False, "cupy", 2, "bfloat16")
    assert view(array) == expected
    assert not expected.contiguous


def test_identity_tells_calls_apart() -> None:
    """Whatever a checked call depends on; the same array, and another object like it, do not."""
    given: dict[str, Any] = {
        "ptr": 4096,
        "shape": (4, 64),
        "strides": (128, 2),
        "dtype": np.dtype(np.float16),
        "device": 0,
    }
    other = {"ptr": 8192, "shape": (2, 64), "strides": (256, 2), "dtype": np.dtype(np.uint16)}
    known = identity(cupy_array(*given.values()))
    assert {identity(cupy_array(*given.values())): 1}[known] == 1
    for name, value in other.items():
        assert identity(cupy_array(*{**given, name: value}.values())) != known
    rows = np.zeros((4, 64), np.float16)
    assert identity(rows) == identity(rows[:]) != identity(rows[:2])
    assert identity(rows) != identity(rows.view(np.uint16))


def test_cupy_subclass_of_another_package() -> None:
    array = cupy_array(64, (2,), (4,), np.float32, 0)
    array.__class__ = type("Mine", (type(array),), {"__module__": "user.code"})
    assert view(array).source == "cupy"


def test_other_things_of_cupy_are_no_arrays() -> None:
    for package, name in (("cupyx.scipy.sparse", "csr_matrix"), ("cupy_like", "ndarray")):
        with pytest.raises(TypeError, match=f"got {package}.{name}"):
            view(library_class(package, name)())


# PyTorch


@pytest.mark.parametrize(
    ("name", "itemsize", "expected"),
    [
        ("bfloat16", 2, BF16),
        ("float16", 2, FP16),
        ("float32", 4, FP32),
        ("int32", 4, I32),
        ("uint8", 1, U8),
        ("float8_e4m3fn", 1, U8),
        ("float8_e5m2", 1, U8),
        ("float4_e2m1fn_x2", 1, U8),
        ("int64", 8, None),
        ("uint16", 2, None),
        ("bool", 1, None),
    ],
)
def test_torch_tensor(name: str, itemsize: int, expected: DType | None) -> None:
    tensor = torch_tensor(0x5000, (3, 1, 8), (32, 8, 2), name, itemsize, "cuda", 5)
    found = view(tensor)
    strides = (32 * itemsize, 8 * itemsize, 2 * itemsize)
    assert found == ArrayView(
        0x5000, (3, 1, 8), strides, expected, 5, False, "torch", itemsize, name
    )
    assert type(found.shape) is tuple


def test_torch_devices() -> None:
    assert view(torch_tensor(64, (2,), (1,), "float32", 4, "cpu", None)).device == CPU
    assert view(torch_tensor(64, (2,), (1,), "float32", 4, "cuda", 0)).device == 0
    for device, index, words in (("meta", None, "'meta'"), ("xpu", 1, "'xpu:1'")):
        with pytest.raises(ValueError, match=f"on device {words}; CPU and CUDA"):
            view(torch_tensor(64, (2,), (1,), "float32", 4, device, index))


def test_torch_subclasses_are_tensors() -> None:
    parameter = type(
        "Weight", (library_class("torch", "Tensor"),), {"__module__": "model.parameter"}
    )
    assert view(torch_tensor(64, (2,), (1,), "bfloat16", 2, "cuda", 1, parameter)).dtype is BF16


def test_torch_tensor_without_plain_storage() -> None:
    def refuse() -> None:
        raise RuntimeError("sparse tensors do not have strides")

    tensor = torch_tensor(64, (2,), (1,), "float32", 4, "cuda", 0)
    tensor.stride = refuse
    with pytest.raises(ValueError, match="plain strided elements: sparse tensors"):
        view(tensor)


# JAX


@pytest.mark.parametrize(
    ("dtype", "expected"), [(ml_dtypes.bfloat16, BF16), (np.int32, I32), (np.int64, None)]
)
def test_jax_array(dtype: Any, expected: DType | None) -> None:
    array = jax_array(0x7000, (3, 8), dtype, "gpu", 4, (0, 1))
    # JAX would take stream -1 for one to wait on.
    type(array).__dlpack__ = lambda self, **_: pytest.fail("was asked")
    size = np.dtype(dtype).itemsize
    name = np.dtype(dtype).name
    assert view(array) == ArrayView(
        0x7000, (3, 8), (8 * size, size), expected, 4, True, "jax", size, name
    )
    assert view(jax_array(64, (2,), dtype, "cpu")).device == CPU


def test_jax_arrays_that_are_no_plain_memory() -> None:
    with pytest.raises(ValueError, match=r"laid out in the order \(1, 0\)"):
        view(jax_array(64, (3, 8), np.float32, order=(1, 0)))
    with pytest.raises(ValueError, match="CPU and CUDA are supported"):
        view(jax_array(64, (3, 8), np.float32, "tpu"))
    sharded = jax_array(64, (3, 8), np.float32)
    sharded.devices = lambda: {1, 2}
    with pytest.raises(ValueError, match="no buffer on one device: too many values"):
        view(sharded)


# __cuda_array_interface__


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


@pytest.mark.usefixtures("no_cupy")
def test_cuda_array_interface() -> None:
    assert view(cuda_object()) == ArrayView(
        0x1000, (2, 3), (12, 4), FP32, 0, False, "cuda_array_interface", 4, "float32"
    )
    assert view(cuda_object(strides=None)) == view(cuda_object())
    assert view(cuda_object(strides=(4, 8))).strides == (4, 8)
    assert view(cuda_object(data=(0x1000, True))).readonly
    assert view(cuda_object(shape=(), strides=None)).strides == ()
    assert view(cuda_object(shape=(0, 3), data=(None, False))).ptr == 0


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize(
    ("typestr", "expected"),
    [("<f2", FP16), ("<f4", FP32), ("<i4", I32), ("|u1", U8), ("<V2", None), ("<u2", None)],
)
def test_cuda_array_interface_types(typestr: str, expected: DType | None) -> None:
    found = view(cuda_object(typestr=typestr))
    assert (found.dtype, found.itemsize) == (expected, int(typestr[-1]))
    assert found.strides == (3 * found.itemsize, found.itemsize)


@pytest.mark.usefixtures("no_cupy")
def test_cuda_array_interface_of_unnamed_bfloat16() -> None:
    assert view(cuda_object(typestr="<V2"), dtype="bfloat16").dtype is BF16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": object()}, "masked"),
        ({"strides": (4,)}, r"malformed: shape \(2, 3\), strides \(4,\)"),
        ({"typestr": "nonsense"}, "malformed"),
        ({"data": 5}, "malformed"),
        ({"shape": None}, "malformed"),
    ],
)
def test_cuda_array_interface_faults(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"__cuda_array_interface__ of .*{words}"):
        view(cuda_object(**change))
    incomplete = cuda_object()
    del incomplete.__cuda_array_interface__["shape"]
    with pytest.raises(ValueError, match="malformed: KeyError"):
        view(incomplete)


def test_cuda_array_interface_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDevice=lambda: 6,
        pointerGetAttributes=lambda ptr: SimpleNamespace(device={0x1000: 2}.get(ptr, -2)),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert view(cuda_object()).device == 2
    assert view(cuda_object(shape=(0,), data=(0, False))).device == 6
    with pytest.raises(ValueError, match="is no CUDA memory"):
        view(cuda_object(data=(0x2000, False)))
    knows = cuda_object(data=(0x2000, False))
    knows.__dlpack_device__ = lambda: (2, 7)
    assert view(knows).device == 7


# DLPack


@KINDS
def test_capsule(version: Any) -> None:
    made = Capsule((2, 3, 4), (100, 10, 2), device=(2, 5), offset=2**33 + 32, version=version)
    expected = ArrayView(
        2**33 + 0x1020, (2, 3, 4), (400, 40, 8), FP32, 5, False, "dlpack", 4, "float32"
    )
    assert view(made.capsule) == expected
    assert view(made.capsule) == expected  # it was not consumed
    assert ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(made.capsule), made.name)


@KINDS
def test_capsule_without_strides_is_in_c_order(version: Any) -> None:
    found = view(Capsule((2, 3, 4), None, version=version).capsule)
    assert (found.strides, found.device, found.contiguous) == ((48, 16, 4), CPU, True)
    assert view(Capsule((), None, version=version).capsule).shape == ()
    assert view(Capsule((0, 3), None, data=0, version=version).capsule).ptr == 0


@KINDS
@pytest.mark.parametrize(
    ("dtype", "expected", "itemsize", "name"),
    [
        ((4, 16, 1), BF16, 2, "bfloat16"),
        ((2, 16, 1), FP16, 2, "float16"),
        ((2, 32, 1), FP32, 4, "float32"),
        ((0, 32, 1), I32, 4, "int32"),
        ((1, 8, 1), U8, 1, "uint8"),
        ((7, 8, 1), U8, 1, "float8_e3m4"),
        ((10, 8, 1), U8, 1, "float8_e4m3fn"),
        ((12, 8, 1), U8, 1, "float8_e5m2"),
        ((14, 8, 1), U8, 1, "float8_e8m0fnu"),
        ((17, 8, 1), U8, 1, "float4_e2m1fn"),
        ((17, 4, 2), U8, 1, "float4_e2m1fn_x2"),
        ((2, 64, 1), None, 8, "float64"),
        ((0, 8, 1), None, 1, "int8"),
        ((1, 32, 1), None, 4, "uint32"),
        ((6, 8, 1), None, 1, "bool"),
        ((5, 64, 1), None, 8, "complex64"),
        ((2, 16, 2), None, 4, "float16_x2"),
        ((10, 8, 2), None, 2, "float8_e4m3fn_x2"),
        ((99, 16, 1), None, 2, "dlpack99_16"),
    ],
)
def test_capsule_types(
    version: Any, dtype: Any, expected: DType | None, itemsize: int, name: str
) -> None:
    found = view(Capsule((4, 6), (6, 1), dtype=dtype, version=version).capsule)
    assert (found.dtype, found.itemsize, found.dtype_name) == (expected, itemsize, name)
    assert (found.shape, found.strides) == ((4, 6), (6 * itemsize, itemsize))


@KINDS
def test_packed_4_bit_elements_become_bytes(version: Any) -> None:
    fp4 = (17, 4, 1)
    found = view(Capsule((4, 6), (16, 1), dtype=fp4, version=version).capsule)
    assert (found.dtype, found.shape, found.strides) == (U8, (4, 3), (8, 1))
    assert view(Capsule((4, 6), None, dtype=fp4, version=version).capsule).strides == (3, 1)
    for shape, steps in (((4, 5), (6, 1)), ((4, 6), (7, 1)), ((4, 6), (12, 2)), ((), ())):
        with pytest.raises(ValueError, match="do not pair up into bytes"):
            view(Capsule(shape, steps, dtype=fp4, version=version).capsule)


def test_padded_4_bit_elements_are_bytes_already() -> None:
    made = Capsule((4, 6), (6, 1), dtype=(17, 4, 1), version=(1, 1), flags=4)
    found = view(made.capsule)
    assert (found.dtype, found.shape, found.strides) == (U8, (4, 6), (6, 1))


def test_elements_of_broken_bytes_are_refused() -> None:
    for dtype in ((0, 4, 1), (15, 6, 1), (2, 0, 1)):
        with pytest.raises(ValueError, match="do not fill whole bytes"):
            view(Capsule(dtype=dtype).capsule)


@KINDS
@pytest.mark.parametrize(
    ("device", "words"),
    [((10, 0), "ROCm"), ((13, 0), "managed"), ((3, 0), "pinned"), ((77, 1), "another device")],
)
def test_capsule_of_another_device(version: Any, device: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.* \(DLPack device type {device[0]}\)"):
        view(Capsule(device=device, version=version).capsule)


def test_capsule_flags() -> None:
    assert view(Capsule(version=(1, 0), flags=1).capsule).readonly
    assert not view(Capsule(version=(1, 0), flags=0).capsule).readonly
    for flags in (2, 3):
        with pytest.raises(ValueError, match="made a copy"):
            view(Capsule(version=(1, 0), flags=flags).capsule)


def test_capsule_of_an_unknown_version_or_name() -> None:
    with pytest.raises(ValueError, match=r"DLPack version 2\.1 is not supported"):
        view(Capsule(version=(2, 1)).capsule)
    for name in (b"used_dltensor", b"used_dltensor_versioned", b"numpy.multiarray"):
        with pytest.raises(ValueError, match="no DLPack capsule or was consumed"):
            view(Capsule(name=name).capsule)


def test_consumed_capsule() -> None:
    capsule = np.zeros(3, np.float32).__dlpack__()
    view(capsule)
    consumer = np.from_dlpack(
        SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
    )
    assert consumer.shape == (3,)
    with pytest.raises(ValueError, match="consumed already"):
        view(capsule)


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}], ids=["old", "versioned"])
def test_capsules_of_numpy(options: dict[str, Any]) -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2]
    found = view(array.__dlpack__(**options))
    assert found == view(array)._replace(source="dlpack")
    if options:
        array.flags.writeable = False
        assert view(array.__dlpack__(**options)).readonly


class Exporter:
    """An array library that speaks nothing but DLPack."""

    def __init__(self, made: Capsule, device: tuple[int, int], newest: str) -> None:
        self.made, self.device, self.newest = made, device, newest
        self.calls: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        known = {
            "copy": {"stream", "max_version", "copy"},
            "max_version": {"stream", "max_version"},
        }
        if not options.keys() <= known.get(self.newest, {"stream"}):
            raise TypeError("unexpected keyword argument")
        self.calls.append(options)
        return self.made.capsule


@pytest.mark.parametrize(
    ("newest", "options"),
    [
        ("copy", {"max_version": (1, 0), "copy": False}),
        ("max_version", {"max_version": (1, 0)}),
        ("stream", {}),
    ],
)
@pytest.mark.parametrize("device", [(1, 0), (2, 4)], ids=["cpu", "cuda"])
def test_exporters_old_and_new(newest: str, options: Any, device: tuple[int, int]) -> None:
    version = None if newest == "stream" else (1, 0)
    exporter = Exporter(Capsule(device=device, version=version), device, newest)
    found = view(exporter)
    assert (found.source, found.device) == ("dlpack", 4 if device[0] == 2 else CPU)
    # -1 forbids the exporter to synchronise; on the CPU there is no stream to name.
    stream = {"stream": -1} if device[0] == 2 else {}
    assert exporter.calls == [{**options, **stream}]


def test_exporter_on_another_device_is_not_asked() -> None:
    exporter = Exporter(Capsule(), (10, 0), "copy")
    with pytest.raises(ValueError, match="ROCm"):
        view(exporter)
    assert exporter.calls == []


def test_exporters_that_cannot() -> None:
    def refuse(**_: Any) -> None:
        raise BufferError("needs a copy")

    refusing = SimpleNamespace(__dlpack__=refuse, __dlpack_device__=lambda: (1, 0))
    with pytest.raises(ValueError, match="cannot be shared by DLPack: needs a copy"):
        view(refusing)
    with pytest.raises(TypeError, match="no __dlpack_device__"):
        view(SimpleNamespace(__dlpack__=refuse))


def test_dlpack_names_what_the_other_interface_cannot() -> None:
    array = cuda_object(typestr="<V2", data=(0x9000, False))
    made = Capsule(dtype=(4, 16, 1), device=(2, 1), data=0x9000)
    array.__dlpack__ = lambda **_: made.capsule
    array.__dlpack_device__ = lambda: (2, 1)
    assert (view(array).dtype, view(array).source) == (BF16, "dlpack")
    array.__cuda_array_interface__["typestr"] = "<f2"
    assert (view(array).dtype, view(array).source) == (FP16, "cuda_array_interface")


def test_view_borrows() -> None:
    class Owner(np.ndarray):
        pass

    array = np.zeros(8, np.float32).view(Owner)
    gone = weakref.ref(array)
    through = SimpleNamespace(
        __dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__
    )
    views = [view(array), view(through), view(array.__dlpack__(max_version=(1, 0)))]
    del array, through
    gc.collect()
    assert gone() is None
    assert len({found.ptr for found in views}) == 1


# Geometry

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4)


@given(shapes, st.data())
def test_geometry_agrees_with_numpy(shape: list[int], data: st.DataObject) -> None:
    base = np.zeros([3 * length for length in shape], np.int32)
    array: Any = base.transpose(data.draw(st.permutations(range(len(shape)))))
    steps = data.draw(st.lists(st.sampled_from([1, 2, 3, -1, -2]), min_size=base.ndim))
    array = array[(..., *[slice(None, None, step) for step in steps[: base.ndim]])]
    if array.ndim and data.draw(st.booleans()):
        array = array[:1]
    found = view(array)
    assert found.contiguous == array.flags.c_contiguous
    assert found.nbytes == array.nbytes
    assert found.ndim == array.ndim
    first, end = found.extent
    low, high = np.lib.array_utils.byte_bounds(array)
    assert (first, end) == ((low, high) if array.size else (found.ptr, found.ptr))
    if found.contiguous:
        assert end - first == found.nbytes


def test_dimensions_of_length_1_do_not_count() -> None:
    plain = view(np.zeros((4, 8), np.float16))
    assert plain._replace(shape=(4, 1, 8), strides=(16, 999, 2)).contiguous
    assert plain._replace(shape=(1, 8), strides=(-7, 2)).contiguous
    assert not plain._replace(shape=(4, 8), strides=(32, 2)).contiguous
    assert not plain._replace(shape=(4, 8), strides=(0, 2)).contiguous
    assert not plain._replace(shape=(4, 8), strides=(2, 8)).contiguous
    assert plain._replace(shape=(4, 0, 8), strides=(5, 5, 5)).contiguous


def test_overlap() -> None:
    memory = np.zeros(64, np.uint8)
    for a, b, expected in (
        (memory[:16], memory[16:], False),
        (memory[16:], memory[:16], False),
        (memory[:17], memory[16:], True),
        (memory, memory[30:31], True),
        (memory[30:31], memory, True),
        (memory[::-1], memory[63:], True),
        (memory[15::-1], memory[16:], False),
        (memory[0:32:2], memory[1:32:2], True),  # by extent, although no byte is shared
        (memory[8:8], memory, False),
        (memory, memory[8:8], False),
        (memory, memory, True),
    ):
        assert overlap(view(a), view(b)) is expected, (view(a).extent, view(b).extent)


def test_views_are_frozen() -> None:
    with pytest.raises(AttributeError):
        view(np.zeros(3)).ptr = 0  # type: ignore[misc]


# Streams


def cupy_stream(ptr: int) -> Any:
    base = library_class("cupy.cuda.stream", "_BaseStream")
    stream = type("Stream", (base,), {"__module__": "cupy.cuda.stream"})()
    stream.ptr = ptr
    return stream


def torch_stream(handle: int) -> Any:
    stream = library_class("torch.cuda.streams", "Stream")()
    stream.cuda_stream = handle
    return stream


def int_stream(package: str, name: str, handle: int) -> Any:
    return library_class(package, name, __int__=lambda self: handle)()


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (0x7F00_1234_5678, 0x7F00_1234_5678),
        (np.uint64(17), 17),
        (cupy_stream(0), 0),
        (cupy_stream(0xABC0), 0xABC0),
        (torch_stream(0xDEF0), 0xDEF0),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 0x1110)), 0x1110),
        (SimpleNamespace(__cuda_stream__=(0, 0x2220)), 0x2220),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 5), cuda_stream=6), 5),
        (int_stream("numba.cuda.cudadrv.driver", "Stream", 0x3330), 0x3330),
        (int_stream("cuda.bindings.driver", "CUstream", 0x4440), 0x4440),
        (int_stream("cuda.bindings.runtime", "cudaStream_t", 0x5550), 0x5550),
    ],
)
def test_stream_handle(stream: Any, handle: int) -> None:
    found = stream_handle(stream)
    assert found == handle
    assert type(found) is int


@pytest.mark.parametrize(
    "stream",
    [None, True, "0", 1.0, SimpleNamespace(ptr=5), object(), int_stream("my", "Stream", 5)],
)
def test_what_is_no_stream_is_a_type_error(stream: Any) -> None:
    with pytest.raises(TypeError, match=rf"stream must be .* got .*{type(stream).__name__}$"):
        stream_handle(stream)


def test_stream_faults() -> None:
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        stream_handle(-1)
    with pytest.raises(ValueError, match="version 3; 0 is supported"):
        stream_handle(SimpleNamespace(__cuda_stream__=lambda: (3, 5)))


def test_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cupy = cupy_array(64, (2,), (4,), np.float32, 3)
    on_torch = torch_tensor(64, (2,), (1,), "float32", 4, "cuda", 1)
    cupy_streams = {0: cupy_stream(100), 3: cupy_stream(103)}
    torch_streams = {0: torch_stream(200), 1: torch_stream(201)}
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=cupy_streams.__getitem__))
    torch = SimpleNamespace(
        cuda=SimpleNamespace(current_stream=lambda device: torch_streams[device.index])
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_stream(on_cupy) == 103
    assert current_stream(on_torch) == 201
    assert current_stream(torch_tensor(64, (2,), (1,), "float32", 4, "cpu", None)) is None
    on_jax = jax_array(64, (2,), np.float32)
    for other in (np.zeros(2), cuda_object(), Capsule(device=(2, 0)).capsule, on_jax, None):
        assert current_stream(other) is None
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.delitem(sys.modules, "torch")
    assert current_stream(on_cupy) is None
    assert current_stream(on_torch) is None


# The module as a whole


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, numpy, cupy_moe_ar.arrays as a\n"
        "a.view(numpy.zeros(3)); a.current_stream(numpy.zeros(3))\n"
        "assert not {'torch', 'cupy', 'jax', 'mpi4py'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_view_is_fast() -> None:
    # 0.7 and 2 us on a slow machine; reading the interfaces' dictionaries costs 5 and more.
    arrays = {
        "cupy": cupy_array(64, (4, 7168), (14336, 2), ml_dtypes.bfloat16, 0),
        "numpy": np.zeros((4, 7168), ml_dtypes.bfloat16),
    }
    for name, array in arrays.items():
        names = {"view": view, "array": array}
        seconds = min(timeit.repeat("view(array)", number=200, repeat=20, globals=names)) / 200
        assert seconds < 10e-6, name


# In and out of an operation


def alone(dtype: str = "bfloat16", backend: str = "cpu", **options: Any) -> Workspace:
    """A workspace of one rank: sums are copies, and arrays go through all the same."""
    (group,) = ThreadGroup.create(1)
    return Workspace(group, max_token_num=4, hidden_dim=64, dtype=dtype, backend=backend,
                     operations=["allreduce"], **options)  # fmt: skip


def inputs() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    dtype = ml_dtypes.bfloat16
    return {
        "allreduce_in": rng.standard_normal((4, 64)).astype(dtype),
        "residual_in": rng.standard_normal((4, 64)).astype(dtype),
        "rms_gamma": rng.standard_normal(64).astype(np.float32),
    }


def outputs() -> dict[str, Any]:
    names = ("allreduce_out", "residual_out", "norm_out")
    return {name: np.zeros((4, 64), ml_dtypes.bfloat16) for name in names}


def plain() -> dict[str, bytes]:
    """What NumPy arrays give."""
    arrays = outputs()
    with alone() as workspace:
        allreduce_fusion(workspace=workspace, **inputs(), **arrays)
    return {name: array.tobytes() for name, array in arrays.items()}


def capsule_of(
    array: Any, version: Any, *, flags: int = 0, kind: int = 4, device: tuple[int, int] = (1, 0)
) -> Any:
    """A capsule of an array; its 16-bit elements are said to be of a kind."""
    dtype = (kind, 16, 1) if array.dtype.itemsize == 2 else (2, 32, 1)
    data = address(array) if device[0] == 1 else array.data.ptr
    made = Capsule(
        array.shape, None, dtype=dtype, device=device, data=data, version=version, flags=flags
    )
    return made.capsule


@KINDS
@pytest.mark.parametrize("wrapped", [False, True], ids=["capsule", "exporter"])
def test_an_operation_on_capsules(version: Any, wrapped: bool) -> None:
    host = inputs() | outputs()
    given = {name: capsule_of(array, version) for name, array in host.items()}
    if wrapped:
        given = {
            name: SimpleNamespace(
                __dlpack__=lambda capsule=capsule, **_: capsule, __dlpack_device__=lambda: (1, 0)
            )
            for name, capsule in given.items()
        }
    with alone() as workspace:
        for _ in range(2):  # the second call is remembered
            allreduce_fusion(workspace=workspace, **given)
    assert {name: host[name].tobytes() for name in outputs()} == plain()


def test_what_must_not_be_written_is_no_output() -> None:
    host = inputs() | outputs()
    norm = host.pop("norm_out")
    with alone() as workspace:
        for output in (
            capsule_of(norm, (1, 0), flags=1),
            jax_array(address(norm), norm.shape, norm.dtype, "cpu"),
        ):
            with pytest.raises(ArgumentError, match="norm_out must be writable; got a read-only"):
                allreduce_fusion(workspace=workspace, **host, norm_out=output)


def test_untyped_capsules_are_taken_for_the_activations() -> None:
    host, uint = inputs() | outputs(), 1
    given = {name: capsule_of(array, (1, 0), kind=uint) for name, array in host.items()}
    with alone() as workspace:
        allreduce_fusion(workspace=workspace, **given, dtype="bfloat16")
    assert {name: host[name].tobytes() for name in outputs()} == plain()


# The real libraries


def to_torch(array: Any, device: str) -> Any:
    torch = pytest.importorskip("torch")
    if array.dtype.itemsize == 4:
        return torch.from_numpy(array).to(device)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)


def bytes_of_torch(tensor: Any) -> bytes:
    found: bytes = tensor.view(pytest.importorskip("torch").int16).cpu().numpy().tobytes()
    return found


@pytest.mark.filterwarnings("ignore")
def test_an_operation_on_torch_tensors_on_the_cpu() -> None:
    given = {name: to_torch(x, "cpu") for name, x in (inputs() | outputs()).items()}
    with alone() as workspace:
        allreduce_fusion(workspace=workspace, **given)
    assert {name: bytes_of_torch(given[name]) for name in outputs()} == plain()


@pytest.mark.filterwarnings("ignore")
def test_an_operation_on_jax_arrays_on_the_cpu() -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    given = {name: jax.block_until_ready(jax.device_put(x, cpu)) for name, x in inputs().items()}
    assert view(given["allreduce_in"]) == ArrayView(
        given["allreduce_in"].unsafe_buffer_pointer(), (4, 64), (128, 2), BF16, CPU, True, "jax",
        2, "bfloat16",
    )  # fmt: skip
    written = outputs()
    with alone() as workspace:
        allreduce_fusion(workspace=workspace, **given, **written)
        with pytest.raises(ArgumentError, match="norm_out must be writable"):
            allreduce_fusion(workspace=workspace, **given, norm_out=given["residual_in"])
    expected = plain()
    assert {name: written[name].tobytes() for name in outputs()} == expected
    assert bytes_by_jax(written["norm_out"]) == expected["norm_out"]


def bytes_by_jax(array: Any) -> bytes:
    """What JAX makes of an output, as docs/arrays.md says."""
    jax = pytest.importorskip("jax")
    bits = jax.dlpack.from_dlpack(array.view(np.uint16))
    result = jax.block_until_ready(jax.lax.bitcast_convert_type(bits, "bfloat16"))
    assert result.dtype == ml_dtypes.bfloat16
    return np.asarray(result).tobytes()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["cupy", "torch", "numba", "jax", "capsule", "versioned"])
def test_an_operation_on_arrays_of(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a library go in and, but for JAX's, out; its own stream where it has one."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    host = inputs() | outputs()
    with cupy.cuda.Device(0), alone(backend="cuda", device=0) as workspace:
        stream: Any = cupy.cuda.Stream(non_blocking=True)
        on_gpu = {name: cupy.asarray(array) for name, array in host.items()}
        cupy.cuda.Device(0).synchronize()
        given: dict[str, Any] = dict(on_gpu)
        if library == "torch":
            torch = pytest.importorskip("torch")
            if not torch.cuda.is_available():
                pytest.skip("this PyTorch has no CUDA")
            given = {name: to_torch(array, "cuda:0") for name, array in host.items()}
            stream = torch.cuda.Stream(0)
        elif library == "numba":
            cuda = pytest.importorskip("numba.cuda")
            if not cuda.is_available():
                pytest.skip("this Numba has no CUDA")
            given = {
                name: cuda.to_device(x.view(np.uint16) if x.dtype.itemsize == 2 else x)
                for name, x in host.items()
            }
            stream = cuda.stream()
        elif library == "jax":
            jax = pytest.importorskip("jax")
            try:
                place = jax.devices("gpu")[0]
            except RuntimeError as error:
                pytest.skip(f"this JAX has no GPU: {error}")
            given |= {name: jax.device_put(host[name], place) for name in inputs()}
            jax.block_until_ready([given[name] for name in inputs()])
        elif library != "cupy":
            version = (1, 0) if library == "versioned" else None
            given = {
                name: capsule_of(array, version, device=(2, 0)) for name, array in on_gpu.items()
            }
        cupy.cuda.Device(0).synchronize()
        allreduce_fusion(workspace=workspace, **given, stream=stream)
        cupy.cuda.Device(0).synchronize()
        found = {}
        for name in outputs():
            if library == "torch":
                found[name] = bytes_of_torch(given[name])
            elif library == "numba":
                found[name] = given[name].copy_to_host().tobytes()
            else:
                found[name] = on_gpu[name].get().tobytes()
        if library == "jax":
            assert bytes_by_jax(on_gpu["norm_out"]) == found["norm_out"]
    assert found == plain()


@pytest.mark.gpu
def test_real_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros((4, 64), ml_dtypes.bfloat16)[1:, ::2]
    found = view(array)
    assert found == ArrayView(
        array.data.ptr, (3, 32), (128, 4), BF16, array.device.id, False, "cupy", 2, "bfloat16"
    )
    plain = cupy.zeros((4, 64), np.float32)
    for source, other in (
        ("dlpack", plain.__dlpack__(stream=-1)),
        ("cuda_array_interface", cuda_object(**plain.__cuda_array_interface__)),
    ):
        assert view(other) == view(plain)._replace(source=source)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert current_stream(array) == stream_handle(stream) == stream.ptr != 0
    assert current_stream(array) == 0


@pytest.mark.gpu
def test_real_torch_on_cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    tensor = torch.zeros((4, 64), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    found = view(tensor)
    assert found == ArrayView(
        tensor.data_ptr(), (4, 64), (128, 2), BF16, tensor.device.index, False, "torch", 2,
        "bfloat16",
    )  # fmt: skip
    assert view(tensor.detach().__dlpack__(stream=-1)) == found._replace(source="dlpack")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream(tensor) == stream_handle(stream) == stream.cuda_stream != 0
    assert current_stream(tensor) == 0


def test_real_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 64), dtype=torch.bfloat16).t()
    assert view(tensor) == ArrayView(
        tensor.data_ptr(), (64, 4), (2, 128), BF16, CPU, False, "torch", 2, "bfloat16"
    )
    assert view(torch.zeros(4, dtype=torch.float8_e4m3fn)).dtype is U8
    with pytest.raises(ValueError, match="'meta'"):
        view(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="plain strided"):
        view(torch.zeros((4, 4)).to_sparse())
