"""Quantised outputs: names, options, shapes and sizes of each format. `codecs` has the values."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "FORMATS",
    "Format",
    "Scales",
    "hidden_problem",
    "parse_quant",
    "quant_size",
    "scale_size",
    "scales_of",
]

E4M3 = ("uint8", "float8_e4m3fn")
E8M0 = ("uint8", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Format:
    """What a value of `quant` means; x is about code * scale, and * the given scale in NVFP4.

    Attributes:
        name: The value of `quant`.
        code_bits: Bits of a code.
        code_dtypes: Names of element types that `quant_out` may have; "uint8" first.
        block: Consecutive elements of a row that share a scale; 0: all of the row, 1: all of the
            tensor, by a scale that is given.
        needs_scale: Whether `scale_factor` must be given.
        layouts: Of the scales, by default the first; empty where there is one order only.
        scale_dtypes: Names of their types, by default the first; those of the array that holds them
            come from `Scales`.
    """

    name: str
    code_bits: int
    code_dtypes: tuple[str, ...]
    block: int
    needs_scale: bool
    layouts: tuple[str, ...]
    scale_dtypes: tuple[str, ...]

    @property
    def has_scales(self) -> bool:
        """Whether the kernel makes scales."""
        return self.block != 1


FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("fp8_static", 8, E4M3, 1, True, (), ()),
        Format(
            "fp8_per_token_group",
            8,
            E4M3,
            128,
            False,
            ("row_major", "column_major"),
            ("float32", "ue8m0"),
        ),
        Format(
            "nvfp4",
            4,
            ("uint8", "float4_e2m1fn_x2"),
            16,
            True,
            ("swizzled_128x4", "linear"),
            ("e4m3",),
        ),
        Format("mxfp8", 8, E4M3, 32, False, ("swizzled_128x4", "linear"), ("ue8m0",)),
        Format("fp8_per_token", 8, E4M3, 0, False, (), ("float32",)),
    )
}
"""Every format, by name."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Where the scales of one call lie: `rows` tokens with `columns` blocks each.

    Attributes:
        rows: Tokens.
        columns: Blocks of a row.
        layout: "swizzled_128x4", "column_major", or "row_major", which "linear" is too.
        dtype: "float32", "ue8m0" or "e4m3".
    """

    rows: int
    columns: int
    layout: str
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a scale."""
        return 4 if self.dtype == "float32" else 1

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns with padding, which is zero.

        To whole tiles of 128 x 4, or in column-major order to 16 bytes of rows and to whole 32-bit
        words of columns.
        """
        if self.layout == "swizzled_128x4":
            return _round_up(self.rows, 128), _round_up(self.columns, 4)
        if self.layout == "column_major":
            return _round_up(self.rows, 4), _round_up(self.columns, 4 // self.itemsize)
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all, padding too."""
        return math.prod(self.padded) * self.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array as the documentation has it; in column-major order of 32-bit words."""
        rows, columns = self.padded
        return (
            (columns * self.itemsize // 4, rows)
            if self.layout == "column_major"
            else (rows, columns)
        )

    @property
    def array_dtypes(self) -> tuple[str, ...]:
        """Names of element types that the array may have."""
        if self.dtype == "float32":
            return ("float32",)
        own = E8M0 if self.dtype == "ue8m0" else E4M3
        return ("int32", *own) if self.layout == "column_major" else own


def parse_quant(quant: object) -> Format:
    """Return the format of a name.

    Raises:
        ValueError: There is none; the message lists those that there are.
    """
    found = FORMATS.get(quant) if isinstance(quant, str) else None
    if found is None:
        raise ValueError(f"quant must be None or one of {', '.join(FORMATS)}; got {quant!r}")
    return found


def hidden_problem(fmt: Format, hidden_dim: int) -> str | None:
    """Say why rows of `hidden_dim` elements have no such format; None if they have."""
    if fmt.block > 1 and hidden_dim % fmt.block:
        return (
            f"hidden_dim must be a multiple of {fmt.block}, the elements of a scale of "
            f"{fmt.name}; got {hidden_dim}"
        )
    return None


def scales_of(
    fmt: Format,
    token_num: int,
    hidden_dim: int,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
) -> Scales:
    """Return where the scales of a call lie; without any rows where the format makes none.

    Raises:
        ValueError: The format has no such layout or type; the message lists those that it has.
    """
    layout = _choose(fmt, "scale_layout", scale_layout, fmt.layouts)
    dtype = _choose(fmt, "scale_dtype", scale_dtype, fmt.scale_dtypes)
    if not fmt.has_scales:
        return Scales(0, 0, "row_major", "float32")
    columns = hidden_dim // fmt.block if fmt.block else 1
    order = "row_major" if layout in ("linear", "") else layout
    return Scales(token_num, columns, order, dtype)


def quant_size(quant: str, *, token_num: int, hidden_dim: int) -> int:
    """Return the bytes of `quant_out`.

    Raises:
        ValueError: There is no such format, or rows of `hidden_dim` elements have none.
    """
    fmt = _of_rows(quant, hidden_dim)
    return token_num * hidden_dim * fmt.code_bits // 8


def scale_size(
    quant: str,
    *,
    token_num: int,
    hidden_dim: int,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
) -> int:
    """Return the bytes of `scale_out`, padding included; 0 where the scale is given.

    Args:
        quant: Name of the format.
        token_num: Tokens.
        hidden_dim: Elements of a row.
        scale_layout: As the operation's; None is the format's default.
        scale_dtype: Likewise.

    Raises:
        ValueError: There is no such format, layout or type, or rows of `hidden_dim` elements have
            none.
    """
    fmt = _of_rows(quant, hidden_dim)
    return scales_of(fmt, token_num, hidden_dim, scale_layout, scale_dtype).nbytes


def _of_rows(quant: str, hidden_dim: int) -> Format:
    fmt = parse_quant(quant)
    problem = hidden_problem(fmt, hidden_dim)
    if problem:
        raise ValueError(problem)
    return fmt


def _choose(fmt: Format, option: str, given: str | None, allowed: tuple[str, ...]) -> str:
    if given is None:
        return allowed[0] if allowed else ""
    if given not in allowed or len(allowed) < 2:
        choices = " or ".join(map(repr, allowed)) if len(allowed) > 1 else "None"
        raise ValueError(f"{option} must be {choices} for quant {fmt.name!r}; got {given!r}")
    return given


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
