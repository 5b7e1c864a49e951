"""Values of the quantised outputs in NumPy: number formats, layouts of scales, both directions.

    codes, scales = quantize(norm_out, "nvfp4", scale_factor=g)
    dequantize(quant_out, scale_out, "nvfp4", scale_factor=g)

`dequantize` is for users too; the rest is what tests compare the kernels with. Arithmetic is
float32, each operation rounded to nearest even, as the contract has it:

    fp8_static           code = E4M3(x / scale_factor)
    fp8_per_token        scale = max|x of the row| / 448                    code = E4M3(x / scale)
    fp8_per_token_group  likewise by 128 elements; UE8M0: max / 448
                         rounded up to a power of two
    mxfp8                likewise by 32 elements, UE8M0
    nvfp4                scale = E4M3(max|x of 16| / (6 * scale_factor))
                         code = E2M1(x / (scale * scale_factor))

Codes saturate. A block of zeros has scale 0 (UE8M0: its least, 2**-127); where the divisor is 0
or infinite all codes are 0. An infinity counts as the largest float32 in a maximum and saturates
as a code; a NaN makes the scale of its block NaN, and all its codes NaN (E2M1, which has none: 6).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .formats import Format, Scales, hidden_problem, parse_quant, scales_of

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "dequantize",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "pack_nibbles",
    "quantize",
    "scale_places",
    "unpack_nibbles",
]

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]
Float32Array: TypeAlias = NDArray[np.float32]

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E4M3_NAN, _E8M0_NAN = 0x7F, 0xFF
_FLOAT32_MAX = np.finfo(np.float32).max


# ---- number formats ------------------------------------------------------------------------------


def encode_e4m3(x: Array) -> Bytes:
    """Round float32 to the nearest E4M3 code, ties to even; beyond 448 it is 448, NaN is 0x7F."""
    return _encode(x, fraction_bits=3, bias=7, largest=0x7E, nan=_E4M3_NAN, sign=0x80)


def encode_e2m1(x: Array) -> Bytes:
    """Round float32 to the nearest E2M1 code, ties to even; beyond 6 it is 6, NaN is 6 too."""
    return _encode(x, fraction_bits=1, bias=1, largest=7, nan=7, sign=8)


def encode_ue8m0(x: Array) -> Bytes:
    """Round up to a power of two, 2**(code - 127); NaN is 0xFF, more than 2**127 0xFE."""
    fraction, exponent = np.frexp(np.minimum(x, 2.0**127))  # from 0.5 up to 1
    up = np.where(x == 0, 0, np.maximum(exponent - (fraction == 0.5) + 127, 0))
    return np.where(np.isnan(x), _E8M0_NAN, up).astype(np.uint8)


def decode_e4m3(code: Array) -> Float32Array:
    """Return the value of E4M3 codes."""
    value = _decode(code, fraction_bits=3, bias=7, sign=0x80)
    return np.where((code & 0x7F) == _E4M3_NAN, np.float32(np.nan), value)


def decode_e2m1(code: Array) -> Float32Array:
    """Return the value of E2M1 codes, 0 to 15."""
    return _decode(code, fraction_bits=1, bias=1, sign=8)


def decode_ue8m0(code: Array) -> Float32Array:
    """Return the value of UE8M0 codes."""
    value = np.ldexp(np.float32(1), np.minimum(code, 0xFE).astype(np.int32) - 127)
    return np.where(code == _E8M0_NAN, np.float32(np.nan), value).astype(np.float32)


def pack_nibbles(code: Bytes) -> Bytes:
    """Put two codes into a byte, the first into the low half."""
    return (code[..., ::2] | code[..., 1::2] << 4).astype(np.uint8)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """Undo `pack_nibbles`."""
    halves: Bytes = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)


def _encode(x: Array, *, fraction_bits: int, bias: int, largest: int, nan: int, sign: int) -> Bytes:
    """By the spacing of the values: those of a binade, and below the normal ones a constant."""
    with np.errstate(invalid="ignore"):
        wide = np.asarray(x, np.float64)
    magnitude = np.where(np.isnan(wide), 0, np.minimum(np.abs(wide), 1 << 20))
    _, exponent = np.frexp(magnitude)  # magnitude = m * 2**exponent, 0.5 <= m < 1, but for 0
    binade = np.maximum(np.where(magnitude == 0, 1 - bias, exponent - 1), 1 - bias)
    steps = np.rint(np.ldexp(magnitude, fraction_bits - binade))  # ties to even
    code = steps + (binade + bias - 1) * (1 << fraction_bits)
    signed = np.minimum(code, largest).astype(np.uint8) | np.where(np.signbit(wide), sign, 0)
    return np.where(np.isnan(wide), nan, signed).astype(np.uint8)


def _decode(code: Array, *, fraction_bits: int, bias: int, sign: int) -> Float32Array:
    magnitude = (code & (sign - 1)).astype(np.int32)
    exponent = magnitude >> fraction_bits
    fraction = magnitude & ((1 << fraction_bits) - 1)
    steps = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction)
    power = np.maximum(exponent, 1) - bias - fraction_bits
    value: Float32Array = np.ldexp(steps.astype(np.float32), power)
    return np.where(code & sign, -value, value)


# ---- layouts -------------------------------------------------------------------------------------


def scale_places(scales: Scales) -> NDArray[np.int64]:
    """Return the place of each scale in `scale_out`, in scales from its beginning.

    - row_major, linear: row after row.
    - swizzled_128x4: tiles of 128 rows x 4 columns, 512 bytes, tiles row after row; within a tile
      row r, column c is at 16 * (r % 32) + 4 * (r // 32) + c. What cuBLAS and CUTLASS take.
    - column_major, float32: column after column, each of a multiple of 4 rows.
    - column_major, ue8m0: words of four columns, the first in the low byte; word column after word
      column, each of a multiple of 4 rows. What DeepGEMM takes.

    Returns:
        int64 `[rows, columns]`.
    """
    row, column = np.ogrid[: scales.rows, : scales.columns]
    rows, columns = scales.padded
    place: NDArray[np.int64] = row * columns + column
    if scales.layout == "swizzled_128x4":
        tile = row // 128 * (columns // 4) + column // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    if scales.layout == "column_major":
        together = 4 // scales.itemsize
        place = (column // together * rows + row) * together + column % together
    return place


# ---- both directions -----------------------------------------------------------------------------


def quantize(
    x: Array,
    quant: str,
    *,
    scale_factor: float | Array | None = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
) -> tuple[Bytes, Array | None]:
    """Quantise what `norm_out` holds, bit for bit as the kernels do.

    Args:
        x: `[token_num, hidden_dim]`, of a type that float32 holds exactly.
        quant: Name of the format.
        scale_factor: As the operation's.
        scale_layout: As the operation's.
        scale_dtype: As the operation's.

    Returns:
        `quant_out` as bytes, `[token_num, hidden_dim]` or for nvfp4 half as many columns, and
        `scale_out`, flat: float32 or uint8; None where the scale is given.
    """
    fmt, scales = _settle(x.shape, quant, scale_layout, scale_dtype)
    token_num, hidden_dim = x.shape
    given = _given(fmt, scale_factor)
    wide = x.astype(np.float32)
    with np.errstate(all="ignore"):
        if not fmt.has_scales:
            return _codes(fmt, wide, np.broadcast_to(given, (token_num, 1))), None
        blocks = wide.reshape(token_num, scales.columns, fmt.block or hidden_dim)
        amax = np.minimum(np.abs(blocks).max(axis=2, initial=0), _FLOAT32_MAX)  # NaN stays
        if fmt.name == "nvfp4":
            stored: Array = encode_e4m3(amax / (np.float32(E2M1_MAX) * given))
            stored[amax == 0] = 0
            value = decode_e4m3(stored)
            divisor = np.where(value == 0, np.float32(0), value * given)
        else:
            stored = divisor = amax / np.float32(E4M3_MAX)
            if scales.dtype == "ue8m0":
                stored = encode_ue8m0(amax.astype(np.float64) / E4M3_MAX)  # not rounded in between
                divisor = np.where(amax == 0, np.float32(0), decode_ue8m0(stored))
        codes = _codes(fmt, blocks, divisor[:, :, None])
    out = np.zeros(scales.padded, stored.dtype).reshape(-1)
    out[scale_places(scales)] = stored
    return codes.reshape(token_num, -1), out


def dequantize(
    quant_out: Array,
    scale_out: Array | None,
    quant: str,
    *,
    scale_factor: float | Array | None = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
) -> Float32Array:
    """Return what quantised outputs stand for: code * scale, and * scale_factor for nvfp4.

    Args:
        quant_out: `[token_num, hidden_dim]`, for nvfp4 half as many columns; any type of one byte.
        scale_out: As the operation wrote it, of any shape; None for fp8_static.
        quant: Name of the format.
        scale_factor: As it was given to the operation.
        scale_layout: Likewise.
        scale_dtype: Likewise.

    Returns:
        float32 `[token_num, hidden_dim]`.

    Raises:
        ValueError: There is no such format, layout or type, or `scale_out` has another size.
    """
    codes = np.ascontiguousarray(quant_out).view(np.uint8)
    if parse_quant(quant).code_bits == 4:
        codes = unpack_nibbles(codes)
    fmt, scales = _settle(codes.shape, quant, scale_layout, scale_dtype)
    given = _given(fmt, scale_factor)
    value = decode_e2m1(codes) if fmt.code_bits == 4 else decode_e4m3(codes)
    with np.errstate(all="ignore"):
        if not fmt.has_scales:
            return value * given
        if scale_out is None or scale_out.nbytes != scales.nbytes:
            got = "None" if scale_out is None else f"{scale_out.nbytes} bytes"
            raise ValueError(f"scale_out must have {scales.nbytes} bytes; got {got}")
        stored = np.ascontiguousarray(scale_out).reshape(-1).view(np.uint8)
        if scales.dtype == "float32":
            scale = stored.view(np.float32)
        else:
            scale = (decode_e4m3 if scales.dtype == "e4m3" else decode_ue8m0)(stored)
        blocks = value.reshape(scales.rows, scales.columns, fmt.block or codes.shape[1])
        result: Array = blocks * scale[scale_places(scales)][:, :, None]
        if fmt.needs_scale:
            result = result * given
    return result.reshape(codes.shape).astype(np.float32, copy=False)


def _codes(fmt: Format, x: Float32Array, divisor: Array) -> Bytes:
    encode = encode_e2m1 if fmt.code_bits == 4 else encode_e4m3
    usable = (divisor != 0) & ~np.isinf(divisor)
    codes = np.where(usable, encode(x / divisor), np.uint8(0))
    return pack_nibbles(codes) if fmt.code_bits == 4 else codes


def _given(fmt: Format, scale_factor: float | Array | None) -> np.float32:
    if fmt.needs_scale != (scale_factor is not None):
        needs = "a number" if fmt.needs_scale else "None"
        raise ValueError(f"scale_factor must be {needs} for {fmt.name}; got {scale_factor!r}")
    return np.float32(1 if scale_factor is None else np.asarray(scale_factor).reshape(()))


def _settle(
    shape: tuple[int, ...], quant: str, scale_layout: str | None, scale_dtype: str | None
) -> tuple[Format, Scales]:
    fmt = parse_quant(quant)
    if len(shape) != 2:
        raise ValueError(f"rows must have 2 dimensions; got shape {shape}")
    problem = hidden_problem(fmt, shape[1])
    if problem:
        raise ValueError(problem)
    return fmt, scales_of(fmt, *shape, scale_layout, scale_dtype)
