"""Data types by name, without NumPy or any array library."""

from __future__ import annotations

import enum

__all__ = ["DType"]


class DType(enum.Enum):
    """Element type of an array or of the wire, named as NumPy, PyTorch and ml_dtypes name it."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    INT32 = "int32"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def short(self) -> str:
        """Name used in kernel names, such as `bf16`."""
        return _SHORT[self]

    @classmethod
    def parse(cls, dtype: object) -> DType:
        """Return the `DType` that a string or a dtype object (NumPy, PyTorch, JAX) names.

        Raises:
            ValueError: `dtype` names none of them; the message lists the allowed names.
        """
        if isinstance(dtype, cls):
            return dtype
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
        if name is None:
            name = getattr(dtype, "__name__", None) or str(dtype)
        name = str(name).rpartition(".")[2]
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(member.value for member in cls)
            raise ValueError(f"dtype must be one of {allowed}; got {dtype!r}") from None


_ITEMSIZE = {
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.INT32: 4,
    DType.UINT8: 1,
}
_SHORT = {
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "f16",
    DType.FLOAT32: "f32",
    DType.INT32: "i32",
    DType.UINT8: "u8",
}
