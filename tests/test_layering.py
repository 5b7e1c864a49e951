"""Rules about the sources: who may import, include or name what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_moe_ar
from cupy_moe_ar.compile import Variant, sources
from cupy_moe_ar.types import DType

PACKAGE = Path(cupy_moe_ar.__file__).parent
# Each module imports only what stands before it.
ORDER = [
    "errors", "types", "arrays", "abi", "plan", "reference", "call", "group", "compile", "launch",
    "symmetric", "cuda_backend", "cpu_backend", "workspace", "ops", "__init__", "testing",
]  # fmt: skip
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}
# Only these may import it, and not when they are imported themselves.
RESERVED = {
    "cupy": {"launch", "symmetric", "cuda_backend", "testing"},
    "cuda": {"compile", "launch", "symmetric"},
    "mpi4py": {"group"},
    "torch": set(),
}
KERNEL_SOURCES = sorted([*sources().glob("*.cu"), *sources().glob("moe_ar/*.cuh")])


def imports(tree: ast.AST) -> set[str]:
    """Full names of what a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"cupy_moe_ar.{node.module or ''}".rstrip(".") if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def own_imports(module: str) -> set[str]:
    """Modules of the package that one of them imports."""
    found = {name.split(".")[1] for name in imports(MODULES[module]) if name.startswith("cupy_moe_ar.")}
    return {name if name in MODULES else "__init__" for name in found}


def test_every_module_has_its_place() -> None:
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_one_way(module: str) -> None:
    later = own_imports(module) - set(ORDER[: ORDER.index(module)])
    assert not later, f"{module} must not import {sorted(later)}"


def test_nothing_that_computes_imports_the_reference() -> None:
    assert not [module for module in ORDER if "reference" in own_imports(module)]


@pytest.mark.parametrize("library", RESERVED)
def test_libraries_have_few_importers(library: str) -> None:
    importers = {
        module
        for module, tree in MODULES.items()
        if library in {name.split(".")[0] for name in imports(tree)}
    }
    assert importers <= RESERVED[library]
    for module in importers:
        top = ast.Module(
            [node for node in MODULES[module].body if isinstance(node, ast.Import | ast.ImportFrom)],
            [],
        )
        assert library not in {name.split(".")[0] for name in imports(top)}, module


def test_importing_the_package_is_light() -> None:
    heavy = ("cupy", "cuda.bindings", "mpi4py", "torch", "cupy_moe_ar.reference")
    code = f"import sys, cupy_moe_ar; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_nothing_is_printed() -> None:
    for module, tree in MODULES.items():
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {func.id for func in calls if isinstance(func, ast.Name)}
        assert not names & {"print", "breakpoint", "exit", "quit"}, module


def test_public_names_exist() -> None:
    assert sorted(cupy_moe_ar.__all__) == cupy_moe_ar.__all__
    assert all(hasattr(cupy_moe_ar, name) for name in cupy_moe_ar.__all__)


# ---- kernels -------------------------------------------------------------------------------------


def code_of(path: Path) -> str:
    """Source without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def test_there_are_kernels() -> None:
    assert {path.name for path in KERNEL_SOURCES} >= {"oneshot.cu", "ptx.cuh", "lamport.cuh"}


@pytest.mark.parametrize("path", KERNEL_SOURCES, ids=lambda path: path.name)
def test_kernel_source(path: Path) -> None:
    code = code_of(path)
    for include in re.findall(r"#\s*include\s*(\S+)", code):
        assert re.fullmatch(r"<moe_ar/\w+\.cuh>", include), include
    assert not re.search(r"__ldg|__restrict|\b__constant__", code)
    if path.name != "ptx.cuh":
        hardware = r"\basm\b|__CUDA_ARCH__|\b(thread|block)(Idx|Dim)\b|\bgridDim\b|__shared__"
        assert not re.search(rf"{hardware}|__syncthreads|__shfl|__nv_|\batomic[A-Z]", code)
    if path.name != "config.cuh":
        variant = Variant("moe_finalize", "oneshot", DType.BFLOAT16, DType.BFLOAT16, 2)
        for macro in variant.defines:
            assert not re.search(rf"\b{macro}\b", code), f"{macro} is read"
        assert path.suffix == ".cu" or not re.search(r"#\s*if", code) or path.name == "ptx.cuh"


def test_both_machines_have_the_same_primitives() -> None:
    """What kernels call, each ptx.cuh defines."""
    used = set()
    for path in KERNEL_SOURCES:
        if path.name != "ptx.cuh":
            used |= set(re.findall(r"\bptx::(\w+)", code_of(path)))
    assert len(used) > 20
    for root in (sources(), sources() / "cpu"):
        code = code_of(root / "moe_ar" / "ptx.cuh")
        assert not [name for name in used if not re.search(rf"\b{name}\b", code)]
