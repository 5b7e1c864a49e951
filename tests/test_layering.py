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
    "errors", "types", "formats", "arrays", "abi", "plan", "codecs", "reference", "checks", "call",
    "group", "sharing", "compile", "launch", "symmetric", "cuda_backend", "cpu_backend",
    "workspace", "ops", "__init__", "testing", "terminal", "info", "selfcheck",
    "__main__",
]  # fmt: skip
TOOLS = {"selfcheck", "__main__"}
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}
# Only these may import it, and not when they are imported themselves.
RESERVED: dict[str, set[str]] = {
    "cupy": {"launch", "symmetric", "cuda_backend", "testing", "info"},
    "cuda": {"compile", "launch", "symmetric"},
    "mpi4py": {"group"},
    "torch": set(),
}
# The modules that may import a library at once; the core imports none of them.
INTEGRATIONS = {
    path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("integrations/*.py")
}
KERNELS = sorted([*sources().glob("*.cu"), *sources().glob("moe_ar/*.cuh")])
MACROS = Variant("moe_finalize", "oneshot", DType.BFLOAT16, DType.BFLOAT16, 2).defines


def imports(*nodes: ast.AST) -> set[str]:
    """Full names of all that is imported in these nodes."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"cupy_moe_ar.{node.module or ''}".rstrip(".") if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imported_by(module: str) -> set[str]:
    """Modules of the package that one of them imports, anywhere in it."""
    names = [name.split(".") for name in imports(*ast.walk(MODULES[module]))]
    own = {name[1] for name in names if name[0] == "cupy_moe_ar"}
    return {name if name in MODULES else "__init__" for name in own}


def test_imports_point_one_way() -> None:
    assert sorted(MODULES) == sorted(ORDER), "give a new module its place"
    for i, module in enumerate(ORDER):
        assert imported_by(module) <= set(ORDER[:i]), module
        assert module in TOOLS or "reference" not in imported_by(module), "not for users' calls"
        assert "codecs" not in imported_by(module) or module in (*TOOLS, "__init__"), (
            "nor for a launch"
        )


@pytest.mark.parametrize("library", RESERVED)
def test_libraries_have_few_importers(library: str) -> None:
    for module, tree in MODULES.items():
        everywhere = {name.split(".")[0] for name in imports(*ast.walk(tree))}
        at_import = {name.split(".")[0] for name in imports(*tree.body)}
        assert library not in everywhere or module in RESERVED[library], module
        assert library not in at_import, module


def test_the_core_imports_no_integration() -> None:
    for module, tree in MODULES.items():
        names = imports(*ast.walk(tree))
        assert not any(name.startswith("cupy_moe_ar.integrations") for name in names), module


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_integrations_import_only_their_library(module: str) -> None:
    libraries = {"__init__": set(), "torch": {"torch"}, "flashinfer": {"torch"}}[module]
    found = {name.split(".")[0] for name in imports(*ast.walk(INTEGRATIONS[module]))}
    assert found - sys.stdlib_module_names <= {"cupy_moe_ar", *libraries}


def test_importing_the_package_is_light() -> None:
    heavy = ("cupy", "cuda.bindings", "mpi4py", "torch", "cupy_moe_ar.reference")
    code = f"import sys, cupy_moe_ar; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_only_the_command_line_prints() -> None:
    for module, tree in (*MODULES.items(), *INTEGRATIONS.items()):
        if module == "__main__":
            continue
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert "print" not in {func.id for func in calls if isinstance(func, ast.Name)}, module


# ---- kernels -------------------------------------------------------------------------------------


def code_of(path: Path) -> str:
    """Source without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernel_source(path: Path) -> None:
    code = code_of(path)
    for include in re.findall(r"#\s*include\s*(\S+)", code):
        assert re.fullmatch(r"<moe_ar/\w+\.cuh>", include), include
    assert not re.search(r"__ldg|__restrict|\b__constant__", code)
    if path.name != "ptx.cuh":
        hardware = r"\basm\b|__CUDA_ARCH__|\b(thread|block)(Idx|Dim)\b|\bgridDim\b|__shared__"
        assert not re.search(rf"{hardware}|__sync|__shfl|__nv_|\batomic[A-Z]|#\s*if", code)
    if path.name != "config.cuh":
        assert not re.search(rf"\b({'|'.join(MACROS)})\b", code), "reads a -D macro"


def test_both_machines_have_the_primitives_that_kernels_use() -> None:
    code = {path: code_of(path) for path in [*KERNELS, sources() / "cpu" / "moe_ar" / "ptx.cuh"]}
    machines = {path: text for path, text in code.items() if path.name == "ptx.cuh"}
    kernels = "".join(text for path, text in code.items() if path not in machines)
    used = set(re.findall(r"\bptx::(\w+)", kernels))
    assert (len(machines), len(used) > 20) == (2, True)
    for text in machines.values():
        assert used <= set(re.findall(r"\w+", text))
