"""Views of arrays of any library: address, shape, strides, element type and device.

`view` reads NumPy, CuPy, PyTorch and JAX arrays by their own attributes and everything else, such
as Numba's, through `__cuda_array_interface__` or DLPack. It imports no array library but NumPy,
copies nothing and synchronises nothing. A view borrows: it is a bundle of numbers that is valid
while the caller keeps the array (or the DLPack capsule) that it was made from.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_moe_ar.types import DType

__all__ = [
    "CPU",
    "ArrayView",
    "current_stream",
    "identity",
    "overlap",
    "stream_handle",
    "view",
]

CPU = -1
"""`ArrayView.device` of host memory."""


class ArrayView(NamedTuple):
    """Where the elements of an array lie and how to read them; owns nothing.

    A named tuple since every array of every call becomes one: a frozen dataclass costs 4 times
    as much to build (1.2 against 0.3 us).

    Attributes:
        ptr: Address of element (0, 0, ...).
        shape: Length of each dimension, in elements.
        strides: Distance between neighbours along each dimension, in bytes; may be 0 or negative.
        dtype: Element type; None where no `DType` names it. FP8 and FP4 are UINT8.
        device: CUDA ordinal, or `CPU`.
        readonly: Whether the owner forbids writing. JAX arrays always do.
        source: How it was read: "numpy", "cupy", "torch", "jax", "cuda_array_interface" or
            "dlpack".
        itemsize: Bytes of one element, also where `dtype` is None.
        dtype_name: Name of the element type in the array's own library, for messages.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    device: int
    readonly: bool
    source: str
    itemsize: int
    dtype_name: str

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; the length of `extent` when the array is contiguous."""
        return math.prod(self.shape) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps; dimensions of length 1 do not count."""
        expected = self.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length == 0:
                return True
            if length != 1:
                if stride != expected:
                    return 0 in self.shape
                expected *= length
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """Address of the first byte and of the byte past the last one; equal when empty."""
        first = last = self.ptr
        for length, stride in zip(self.shape, self.strides, strict=True):
            if length == 0:
                return self.ptr, self.ptr
            reach = (length - 1) * stride
            if reach < 0:
                first += reach
            else:
                last += reach
        return first, last + self.itemsize


def view(obj: Any, *, dtype: DType | str | None = None) -> ArrayView:
    """Describe an array without copying it or waiting for it.

    Args:
        obj: A NumPy, CuPy, PyTorch or JAX array, an object with `__cuda_array_interface__` or
            `__dlpack__`, or a DLPack capsule, which stays usable. The memory is borrowed: keep
            `obj` alive for as long as the view, or a launch that was given it, is in use. A JAX
            array must be ready (`block_until_ready`).
        dtype: What the elements are, where the array's own type is none of `DType`, such as a
            uint16 array that holds bfloat16.

    Returns:
        The view. Its `dtype` is None where neither the array nor `dtype` names one.

    Raises:
        TypeError: `obj` is no array.
        ValueError: It is on a device that is neither CPU nor CUDA, is not made of plain strided
            elements, cannot be shared without a copy, or `dtype` contradicts it.
    """
    found = _reader(obj.__class__)(obj)
    if dtype is None or dtype is found.dtype:
        return found
    return _retyped(found, DType.parse(dtype))


def identity(obj: Any) -> tuple[Any, ...]:
    """Return what of an array a checked call depends on: address, shape, strides, type; hashable.

    Raises:
        TypeError: As `view`, and so ValueError.
    """
    if _reader(obj.__class__) is _read_cupy:  # in half of the time of a view
        return obj.data.ptr, obj.shape, obj.strides, obj.dtype
    found = view(obj)
    return found[:3] + found[4:6] + found[8:]


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether the byte extents of two views share a byte; empty arrays share none.

    Strided arrays that interleave without touching count as overlapping.
    """
    a_first, a_end = a.extent
    b_first, b_end = b.extent
    return max(a_first, b_first) < min(a_end, b_end)


def current_stream(obj: Any) -> int | None:
    """Return the handle of the CUDA stream that the array's library works on now.

    Args:
        obj: Any object. A CuPy array gives CuPy's current stream and a PyTorch CUDA tensor
            PyTorch's, each on the array's device.

    Returns:
        A `cudaStream_t` as an integer (0 is the default stream), or None for any other object.
    """
    reader = _reader(obj.__class__)
    if reader is _read_cupy and "cupy" in sys.modules:
        return int(sys.modules["cupy"].cuda.get_current_stream(obj.device.id).ptr)
    if reader is _read_torch and obj.device.type == "cuda" and "torch" in sys.modules:
        return int(sys.modules["torch"].cuda.current_stream(obj.device).cuda_stream)
    return None


def stream_handle(stream: Any) -> int:
    """Return the `cudaStream_t` of a stream as an integer.

    Args:
        stream: An integer handle, a stream of CuPy, PyTorch, Numba or cuda-bindings, or an object
            with `__cuda_stream__`.

    Raises:
        TypeError: It is none of these.
        ValueError: The handle is negative, or `__cuda_stream__` speaks an unknown version.
    """
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        handle = int(stream)
    elif (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        # A method in the published protocol, an attribute in its first drafts.
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError(
                f"__cuda_stream__ of {_type_name(stream)} has version {version}; 0 is supported"
            )
    elif hasattr(stream, "cuda_stream"):
        handle = stream.cuda_stream
    elif _inherits(type(stream), "cupy", "Stream", "_BaseStream", "ExternalStream"):
        handle = stream.ptr
    elif _inherits(type(stream), "numba", "Stream") or _inherits(
        type(stream), "cuda", "CUstream", "cudaStream_t"
    ):
        handle = int(stream)
    else:
        raise TypeError(
            "stream must be a CuPy, PyTorch or Numba stream, an object with __cuda_stream__ or an "
            f"integer handle; got {_type_name(stream)}"
        )
    if handle < 0:
        raise ValueError(f"stream handle must not be negative; got {handle}")
    return int(handle)


# Element types: (DType or None, bytes, name).
_Element = tuple[DType | None, int, str]


def _named_element(name: str, itemsize: int) -> _Element:
    # FP8 and FP4 (one or two a byte) travel as bytes: no library agrees on more.
    if itemsize == 1 and name.startswith(("float8_", "float4_")):
        return DType.UINT8, itemsize, name
    try:
        return DType(name), itemsize, name
    except ValueError:
        return None, itemsize, name


@functools.lru_cache(maxsize=256)
def _element(dtype: Any, itemsize: int) -> _Element:
    """Element of a NumPy dtype (CuPy and ml_dtypes use those) or a PyTorch one."""
    if isinstance(dtype, np.dtype):
        if not dtype.isnative:
            raise ValueError(f"elements of type {dtype.str!r} are not in this machine's byte order")
        return _named_element(dtype.name, itemsize)
    return _named_element(str(dtype).rpartition(".")[2], itemsize)


def _retyped(found: ArrayView, dtype: DType) -> ArrayView:
    if found.dtype not in (None, dtype):
        raise ValueError(f"the array holds {found.dtype_name} elements, not {dtype.value}")
    if found.itemsize != dtype.itemsize:
        raise ValueError(
            f"{found.dtype_name} elements of {found.itemsize} bytes cannot be taken for "
            f"{dtype.value}, which has {dtype.itemsize}"
        )
    return found._replace(dtype=dtype, dtype_name=dtype.value)


# Readers, one for each kind of object.


@functools.lru_cache(maxsize=256)
def _reader(kind: type) -> Callable[[Any], ArrayView]:
    if issubclass(kind, np.ndarray):
        return _read_numpy
    if _inherits(kind, "cupy", "ndarray"):
        return _read_cupy
    if _inherits(kind, "torch", "Tensor"):
        return _read_torch
    if _inherits(kind, "jaxlib", "ArrayImpl"):
        return _read_jax
    if kind.__name__ == "PyCapsule":
        return _read_capsule
    return _read_interface


def _inherits(kind: type, package: str, *names: str) -> bool:
    """Whether a class or one of its bases has one of `names` and comes from `package`."""
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] == package
        for base in kind.__mro__
    )


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _read_numpy(obj: Any) -> ArrayView:
    dtype, itemsize, name = _element(obj.dtype, obj.itemsize)
    readonly = not obj.flags.writeable
    return ArrayView(
        obj.ctypes.data, obj.shape, obj.strides, dtype, CPU, readonly, "numpy", itemsize, name
    )


def _read_cupy(obj: Any) -> ArrayView:
    dtype, itemsize, name = _element(obj.dtype, obj.itemsize)
    return ArrayView(
        obj.data.ptr, obj.shape, obj.strides, dtype, obj.device.id, False, "cupy", itemsize, name
    )


def _read_torch(obj: Any) -> ArrayView:
    place = obj.device
    if place.type not in ("cuda", "cpu"):
        raise ValueError(f"the tensor is on device {str(place)!r}; CPU and CUDA are supported")
    try:
        ptr = obj.data_ptr()
        steps = obj.stride()
    except RuntimeError as error:  # sparse, quantised and fake tensors
        raise ValueError(f"the tensor is not made of plain strided elements: {error}") from error
    dtype, itemsize, name = _element(obj.dtype, obj.element_size())
    strides = tuple([step * itemsize for step in steps])
    device = CPU if place.type == "cpu" else place.index
    return ArrayView(ptr, tuple(obj.shape), strides, dtype, device, False, "torch", itemsize, name)


def _read_jax(obj: Any) -> ArrayView:
    # Not by DLPack: JAX makes stream -1 wait as if it were one, and does not say read-only there.
    try:
        (place,) = obj.devices()
        ptr = obj.unsafe_buffer_pointer()
        layout = getattr(getattr(obj, "format", None), "layout", None)  # from JAX 0.7 on
        order = tuple(getattr(layout, "major_to_minor", range(obj.ndim)))
    except (RuntimeError, ValueError) as error:  # sharded, deleted or donated
        raise ValueError(f"the JAX array has no buffer on one device: {error}") from error
    if place.platform not in ("cpu", "gpu", "cuda"):
        raise ValueError(f"the array is on device {str(place)!r}; CPU and CUDA are supported")
    if order != tuple(range(obj.ndim)):
        raise ValueError(f"the JAX array is laid out in the order {order} of its dimensions")
    dtype, itemsize, name = _element(obj.dtype, obj.dtype.itemsize)
    device = CPU if place.platform == "cpu" else int(place.local_hardware_id)
    strides = _c_strides(obj.shape, itemsize)
    return ArrayView(ptr, obj.shape, strides, dtype, device, True, "jax", itemsize, name)


def _read_interface(obj: Any) -> ArrayView:
    found = None
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None:
        found = _read_cuda_array_interface(obj, interface)
    # DLPack names types that the other interface cannot, such as bfloat16.
    if (found is None or found.dtype is None) and hasattr(obj, "__dlpack__"):
        return _read_dlpack(obj)
    if found is None:
        raise TypeError(
            "expected a NumPy, CuPy, PyTorch or JAX array, or an object with "
            f"__cuda_array_interface__ or __dlpack__; got {_type_name(obj)}"
        )
    return found


def _read_cuda_array_interface(obj: Any, interface: Any) -> ArrayView:
    what = f"__cuda_array_interface__ of {_type_name(obj)}"
    try:
        element_type = np.dtype(interface["typestr"])
        shape = tuple([int(length) for length in interface["shape"]])
        address, readonly = interface["data"]
        strides = interface.get("strides")
        if strides is None:
            strides = _c_strides(shape, element_type.itemsize)
        strides = tuple([int(stride) for stride in strides])
        mask = interface.get("mask")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what} is malformed: {error!r}") from error
    if len(strides) != len(shape):
        raise ValueError(f"{what} is malformed: shape {shape}, strides {strides}")
    if mask is not None:
        raise ValueError(f"{what} has a mask; masked arrays are not supported")
    ptr, readonly, source = int(address or 0), bool(readonly), "cuda_array_interface"
    dtype, itemsize, name = _element(element_type, element_type.itemsize)
    device = _cuda_ordinal(obj, ptr)
    return ArrayView(ptr, shape, strides, dtype, device, readonly, source, itemsize, name)


def _cuda_ordinal(obj: Any, ptr: int) -> int:
    """Device of an array whose interface does not say it: ask its DLPack side, else CuPy.

    Without CuPy there is no CUDA workspace that could confuse one ordinal with another: 0 then.
    """
    if hasattr(obj, "__dlpack_device__"):
        return _device(*obj.__dlpack_device__())
    if "cupy" not in sys.modules:
        return 0
    runtime = sys.modules["cupy"].cuda.runtime
    if ptr == 0:  # empty: it lies nowhere
        return int(runtime.getDevice())
    ordinal = int(runtime.pointerGetAttributes(ptr).device)
    if ordinal < 0:
        raise ValueError(f"__cuda_array_interface__ of {_type_name(obj)} is no CUDA memory")
    return ordinal


# DLPack, as its header lays it out: https://dmlc.github.io/dlpack/latest/c_api.html

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_DEVICES = {3: "pinned host memory", 10: "ROCm", 13: "managed CUDA memory", 14: "oneAPI"}
# By type code; those in the first row are followed by the number of bits.
_DLPACK_NAMES = (
    *("int", "uint", "float", "opaque", "bfloat", "complex"),
    *("bool", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
)
_FLAG_READ_ONLY, _FLAG_COPIED, _FLAG_PADDED = 1, 2, 4


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL: C order
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    # DLManagedTensor, the older kind, starts with its DLTensor and needs no struct here.
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


# Own prototypes: `argtypes` of the functions of `ctypes.pythonapi` belong to whoever set them.
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _read_dlpack(obj: Any) -> ArrayView:
    if not hasattr(obj, "__dlpack_device__"):
        raise TypeError(f"{_type_name(obj)} has __dlpack__ but no __dlpack_device__")
    # -1: the exporter must not make any stream wait. For CPU memory no stream may be given.
    stream = {} if _device(*obj.__dlpack_device__()) == CPU else {"stream": -1}
    try:
        capsule = _exported(obj, stream)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{_type_name(obj)} cannot be shared by DLPack: {error}") from error
    # The capsule goes on return: the memory is the caller's object's, not the capsule's.
    return _read_capsule(capsule)


def _exported(obj: Any, stream: dict[str, int]) -> Any:
    # A TypeError means a signature from before DLPack 1.0, or from before `copy`.
    for options in ({"max_version": (1, 0), "copy": False}, {"max_version": (1, 0)}):
        with contextlib.suppress(TypeError):
            return obj.__dlpack__(**options, **stream)
    return obj.__dlpack__(**stream)


def _read_capsule(capsule: Any) -> ArrayView:
    flags = 0
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(
            _capsule_pointer(capsule, b"dltensor_versioned")
        )
        if managed.major != 1:  # only the two version words may be read then
            raise ValueError(f"DLPack version {managed.major}.{managed.minor} is not supported")
        flags = managed.flags
        tensor = managed.dl_tensor
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise ValueError(
            f"{capsule!r} is no DLPack capsule or was consumed already; ask for a new one"
        )
    if flags & _FLAG_COPIED:
        raise ValueError("DLPack made a copy of the array: what is written to it would be lost")
    return _read_dltensor(tensor, flags)


def _read_dltensor(tensor: Any, flags: int) -> ArrayView:
    device = _device(tensor.device_type, tensor.device_id)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    steps = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _c_strides(shape, 1)
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    name = _DLPACK_NAMES[code] if code < len(_DLPACK_NAMES) else f"dlpack{code}_"
    if not 6 <= code < len(_DLPACK_NAMES):
        name += str(bits)
    if flags & _FLAG_PADDED:
        bits = max(bits, 8)
    if name == "float4_e2m1fn" and bits * lanes == 4:
        shape, steps = _packed_in_pairs(shape, steps)
        lanes = 2
    if lanes != 1:
        name += f"_x{lanes}"
    if bits * lanes == 0 or bits * lanes % 8:
        raise ValueError(f"DLPack elements of type {name} do not fill whole bytes")
    dtype, itemsize, name = _named_element(name, bits * lanes // 8)
    ptr = (tensor.data or 0) + tensor.byte_offset
    strides = tuple([step * itemsize for step in steps])
    readonly = bool(flags & _FLAG_READ_ONLY)
    return ArrayView(ptr, shape, strides, dtype, device, readonly, "dlpack", itemsize, name)


def _packed_in_pairs(
    shape: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and steps in bytes of an array of 4-bit elements, two neighbours to a byte."""
    outer = steps[:-1]
    if not shape or shape[-1] % 2 or steps[-1] != 1 or any(step % 2 for step in outer):
        raise ValueError(
            f"4-bit elements of shape {shape} and strides {steps} do not pair up into bytes"
        )
    return (*shape[:-1], shape[-1] // 2), (*[step // 2 for step in outer], 1)


def _device(kind: int, ordinal: int) -> int:
    if kind == _DLPACK_CPU:
        return CPU
    if kind == _DLPACK_CUDA:
        return int(ordinal)
    name = _DLPACK_DEVICES.get(int(kind), "another device")
    raise ValueError(
        f"the array is on {name} (DLPack device type {int(kind)}); CPU and CUDA are supported"
    )
