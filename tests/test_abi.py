"""abi.py against params.cuh, as a C++ compiler sees it."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from cupy_moe_ar import abi
from cupy_moe_ar.compile import _CXX_FLAGS, Variant, _cxx, sources
from cupy_moe_ar.errors import CompileError
from cupy_moe_ar.types import DType

STRUCTS = (abi.Params, abi.ControlBlock, abi.TimeoutRecord)
CONSTANTS = {
    "kSlabHeaderBytes": abi.SLAB_HEADER_BYTES,
    "kMaxRanks": abi.MAX_RANKS,
    "kMaxBlockThreads": abi.MAX_BLOCK_THREADS,
    "kMaxGridBlocks": abi.MAX_GRID_BLOCKS,
    "kMaxRowGroups": abi.MAX_ROW_BYTES // (abi.GROUP_VECTORS * abi.VECTOR_BYTES),
    "kEmptyWord": abi.SENTINEL,
    "sizeof(Vec16)": abi.VECTOR_BYTES,
    "kScaleIsFloat32": abi.Flag.SCALE_IS_FLOAT32,
    "kGammaIsFloat32": abi.Flag.GAMMA_IS_FLOAT32,
    "kTriggerEarly": abi.Flag.TRIGGER_EARLY,
    "kTriggerHeard": abi.Flag.TRIGGER_HEARD,
    "kVectorRoutes": abi.Flag.VECTOR_ROUTES,
    "kWarmUp": abi.Flag.WARM_UP,
    "kScaleTiled": abi.Flag.SCALE_TILED,
    "kScaleIsUe8m0": abi.Flag.SCALE_IS_UE8M0,
}


def layout() -> dict[str, int]:
    """What abi.py says: C++ expressions and their values."""
    said = dict(CONSTANTS)
    for struct in STRUCTS:
        said[f"sizeof({struct.__name__})"] = ctypes.sizeof(struct)
        for field, _ in struct._fields_:
            if not field.startswith("_"):
                place = getattr(struct, field)
                said[f"offsetof({struct.__name__}, {field})"] = place.offset
                said[f"sizeof({struct.__name__}::{field})"] = place.size
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The values as a program prints them."""
    expressions = [*layout(), "sizeof(SlabHeader)"]
    lines = "".join(f'std::printf("%llu\\n", (u64)({expression}));\n' for expression in expressions)
    includes = "#include <moe_ar/lamport.cuh>\n#include <cstddef>\n#include <cstdio>\n"
    folder = tmp_path_factory.mktemp("abi")
    (folder / "abi.cpp").write_text(
        f"{includes}using namespace moe_ar;\nint main() {{\n{lines}}}\n"
    )
    variant = Variant("moe_finalize", "oneshot", DType.BFLOAT16, DType.BFLOAT16, 2)
    flags = [*_CXX_FLAGS, "-O0", *(f"-D{name}={text}" for name, text in variant.defines.items())]
    try:
        compiler = _cxx()
    except CompileError as error:
        pytest.skip(str(error))
    root = sources()
    inputs = [str(folder / "abi.cpp"), str(root / "cpu" / "emulator.cpp")]
    command = [
        *compiler,
        *flags,
        f"-I{root / 'cpu'}",
        f"-I{root}",
        *inputs,
        "-o",
        str(folder / "abi"),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([folder / "abi"], check=True, capture_output=True, text=True)
    return dict(zip(expressions, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("expression", layout())
def test_layout(found: dict[str, int], expression: str) -> None:
    assert found[expression] == layout()[expression]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_fields_have_the_same_names_and_order(struct: type[ctypes.Structure]) -> None:
    text = (sources() / "moe_ar" / "params.cuh").read_text()
    body = text.split(f"struct {struct.__name__} {{")[1].split("\n};")[0]
    lines = [line.split("//")[0].strip().rstrip(";") for line in body.splitlines()]
    names = [line.split()[-1].split("[")[0] for line in lines if line]
    own = [name for name, _ in struct._fields_ if not name.startswith("_")]
    assert names == own


def test_slab_header_leaves_room_for_the_probe(found: dict[str, int]) -> None:
    assert found["sizeof(SlabHeader)"] <= abi.SLAB_PROBE_OFFSET
    assert abi.SLAB_PROBE_OFFSET + 8 * abi.MAX_RANKS <= abi.SLAB_HEADER_BYTES
