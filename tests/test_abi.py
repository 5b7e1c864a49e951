"""abi.py against params.cuh, as a C++ compiler sees it."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path

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
    "kMaxRowGroups": abi.MAX_ROW_BYTES // (abi.GROUP_VECTORS * abi.VECTOR_BYTES),
    "kEmptyWord": abi.SENTINEL,
    "sizeof(Vec16)": abi.VECTOR_BYTES,
    "kScaleIsFloat32": abi.Flag.SCALE_IS_FLOAT32,
    "kGammaIsFloat32": abi.Flag.GAMMA_IS_FLOAT32,
    "kTriggerEarly": abi.Flag.TRIGGER_EARLY,
    "kVectorRoutes": abi.Flag.VECTOR_ROUTES,
    "kWarmUp": abi.Flag.WARM_UP,
}


def fields(struct: type[ctypes.Structure]) -> list[str]:
    return [name for name, _ in struct._fields_ if not name.startswith("_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and constants, printed by a program."""
    expressions = [*CONSTANTS, "sizeof(SlabHeader)"]
    for struct in STRUCTS:
        name = struct.__name__
        expressions.append(f"sizeof({name})")
        for field in fields(struct):
            expressions.append(f"offsetof({name}, {field})")
            expressions.append(f"sizeof({name}::{field})")
    lines = "".join(
        f'  std::printf("%s\\"{expression}\\": %llu", {i} ? ", " : "", (u64)({expression}));\n'
        for i, expression in enumerate(expressions)
    )
    program = (
        "#include <moe_ar/lamport.cuh>\n#include <cstddef>\n#include <cstdio>\n"
        f'using namespace moe_ar;\nint main() {{\n  std::puts("{{");\n{lines}  std::puts("}}");\n}}\n'
    )
    folder = tmp_path_factory.mktemp("abi")
    source, binary = folder / "abi.cpp", folder / "abi"
    source.write_text(program)
    variant = Variant("moe_finalize", "oneshot", DType.BFLOAT16, DType.BFLOAT16, 2)
    macros = [f"-D{name}={value}" for name, value in variant.defines.items()]
    root = sources()
    try:
        compiler = _cxx()
    except CompileError as error:
        pytest.skip(str(error))
    command = [*compiler, *_CXX_FLAGS, "-O0", *macros, f"-I{root / 'cpu'}", f"-I{root}"]
    emulator = root / "cpu" / "emulator.cpp"
    subprocess.run([*command, str(source), str(emulator), "-o", str(binary)], check=True)
    return json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct(found: dict[str, int], struct: type[ctypes.Structure]) -> None:
    name = struct.__name__
    assert found[f"sizeof({name})"] == ctypes.sizeof(struct)
    for field in fields(struct):
        place = getattr(struct, field)
        assert found[f"offsetof({name}, {field})"] == place.offset, field
        assert found[f"sizeof({name}::{field})"] == place.size, field


def test_names_are_the_same() -> None:
    """No field of params.cuh is missing here."""
    text = (sources() / "moe_ar" / "params.cuh").read_text()
    for struct in STRUCTS:
        body = text.split(f"struct {struct.__name__} {{")[1].split("\n};")[0]
        lines = [line.split("//")[0].strip() for line in body.splitlines()]
        names = [line.rstrip(";").split()[-1].split("[")[0] for line in lines if line]
        assert [name for name in names if name != "reserved"] == fields(struct)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(found: dict[str, int], name: str) -> None:
    assert found[name] == CONSTANTS[name]


def test_slab_header_leaves_room_for_the_probe(found: dict[str, int]) -> None:
    assert found["sizeof(SlabHeader)"] <= abi.SLAB_PROBE_OFFSET
    assert abi.SLAB_PROBE_OFFSET + 8 * abi.MAX_RANKS <= abi.SLAB_HEADER_BYTES
    assert Path(sources() / "moe_ar" / "params.cuh").is_file()
