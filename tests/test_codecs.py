"""Number formats and layouts of quantised outputs: every value, and against ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_moe_ar import codecs, dequantize, quant_size, scale_size
from cupy_moe_ar.formats import FORMATS, Scales, parse_quant, scales_of

QUIET = {"over": "ignore", "invalid": "ignore", "under": "ignore", "divide": "ignore"}
HALVES = np.arange(1 << 16, dtype=np.uint16)
BYTES = np.arange(256, dtype=np.uint8)
E4M3 = "fp8_e4m3", codecs.encode_e4m3, codecs.decode_e4m3, ml_dtypes.float8_e4m3fn, 448
E2M1 = "fp4_e2m1", codecs.encode_e2m1, codecs.decode_e2m1, ml_dtypes.float4_e2m1fn, 6
each_format = pytest.mark.parametrize(
    ("encode", "decode", "theirs", "largest"), [E4M3[1:], E2M1[1:]], ids=[E4M3[0], E2M1[0]]
)
Codec = Callable[[np.ndarray], np.ndarray]


def inputs() -> np.ndarray:
    """Every bfloat16 and float16 value, and many of float32."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    with np.errstate(**QUIET):
        halves = [HALVES.view(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.half)]
    return np.concatenate([*halves, words.view(np.float32)])


# ---- number formats ------------------------------------------------------------------------------


@each_format
def test_every_code_is_a_value_and_back(
    encode: Codec, decode: Codec, theirs: Any, largest: int
) -> None:
    codes = BYTES[: 16 if largest == 6 else 256]
    values = decode(codes)
    np.testing.assert_array_equal(values, codes.view(theirs).astype(np.float32))
    assert (encode(values)[~np.isnan(values)] == codes[~np.isnan(values)]).all()


@each_format
def test_every_half_is_encoded_as_by_ml_dtypes(
    encode: Codec, decode: Codec, theirs: Any, largest: int
) -> None:
    x = inputs()
    numbers = x[~np.isnan(x)]
    expected = np.clip(numbers, -largest, largest).astype(theirs).view(np.uint8)
    np.testing.assert_array_equal(encode(numbers), expected)
    assert (encode(x[np.isnan(x)]) == (7 if largest == 6 else 0x7F)).all()


@each_format
def test_codes_are_the_nearest_and_ties_are_even(
    encode: Codec, decode: Codec, theirs: Any, largest: int
) -> None:
    """By distances to all values, which says nothing of how the codes are found."""
    values = decode(BYTES[: 8 if largest == 6 else 127])
    middles = (values[1:] + values[:-1]) / np.float32(2)
    others = np.float32([largest * 1.0364, 1e4, np.inf])
    beside = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))
    x = np.concatenate([values, middles, *beside, others])
    distance = np.abs(np.minimum(x, largest).astype(np.float64)[:, None] - values)
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = nearest & (np.arange(len(values)) % 2 == 0)
    tie = nearest.sum(axis=1) == 2
    expected = np.where(tie, even.argmax(axis=1), nearest.argmax(axis=1))
    assert tie.sum() == len(middles)
    np.testing.assert_array_equal(encode(x), expected)
    np.testing.assert_array_equal(encode(-x), expected | (8 if largest == 6 else 0x80))


def test_c8_saturation() -> None:
    x = np.float32([448, 464, 465, 1e4, np.inf, -448, -465, -np.inf])
    assert codecs.encode_e4m3(x).tolist() == [0x7E] * 5 + [0xFE] * 3
    assert codecs.encode_e2m1(np.float32([6, 7, np.inf, -1e9])).tolist() == [7, 7, 7, 15]


def test_ue8m0_rounds_up() -> None:
    x = np.abs(inputs())
    x = np.concatenate([x, np.ldexp(np.float32(1), np.arange(-149, 128))])
    code = codecs.encode_ue8m0(x)
    value = codecs.decode_ue8m0(code).astype(np.float64)
    finite = np.isfinite(x) & (x <= 2.0**127)
    wide = x[finite].astype(np.float64)
    assert (value[finite] >= wide).all()
    tight = code[finite] > 0  # the next smaller one is too small
    assert (value[finite][tight] / 2 < wide[tight]).all()
    assert (code[np.isnan(x)] == 0xFF).all()
    assert (code[~np.isnan(x) & (x > 2.0**127)] == 0xFE).all()
    up = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(codecs.decode_ue8m0(BYTES), up)
    nearest = np.float32([1.1]).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert codecs.encode_ue8m0(np.float32([1.1])) == nearest + 1  # which rounds to nearest


def test_nibbles() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(2, 8)
    packed = codecs.pack_nibbles(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    np.testing.assert_array_equal(codecs.unpack_nibbles(packed), codes)


# ---- sizes and layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden_dim", "tokens", "size"),
    [(7168, m, 57344) for m in (1, 5, 32, 127, 128)]
    + [(7168, 129, 114688), (2880, 128, 23040), (2880, 129, 46080), (2880, 0, 0)],
)
def test_c8_sizes(hidden_dim: int, tokens: int, size: int) -> None:
    sizes: dict[str, int] = {"token_num": tokens, "hidden_dim": hidden_dim}
    assert scale_size("nvfp4", **sizes) == size
    assert scale_size("nvfp4", **sizes, scale_layout="linear") == tokens * hidden_dim // 16
    assert quant_size("nvfp4", **sizes) == tokens * hidden_dim // 2
    assert quant_size("mxfp8", **sizes) == tokens * hidden_dim
    assert scale_size("fp8_static", **sizes) == 0
    assert scale_size("fp8_per_token", **sizes) == 4 * tokens


def test_sizes_of_groups_and_of_padded_columns() -> None:
    sizes: dict[str, int] = {"token_num": 5, "hidden_dim": 7168}
    group = "fp8_per_token_group"
    column = {"scale_layout": "column_major"}
    assert scale_size(group, **sizes) == 5 * 56 * 4
    assert scale_size(group, **sizes, **column) == 8 * 56 * 4
    assert scale_size(group, **sizes, scale_dtype="ue8m0") == 5 * 56
    assert scale_size(group, **sizes, scale_dtype="ue8m0", **column) == 8 * 56
    assert scale_size(group, token_num=5, hidden_dim=640, scale_dtype="ue8m0", **column) == 8 * 8
    assert scale_size("mxfp8", token_num=129, hidden_dim=2880) == 256 * 92


@pytest.mark.parametrize(
    ("quant", "hidden_dim", "options", "words"),
    [
        ("fp4", 64, {}, "one of fp8_static, fp8_per_token_group, nvfp4, mxfp8, fp8_per_token; "),
        ("fp8_per_token_group", 2880, {}, "multiple of 128, .* fp8_per_token_group; got 2880"),
        ("mxfp8", 48, {}, "multiple of 32"),
        ("nvfp4", 24, {}, "multiple of 16"),
        ("nvfp4", 64, {"scale_layout": "swizzled_8x4"}, "'swizzled_128x4' or 'linear' for"),
        ("mxfp8", 64, {"scale_layout": "row_major"}, "'swizzled_128x4' or 'linear' for"),
        ("fp8_per_token_group", 128, {"scale_layout": "linear"}, "'row_major' or 'column_major'"),
        ("fp8_per_token_group", 128, {"scale_dtype": "e4m3"}, "'float32' or 'ue8m0' for"),
        ("mxfp8", 64, {"scale_dtype": "ue8m0"}, "scale_dtype must be None for quant 'mxfp8'"),
        ("fp8_static", 64, {"scale_layout": "linear"}, "scale_layout must be None for"),
    ],
)
def test_faults_list_what_is_allowed(
    quant: str, hidden_dim: int, options: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        scale_size(quant, token_num=4, hidden_dim=hidden_dim, **options)


def test_c8_place_of_a_scale() -> None:
    scales = scales_of(parse_quant("nvfp4"), 129, 7168)
    places = codecs.scale_places(scales)
    assert (places[1, 0], places[32, 0], places[0, 4], places[128, 0]) == (16, 4, 512, 57344)
    linear = codecs.scale_places(scales_of(parse_quant("nvfp4"), 129, 7168, "linear"))
    assert linear[1, 0] == 7168 // 16


@pytest.mark.parametrize("rows", [1, 5, 32, 127, 128, 129, 300])
@pytest.mark.parametrize("columns", [1, 4, 6, 90])
def test_layouts_are_the_consumers(rows: int, columns: int) -> None:
    """Padded to whole tiles, reshaped and transposed: what cuBLAS's and DeepGEMM's tools do."""
    values = np.random.default_rng(0).integers(1, 256, (rows, columns)).astype(np.uint8)

    def placed(layout: str, dtype: str) -> np.ndarray:
        scales = Scales(rows, columns, layout, dtype)
        out = np.zeros(scales.padded, values.dtype).reshape(-1)
        out[codecs.scale_places(scales)] = values
        return out

    def padded(to_rows: int, to_columns: int) -> np.ndarray:
        return np.pad(values, [(0, -rows % to_rows), (0, -columns % to_columns)])

    tiles = padded(128, 4)
    tiles = tiles.reshape(len(tiles) // 128, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
    np.testing.assert_array_equal(placed("swizzled_128x4", "e4m3"), tiles.reshape(-1))
    np.testing.assert_array_equal(placed("row_major", "e4m3"), values.reshape(-1))
    np.testing.assert_array_equal(placed("column_major", "float32"), padded(4, 1).T.reshape(-1))
    words = np.ascontiguousarray(padded(4, 4)).view(np.uint32).T
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(placed("column_major", "ue8m0"), packed)


# ---- both directions -----------------------------------------------------------------------------

CASES: list[tuple[str, dict[str, Any]]] = [
    ("fp8_static", {"scale_factor": 0.02}),
    ("fp8_per_token_group", {}),
    ("fp8_per_token_group", {"scale_layout": "column_major"}),
    ("fp8_per_token_group", {"scale_dtype": "ue8m0"}),
    ("fp8_per_token_group", {"scale_dtype": "ue8m0", "scale_layout": "column_major"}),
    ("nvfp4", {"scale_factor": 0.003}),
    ("nvfp4", {"scale_factor": np.float32([0.003]), "scale_layout": "linear"}),
    ("mxfp8", {}),
    ("mxfp8", {"scale_layout": "linear"}),
    ("fp8_per_token", {}),
]


@pytest.mark.parametrize(("quant", "options"), CASES)
def test_what_is_quantised_comes_back(quant: str, options: dict[str, Any]) -> None:
    """Within half a step of the format: 2**-4 of a value in E4M3, 1/4 of one or 1/12 in E2M1."""
    x = np.random.default_rng(1).standard_normal((37, 640)).astype(ml_dtypes.bfloat16)
    x[0] = 0
    codes, scales = codecs.quantize(x, quant, **options)
    sizes = {"token_num": 37, "hidden_dim": 640}
    layout = {name: value for name, value in options.items() if name != "scale_factor"}
    assert codes.nbytes == quant_size(quant, **sizes)
    assert (0 if scales is None else scales.nbytes) == scale_size(quant, **sizes, **layout)
    back = dequantize(codes, scales, quant, **options)
    wide = x.astype(np.float32)
    block = FORMATS[quant].block
    amax = np.abs(wide.reshape(37, -1, block if block > 1 else 640)).max(axis=2, keepdims=True)
    least = np.broadcast_to(amax, (37, amax.shape[1], 640 // amax.shape[1])).reshape(37, 640)
    fp4 = quant == "nvfp4"
    bound = np.maximum(
        np.abs(wide) * (0.27 if fp4 else 2**-4 + 1e-6), least * (0.1 if fp4 else 1e-3)
    )
    assert (np.abs(back - wide) <= bound).all()
    assert not back[0].any()
    assert not codes[0].any()


def test_exact_scales() -> None:
    x = np.zeros((3, 128), np.float32)
    x[1, 5], x[2, ::2] = 1e4, -448
    codes, scales = codecs.quantize(x, "fp8_per_token_group")
    assert scales is not None
    assert scales.tolist() == [0, np.float32(1e4) / np.float32(448), 1]
    assert (codes[1, 5], codes[2, 0], codes[2, 1]) == (0x7E, 0xFE, 0)
    codes, scales = codecs.quantize(x, "mxfp8", scale_layout="linear")
    assert scales is not None
    assert scales.reshape(3, 4).tolist() == [[0] * 4, [127 + 5, 0, 0, 0], [127] * 4]
    codes, scales = codecs.quantize(x, "nvfp4", scale_factor=1.0, scale_layout="linear")
    assert scales is not None
    assert codecs.decode_e4m3(scales.reshape(3, 8)[:, 0]).tolist() == [0, 448, 72]  # 1e4/6, 448/6
    assert (codes[1, 2] >> 4, codes[2, 0]) == (7, 0xF)


@pytest.mark.parametrize("quant", ["fp8_per_token_group", "mxfp8", "nvfp4", "fp8_per_token"])
def test_nan_takes_its_block_and_infinity_saturates(quant: str) -> None:
    given = {"scale_factor": 1.0} if quant == "nvfp4" else {}
    x = np.ones((2, 256), np.float32)
    x[0, 3], x[1, 3] = np.nan, -np.inf
    codes, scales = codecs.quantize(x, quant, **given)
    back = dequantize(codes, scales, quant, **given)
    block = FORMATS[quant].block or 256
    assert np.isnan(back[0, :block]).all()
    assert (np.abs(back[0, block:] - 1) < 0.04).all()
    assert not np.isnan(back[1]).any()
    assert back[1, 3] == back[1].min() <= -448 * 6
    assert (np.abs(back[1, block:] - 1) < 0.04).all()


@pytest.mark.parametrize("given", [0.0, np.inf, np.nan, 1e-45, 1e38, 3e38])
def test_given_scales_at_the_edge(given: float) -> None:
    """Those that a device array may hold; a host's must be positive and finite."""
    x = np.float32([[0, -0.0, 1, -1e30, 1e-30, np.inf, *[3.0] * 26]])
    codes, _ = codecs.quantize(x, "fp8_static", scale_factor=given)
    packed, scales = codecs.quantize(x, "nvfp4", scale_factor=given)
    if not np.isnan(given):
        assert not (codes & 0x7F == 0x7F).any()
        assert scales is not None
        assert not (scales & 0x7F == 0x7F).any()
    if given in (0.0, np.inf):
        assert not codes.any()
        assert not packed.any()
    if np.isnan(given):
        assert (codes == 0x7F).all()
        assert (packed == 0x77).all()


def test_scale_factor_is_asked_for() -> None:
    x = np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="scale_factor must be a number for fp8_static; got None"):
        codecs.quantize(x, "fp8_static")
    with pytest.raises(ValueError, match=r"scale_factor must be None for mxfp8; got 2\.0"):
        codecs.quantize(x, "mxfp8", scale_factor=2.0)
    codes, scales = codecs.quantize(x, "mxfp8")
    assert scales is not None
    with pytest.raises(ValueError, match="scale_out must have 512 bytes; got 511 bytes"):
        dequantize(codes, scales[1:], "mxfp8")
