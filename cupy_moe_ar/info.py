"""What is installed here, which devices there are and what they share, and what is wrong with it.

What is found out is apart from what is concluded where a conclusion is worth a test of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import __version__
from .compile import cache_folder, cxx_version, nvrtc_version, prebuilt_folders, sources
from .cuda_backend import device_count, place_on
from .errors import CompileError, MoeArError, UnsupportedError
from .group import Group, as_group
from .launch import device_limits, driver_version, version_problem
from .sharing import Place, why_not_shared
from .symmetric import CudaSlab, HostSlab, SymmetricMemory
from .terminal import launcher_rank
from .testing import spawn_ranks

__all__ = ["Report", "gather", "launcher_problem", "link_words", "links"]

_PACKAGES = (
    *("cupy-moe-ar", "numpy", "ml_dtypes", "mpi4py", "cupy-cuda12x", "cupy-cuda13x", "cupy"),
    *("cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "mpich", "openmpi", "torch"),
)
_CUPYS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_VARIABLES = re.compile(r"MOE_AR_|CXX$|TMPDIR$|CUDA_|OMPI_COMM_WORLD_SIZE$|PMIX?_SIZE$|NVIDIA_VIS")
_ASK_MPI = """import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, MPI.Get_library_version().strip("\\0 "), sep="\\n")"""
_BUS_ID = len("04:00.0")  # nvidia-smi and CUDA write the domain before it differently
_PROBE_BYTES = 2 << 20
_PROBE_S = 120.0
_MOST_RANKS = 8


@dataclass
class Report:
    """What was found.

    Attributes:
        facts: Lines of a name and words.
        problems: What is wrong, each with its remedy.
        backends: Those that can be used.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)

    def fact(self, name: str, words: object) -> None:
        """Note a fact."""
        self.facts.append((name, str(words)))

    def problem(self, words: object) -> None:
        """Note a problem."""
        self.problems.append(str(words))

    def lines(self) -> list[str]:
        """Lay it out for people."""
        width = max(len(name) for name, _ in self.facts)
        text = [f"{name:<{width}}  {words}" for name, words in self.facts]
        text += ["", *(f"problem {i}: {words}" for i, words in enumerate(self.problems, 1))]
        count = len(self.problems)
        usable = " and ".join(self.backends) or "none"
        text.append(f"usable backends: {usable}; {count} problem{'s' * (count != 1)}")
        return text


def gather(*, probe: bool = True) -> Report:
    """Look at this machine; needs neither a GPU nor CuPy nor MPI.

    Args:
        probe: Also start processes that share memory, on the GPUs where there are some.
    """
    report = Report()
    _software(report)
    _mpi(report)
    gpus = _devices(report)
    _compilers(report, gpus)
    _folders(report)
    found = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}
    report.fact("environment", ", ".join(f"{name}={x}" for name, x in found.items()) or "-")
    if probe:
        _share(report, gpus)
    return report


def _software(report: Report) -> None:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    report.fact("package", f"{__version__}, {Path(__file__).parent}, kernels {sources()}")
    report.fact("python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    report.fact("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))
    several = [name for name in _CUPYS if name in versions]
    if len(several) > 1:
        report.problem(
            f"{' and '.join(several)} are both installed and overwrite each other's files. Remedy: "
            f"pip uninstall {' '.join(several)}, then install the one for this driver's CUDA"
        )


# ---- MPI -----------------------------------------------------------------------------------------


def _mpi(report: Report) -> None:
    try:
        version, library = _mpi_library()
    except UnsupportedError as error:
        report.fact("MPI", "not usable")
        report.problem(
            f"mpi4py is not usable: {error}. Remedy: pip install 'cupy_moe_ar[mpi]'; or do without "
            "MPI: check --ranks R, threads (Workspace.init_all), or any group of ranks as comm"
        )
        return
    report.fact("MPI", f"mpi4py {version} on {library}")
    launcher = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    launcher = launcher or shutil.which("mpirun") or shutil.which("mpiexec")
    told = _output([launcher, "--version"]) if launcher else ""
    if launcher:
        lines = [" ".join(line.split()) for line in told.splitlines() if re.search(r"\d\.\d", line)]
        family = _family(told) or "unknown MPI"
        report.fact("mpirun", f"{launcher}, {family}, {lines[0] if lines else told}")
    problem = launcher_problem(library, launcher, told)
    if launcher_rank() is not None:
        try:
            report.fact("ranks", as_group(None).Get_size())
        except UnsupportedError as error:
            problem = str(error)
    if problem:
        report.problem(problem)


def _mpi_library() -> tuple[str, str]:
    """Return mpi4py's version and its MPI's name, by a process of its own: nothing is joined."""
    command = [sys.executable, "-c", _ASK_MPI]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout.splitlines()
    if done.returncode or len(told) < 2:
        raise UnsupportedError(done.stderr.strip().rpartition("\n")[2] or "its MPI ended Python")
    return told[0], " ".join(told[1].split())


def _family(words: str) -> str | None:
    text = words.lower()
    families = {
        "Intel MPI": ("intel(r) mpi",),
        "Open MPI": ("open mpi", "openrte", "open-mpi"),
        "MPICH": ("mpich", "hydra"),
    }
    return next((name for name, signs in families.items() if any(s in text for s in signs)), None)


def launcher_problem(library: str, launcher: str | None, told: str) -> str | None:
    """Say why `mpirun` cannot start ranks of mpi4py's MPI; None if it can, as far as is known.

    Args:
        library: Name of mpi4py's MPI.
        launcher: Path of mpirun; None where there is none.
        told: What it says of its version.
    """
    if launcher is None:
        return (
            f"there is no mpirun or mpiexec on PATH, and mpi4py uses {library}. Remedy: put that "
            "MPI's bin folder on PATH, or pip install 'cupy_moe_ar[mpi]' (MPICH); check --ranks R "
            "needs none"
        )
    families = _family(library), _family(told)
    if None in families or families[0] == families[1]:
        return None
    return (
        f"{launcher} is of {families[1]}, but mpi4py uses {library}: each process would believe "
        f"that it is alone. Remedy: start ranks with the mpirun of {families[0]}, or build mpi4py "
        f"for {families[1]} (pip install --no-binary mpi4py mpi4py)"
    )


# ---- GPUs ----------------------------------------------------------------------------------------


def _devices(report: Report) -> list[int]:
    """Tell of the visible devices; return those that can be used."""
    smi = shutil.which("nvidia-smi")
    version = _driver(smi)
    try:
        import cupy

        runtime = cupy.cuda.runtime
        count = device_count()
        newest = ".".join(map(str, driver_version()))
        major, minor = divmod(runtime.runtimeGetVersion() // 10, 100)
    except Exception as error:  # of any library on the way to the driver
        report.fact("driver", version or "no NVIDIA driver")
        if version:
            report.problem(
                f"there is an NVIDIA driver, but GPUs cannot be used: {error}. Remedy: pip install "
                "'cupy_moe_ar[cuda13]' for a driver from 580 on, else 'cupy_moe_ar[cuda12]'"
            )
        return []
    report.fact("driver", version or "of unknown version")
    report.fact("CUDA", f"driver up to {newest}, CuPy {cupy.__version__} on {major}.{minor}")
    if not count:
        report.problem(
            "no CUDA device is visible. Remedy: see CUDA_VISIBLE_DEVICES; in a container use "
            "docker run --gpus all"
        )
    places: list[Place] = []
    for device in range(count):
        try:
            limits = device_limits(device)
        except MoeArError as error:
            report.problem(f"GPU {device} cannot be used: {error}. Remedy: leave it out of "
                           "CUDA_VISIBLE_DEVICES")  # fmt: skip
            continue
        places.append(place_on(device))
        report.fact(
            f"GPU {device}",
            f"{limits.name}, {limits.pci_bus_id}, {limits.arch}, {limits.sm_count} SMs, "
            f"{limits.uuid}, CUDA MPS {'on' if places[-1].mps else 'off'}",
        )
    if len(places) == count > 1:
        _peers(report, places, runtime, smi)
    return [place.visible.index(place.gpu) for place in places]


def _driver(smi: str | None) -> str:
    """Return the driver's version; "" where neither nvidia-smi nor /proc knows."""
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = re.match(r"\d+[.\d]+", _output(query)) if smi else None
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = found or re.search(r"(?<=  )\d+[.\d]+", text)
    return found[0] if found else ""


def _peers(report: Report, places: list[Place], runtime: Any, smi: str | None) -> None:
    topology = links(_output([smi, "topo", "-m"])) if smi else {}
    ids = _output([smi, "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]) if smi else ""
    lines = [line for line in ids.splitlines() if "," in line]
    index = {line[-_BUS_ID:].lower(): line.partition(",")[0] for line in lines}
    words: dict[tuple[int, int], str] = {}
    for one in range(len(places)):
        for other in range(one + 1, len(places)):
            ways = ((one, other), (other, one))
            access = [bool(runtime.deviceCanAccessPeer(*way)) for way in ways]
            names = [index.get(places[i].gpu[-_BUS_ID:].lower(), "") for i in (one, other)]
            link = topology.get((names[0], names[1]), "link unknown")
            words[one, other] = f"{link}, {'peer access' if all(access) else 'NO peer access'}"
            if not all(access):
                report.problem(why_not_shared(places, one, other, peer_access=False))
    for text, pairs in link_words(words).items():
        report.fact("links", f"{text}: {pairs}")


def links(matrix: str) -> dict[tuple[str, str], str]:
    """Read what `nvidia-smi topo -m` prints: by the indices of two GPUs the link's short name."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in matrix.splitlines()]
    head: list[str] = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    columns = [name for name in head if name.startswith("GPU") and name[3:].isdigit()]
    found = {}
    for row in rows:
        if row[:1] and row[0] in columns and len(row) > len(columns):
            for column, cell in zip(columns, row[1:], strict=False):
                found[row[0][3:], column[3:]] = cell
    return found


def link_words(pairs: Mapping[tuple[int, int], str]) -> dict[str, str]:
    """Return by words the pairs of GPUs that they hold for."""
    if len(set(pairs.values())) == 1 and len(pairs) > 1:
        return {next(iter(pairs.values())): f"all {len(pairs)} pairs"}
    grouped: dict[str, list[str]] = {}
    for (one, other), words in pairs.items():
        grouped.setdefault(words, []).append(f"GPU {one} and {other}")
    return {words: ", ".join(named) for words, named in grouped.items()}


# ---- compilers and folders -----------------------------------------------------------------------


def _compilers(report: Report, gpus: list[int]) -> None:
    prebuilt = any(folder.is_dir() for folder in prebuilt_folders())
    try:
        nvrtc = nvrtc_version()
        report.fact("NVRTC", ".".join(map(str, nvrtc)))
        problem = version_problem(nvrtc, driver_version()) if gpus else None
    except CompileError as error:
        report.fact("NVRTC", "not usable")
        problem = f"{error}" if gpus and not prebuilt else None
    if problem:
        report.problem(problem)
    if gpus and (prebuilt or not problem):
        report.backends.append("cuda")
    try:
        report.fact("C++ compiler", cxx_version().partition("\n")[0])
        report.backends.append("cpu")
    except CompileError as error:
        report.fact("C++ compiler", "none")
        if not gpus:
            report.problem(error)


def _folders(report: Report) -> None:
    cache = cache_folder()
    report.fact("cache", f"{cache}, {_contents([cache])}, {_free(cache)} free")
    if not os.access(_existing(cache), os.W_OK | os.X_OK):
        report.problem(
            f"compiled kernels cannot be kept, since {cache} cannot be written. Remedy: let "
            "MOE_AR_CACHE_DIR name a folder that can"
        )
    for folder in prebuilt_folders():
        report.fact("prebuilt", f"{folder}, {_contents([folder])}")
        if not any(folder.glob("*.*")):
            report.problem(
                f"MOE_AR_PREBUILT names {folder}, which holds no kernels. Remedy: fill it with "
                f"python -m cupy_moe_ar precompile --out {folder}"
            )
    report.fact("/dev/shm", f"{_free(Path('/dev/shm'))} free")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _contents(folders: Iterable[Path]) -> str:
    sizes = [path.stat().st_size for folder in folders for path in folder.glob("*.*")]
    return f"{len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB"


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(_existing(folder)).free / 2**20:.0f} MiB"
    except OSError as error:
        return str(error)


def _output(command: Sequence[str | None]) -> str:
    words = [word for word in command if word]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout.strip()


# ---- shared memory -------------------------------------------------------------------------------


def _share(report: Report, gpus: list[int]) -> None:
    """Let processes map, write and read each other's memory, on every GPU or on the CPU."""
    size = min(max(len(gpus), 2), _MOST_RANKS)
    where = {0: "", 1: ", on one GPU"}.get(len(gpus), ", a GPU each")
    name = "CUDA IPC" if gpus else "shared memory"
    outcomes = spawn_ranks(size, _map_and_probe, gpus, timeout_s=_PROBE_S)
    told = [x.value or (x.error or "").strip().rpartition("\n")[2] for x in outcomes]
    wrong = dict.fromkeys(filter(None, told))
    report.fact(name, f"{'does NOT work' if wrong else 'works'} between {size} processes{where}")
    for words in wrong:
        report.problem(words)


def _map_and_probe(group: Group, gpus: list[int]) -> str:
    """Share memory with the peers as a workspace does; return what went wrong."""

    def allocate() -> CudaSlab | HostSlab:
        if not gpus:
            return HostSlab(_PROBE_BYTES, Place.here())
        from cupy.cuda import runtime

        device = gpus[group.Get_rank() % len(gpus)]
        runtime.setDevice(device)
        return CudaSlab(_PROBE_BYTES, device, place_on(device))

    try:
        SymmetricMemory(group, allocate).close(_PROBE_S / 2)
    except MoeArError as error:
        return str(error)
    return ""
