"""The sdist and the wheel, and that the wheel alone does all that a checkout does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cupy_moe_ar.compile import sources

ROOT = Path(__file__).parent.parent
NEWER = "77"  # setuptools, as pyproject.toml asks
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def output(*words: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_backend(folder: Path) -> Path:
    """Return where a new enough setuptools lies, fetched where there is none."""
    found = importlib.util.find_spec("setuptools")
    if found and int(importlib.metadata.version("setuptools").partition(".")[0]) >= int(NEWER):
        return Path(str(found.origin)).parents[1]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    done = subprocess.run([*command, f"setuptools>={NEWER}"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"there is no setuptools>={NEWER}, and none can be fetched")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist from a copy of the checkout, and the wheel from the sdist."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("there is no pip")
    folder = tmp_path_factory.mktemp("packaging")
    backend = str(build_backend(folder / "backend"))
    copy = folder / "checkout"
    rubbish = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_c*")
    shutil.copytree(ROOT, copy, ignore=rubbish)
    output("-c", BUILD, "build_sdist", folder, cwd=copy, PYTHONPATH=backend)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # Python 3.11.4 and newer ask for a filter.
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    output("-c", BUILD, "build_wheel", folder, cwd=unpacked, PYTHONPATH=backend)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone; return the folder, in which there is nothing else."""
    site = tmp_path_factory.mktemp("site")
    command = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site)
    output(*command, built[1], cwd=site)
    return site


def tool(site: Path, cwd: Path, *words: object, **env: str) -> str:
    return output("-m", "cupy_moe_ar", *words, cwd=cwd, PYTHONPATH=str(site), **env)


def relative(folder: Path, pattern: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern) if path.is_file()}


def test_the_wheel_holds_package_kernels_and_scripts(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    inside = {name.removeprefix("cupy_moe_ar/") for name in names if "dist-info" not in name}
    package = relative(ROOT / "cupy_moe_ar", "*.py") | {"py.typed"}
    assert package <= inside
    kernels = set().union(*(relative(sources(), f"*.{kind}") for kind in ("cu", "cuh", "cpp", "h")))
    assert {f"cuda_src/{name}" for name in kernels} <= inside
    scripts = {path.name for path in (ROOT / "scripts").glob("*.py")} | {"baseline.cu"}
    assert {f"scripts/{name}" for name in scripts} <= inside
    assert not [name for name in names if name.startswith(("tests", "docs")) or "/tests/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_tests_and_docs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "docs", "scripts", "cuda_src"):
        kinds = ("*.py", "*.md", "*.sh", "*.cu", "*.cuh", "*.cpp", "*.h")
        files = set().union(*(relative(ROOT / folder, kind) for kind in kinds))
        assert {f"{folder}/{name}" for name in files} <= names
    assert "CHANGELOG.md" in names


def test_the_wheel_alone_passes_check(installed: Path, tmp_path: Path) -> None:
    told = tool(installed, tmp_path, "info", "--no-probe")
    assert f"{installed}/cupy_moe_ar, kernels {installed}/cupy_moe_ar/cuda_src" in told
    told = tool(installed, tmp_path, "check", "--ranks", 2, MOE_AR_BACKEND="cpu")
    assert told.splitlines()[-1].startswith("PASS")


def test_the_wheel_alone_runs_the_demo_and_the_benchmark(installed: Path, tmp_path: Path) -> None:
    small = ("--in-process", 2, "--hidden", 512, "--tokens", 1)
    told = tool(installed, tmp_path, "demo", *small, MOE_AR_BACKEND="cpu")
    assert "all held" in told
    out = tmp_path / "rows.json"
    tool(installed, tmp_path, "bench", out, *small, "--replays", 1, MOE_AR_BACKEND="cpu")
    (row,) = json.loads(out.read_text())
    assert row["bits_equal"]
    assert row["commit"].startswith("wheel ")


def test_the_wheel_alone_precompiles(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    words = ("--arch", "sm_90a", "--ranks", 2, "--operation", "allreduce")
    told = tool(installed, tmp_path, "precompile", "--out", tmp_path / "kernels", *words)
    assert told.startswith("2 kernel modules")
    assert len(list((tmp_path / "kernels").glob("*.cubin"))) == 2
