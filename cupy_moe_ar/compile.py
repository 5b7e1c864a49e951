"""Compilers and the disk cache: from `cuda_src` to a cubin (NVRTC) or a shared library (g++).

An entry's key covers every file below `cuda_src`, all flags, the target and the compiler's version,
so an edited header is a miss. An entry ends with its own checksum and is published by an atomic
rename, so a corrupt one is a miss too, and any number of processes may share a cache.

Environment: `MOE_AR_CACHE_DIR` (default `~/.cache/cupy_moe_ar`), `MOE_AR_PREBUILT` (read-only
folders filled by `prebuild`, searched first, keyed without the compiler's version), `CXX`, and
`MOE_AR_SANITIZE` (`thread`, `address`, `undefined` or `address,undefined`; CPU builds only), and
`MOE_AR_DELAYS` (`1`: test builds that heed `Params.delays`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CompileError
from .formats import FORMATS
from .plan import KERNELS
from .types import DType

__all__ = [
    "CPU",
    "CUDA_TARGETS",
    "OPERATIONS",
    "QUANTISING",
    "Variant",
    "cache_folder",
    "compile_all",
    "compile_cpu",
    "compile_cuda",
    "cxx_version",
    "nvrtc_version",
    "prebuild",
    "prebuilt_folders",
    "sources",
]

CPU = "cpu"
CUDA_TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

OPERATIONS = {
    "moe_finalize": ("oneshot", "twoshot"),
    "moe_reduction": ("oneshot", "twoshot"),
    "allreduce": ("oneshot", "twoshot"),
    "moe_finalize_reduce_scatter": ("reduce_scatter",),
    "reduce_scatter": ("reduce_scatter",),
    "allgather": ("allgather",),
}
"""Names of operations, and the protocols that each of them has."""

QUANTISING = tuple(name for name in OPERATIONS if "reduce_scatter" not in name)
"""Names of operations with quantised outputs: those that have a norm."""

# config.cuh's numbers.
_PRODUCERS = {"moe_finalize": 0, "moe_finalize_reduce_scatter": 0, "moe_reduction": 2}  # else 1
_PROTOCOLS = {"oneshot": 0, "twoshot": 1, "reduce_scatter": 2, "allgather": 3}
_DTYPES = {DType.BFLOAT16: 0, DType.FLOAT16: 1, DType.FLOAT32: 2}
_QUANTS = [None, *FORMATS]
# Bits are part of the contract: no contraction, no flush to zero, no approximate division.
_NVRTC_FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
_CXX_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-fast-math")
_SEAL = b"\0moe_ar\0"  # 32 bytes of SHA-256 follow; ELF readers ignore what lies past the sections
_SEAL_BYTES = len(_SEAL) + 32

_log = logging.getLogger(__name__)
_emulator_lock = threading.Lock()


@dataclass(frozen=True)
class Variant:
    """What is fixed when a kernel module is compiled; everything else is a run-time parameter.

    Attributes:
        operation: One of `OPERATIONS`.
        protocol: One of the operation's.
        dtype: Element type of activations and outputs.
        comm_dtype: Element type that travels between ranks.
        world_size: Number of ranks.
        quant: Format of the quantised outputs; None is without.
    """

    operation: str
    protocol: str
    dtype: DType
    comm_dtype: DType
    world_size: int
    quant: str | None = None

    @property
    def source(self) -> str:
        """Source file, relative to `sources()`."""
        return "oneshot.cu" if self.protocol == "oneshot" else "twoshot.cu"

    @property
    def dense(self) -> bool:
        """Whether a rank's part of a token is a row as it is: nothing to gather."""
        return self.operation not in _PRODUCERS

    @property
    def kernel_name(self) -> str:
        """Name of the module, such as `moe_finalize_oneshot_bf16_w2`; profilers show it."""
        wire = "" if self.comm_dtype is self.dtype else f"_{self.comm_dtype.short}wire"
        name = self.operation
        if not name.endswith(self.protocol):
            name += f"_{self.protocol}"
        quant = "" if self.quant is None else f"_{self.quant}"
        return f"{name}_{self.dtype.short}{wire}_w{self.world_size}{quant}"

    @property
    def kernels(self) -> dict[str, str]:
        """Names of the module's kernels, by the part that comes after the module's name."""
        return {kernel: f"{self.kernel_name}_{kernel}" for kernel in KERNELS}

    @property
    def defines(self) -> dict[str, str]:
        """Macros that `config.cuh` reads."""
        return {
            "MOE_AR_PRODUCER": str(_PRODUCERS.get(self.operation, 1)),
            "MOE_AR_PROTOCOL": str(_PROTOCOLS[self.protocol]),
            "MOE_AR_DTYPE": str(_DTYPES[self.dtype]),
            "MOE_AR_COMM_DTYPE": str(_DTYPES[self.comm_dtype]),
            "MOE_AR_QUANT": str(_QUANTS.index(self.quant)),
            "MOE_AR_WORLD_SIZE": str(self.world_size),
            "MOE_AR_KERNEL_NAME": self.kernel_name,
            "MOE_AR_DELAYS": "1" if os.environ.get("MOE_AR_DELAYS") == "1" else "0",
        }


def sources() -> Path:
    """Return the folder of the kernel sources: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise CompileError(f"no folder cuda_src in or beside {package}: the installation is incomplete")


def compile_cuda(variant: Variant, arch: str) -> Path:
    """Return the cubin of `variant` for `arch` (such as `sm_90a`), compiled now if need be.

    Needs neither a GPU nor a driver, and no NVRTC where a prebuilt cubin fits.

    Raises:
        CompileError: NVRTC is missing or refuses the source (the message holds its log), or the
            cache cannot be written.
    """
    return _find_or_build(_cuda_build(variant, arch))


def compile_cpu(variant: Variant) -> Path:
    """Return the shared library that runs `variant` in the CPU emulator, compiled if need be.

    With `MOE_AR_SANITIZE` the process that loads it must have preloaded the sanitizer's runtime.

    Raises:
        CompileError: There is no C++ compiler, it refuses the source (the message holds its log),
            `MOE_AR_SANITIZE` is wrong, or the cache cannot be written.
    """
    return _find_or_build(_cpu_build(variant))


def compile_all(variants: Iterable[Variant], *targets: str) -> dict[tuple[Variant, str], Path]:
    """Compile every variant for every target (`CPU` or an `sm_*`) in parallel threads.

    What is not in the cache is counted: a log record as each is done has `progress`, a pair of
    numbers.

    Raises:
        CompileError: As `compile_cuda` and `compile_cpu`; the first failure in order.
    """
    jobs = [(variant, target) for variant in variants for target in targets]
    paths = {job: path for job in jobs if (path := _find(_build(*job)))}
    missing = [job for job in jobs if job not in paths]

    def told(number: int) -> None:
        if missing:
            progress = {"progress": (number, len(missing))}
            _log.info("compiled %d of %d", number, len(missing), extra=progress)

    told(0)
    # NVRTC runs without the GIL and without a lock of its own: threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(_find_or_build, _build(*job)): job for job in missing}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                if future.exception():
                    break
                told(number)
            paths |= {job: future.result() for future, job in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)
    return {job: paths[job] for job in jobs}


def prebuild(variants: Iterable[Variant], targets: Iterable[str], folder: Path) -> list[Path]:
    """Compile into `folder`, for use as a `MOE_AR_PREBUILT` folder on this or another machine."""
    paths = []
    for job, path in compile_all(variants, *targets).items():
        paths.append(folder / _build(*job).file_name())
        _publish(paths[-1], path.read_bytes()[:-_SEAL_BYTES])
    return paths


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version; a CompileError says how to install it."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


@dataclass(frozen=True)
class _Build:
    """One entry of the cache: its name, what it depends on besides the sources, how it is made."""

    stem: str
    suffix: str
    flags: tuple[str, ...]
    compiler: Callable[[], str]
    make: Callable[[], bytes]

    def file_name(self, compiler: str = "any") -> str:
        digest = hashlib.sha256(repr((self.stem, self.flags, compiler)).encode())
        root = sources()
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                data = path.read_bytes()
                digest.update(f"\0{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
                digest.update(data)
        return f"{self.stem}.{digest.hexdigest()[:12]}{self.suffix}"


def _build(variant: Variant, target: str) -> _Build:
    return _cpu_build(variant) if target == CPU else _cuda_build(variant, target)


def _cuda_build(variant: Variant, arch: str) -> _Build:
    flags = (f"-arch={arch}", *_NVRTC_FLAGS, "-lineinfo", *_macros(variant))
    stem = f"{variant.kernel_name}.{arch}"
    make = functools.partial(_run_nvrtc, variant.source, flags, stem)
    return _Build(stem, ".cubin", flags, lambda: f"NVRTC {nvrtc_version()}", make)


def _cpu_build(variant: Variant | None) -> _Build:
    """Describe a variant's library, or for None the emulator's object that goes into each."""
    sanitize = os.environ.get("MOE_AR_SANITIZE", "")
    flags = (*_CXX_FLAGS, *_host_flags())
    if sanitize:
        # -O1 hides fewer faults than -O2; both flags halve the time that it takes.
        flags += (f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-O1", "-g1")
    target = "-".join(filter(None, (CPU, platform.machine(), *sanitize.split(","))))
    if variant is None:
        make = functools.partial(_run_cxx, "cpu/emulator.cpp", flags, ("-c",))
        return _Build(f"emulator.{target}", ".o", flags, cxx_version, make)
    flags += _macros(variant)

    def link() -> bytes:
        with _emulator_lock:  # the first thread compiles it, the others find it
            emulator = _find_or_build(_cpu_build(None))
        return _run_cxx(variant.source, flags, ("-shared", str(emulator)))

    return _Build(f"{variant.kernel_name}.{target}", ".so", flags, cxx_version, link)


def _macros(variant: Variant) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in variant.defines.items())


def prebuilt_folders() -> list[Path]:
    """Return the folders that `MOE_AR_PREBUILT` names."""
    return [Path(name) for name in os.environ.get("MOE_AR_PREBUILT", "").split(os.pathsep) if name]


def cache_folder() -> Path:
    """Return the folder that compiled kernels are written to."""
    return Path(os.environ.get("MOE_AR_CACHE_DIR") or "~/.cache/cupy_moe_ar").expanduser()


def _find(build: _Build) -> Path | None:
    """Return an intact entry of a prebuilt folder or of the cache."""
    name = build.file_name()
    for folder in prebuilt_folders():
        if _intact(folder / name):
            return folder / name
        _log.info("%s has no intact %s", folder, name)
    path = cache_folder() / build.file_name(build.compiler())
    return path if _intact(path) else None


def _find_or_build(build: _Build) -> Path:
    while True:
        found = _find(build)
        if found:
            return found
        path = cache_folder() / build.file_name(build.compiler())
        _log.info("compiling %s", path)
        data = build.make()
        if build.file_name(build.compiler()) == path.name:  # else a source was edited meanwhile
            _publish(path, data)
            return path


def _intact(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    return body[:4] == b"\x7fELF" and seal == _SEAL + hashlib.sha256(body).digest()


def _publish(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data + _SEAL + hashlib.sha256(data).digest())
            os.chmod(temporary, 0o644)  # users may share a cache
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise CompileError(
            f"cannot write {path}: {error}; let MOE_AR_CACHE_DIR name a writable folder"
        ) from error


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(
            f"NVRTC, NVIDIA's run-time compiler, is not usable: {error}. Install it with "
            "pip install 'cupy_moe_ar[cuda12]' or, where the driver is of CUDA 13, "
            "'cupy_moe_ar[cuda13]'; or let MOE_AR_PREBUILT name a folder of prebuilt cubins"
        ) from error
    return nvrtc


def _run_nvrtc(source: str, flags: tuple[str, ...], what: str) -> bytes:
    nvrtc = _nvrtc()

    def fetch(get_size: Any, get: Any) -> bytes:
        _, size = get_size(program)
        buffer = bytearray(size)  # not bytes: Python shares those of length 1, and this is filled
        get(program, buffer)
        return bytes(buffer)

    path = sources() / source  # absolute, so that profilers find the source
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), os.fsencode(path), 0, [], [])
    try:
        options = [os.fsencode(flag) for flag in (*flags, f"-I{sources()}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        words = log.rstrip(b"\0").decode(errors="replace").strip()
        if status:
            version = "{}.{}".format(*nvrtc_version())
            raise CompileError(f"NVRTC {version} cannot compile {what}: {status.name}\n{words}")
        if words:
            _log.info("NVRTC on %s: %s", what, words)
        return fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cxx() -> list[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CompileError(
        f"no C++ compiler ({wanted[0] if wanted else 'g++, c++, clang++'} not found), which the "
        "CPU backend needs: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora) or "
        "conda install -c conda-forge gxx; or let CXX name one"
    )


def cxx_version() -> str:
    """Return the C++ compiler's command and version; a CompileError says how to install one."""
    command = [*_cxx(), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{shlex.join(command)}: {done.stdout}"


def _run_cxx(source: str, flags: tuple[str, ...], more: tuple[str, ...]) -> bytes:
    root = sources()
    includes = (f"-I{root / 'cpu'}", f"-I{root}")  # cpu first: its <moe_ar/ptx.cuh> is the one
    # Without GNU's unique symbols no two libraries of a process share an emulator's state.
    unique = () if "clang" in cxx_version() else ("-fno-gnu-unique",)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        inputs = ("-x", "c++", str(root / source), "-x", "none", *more)
        command = [*_cxx(), *flags, *unique, *includes, *inputs, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = f"{shlex.join(command)}\n{done.stderr.strip()}"
            raise CompileError(f"the C++ compiler cannot compile {source}\n{words}")
        return output.read_bytes()


def _host_flags() -> tuple[str, ...]:
    """Return the flags of this CPU's half conversions and fused multiply-adds (x86 only)."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    x86 = platform.machine() == "x86_64"
    return tuple(f"-m{name}" for name in ("f16c", "fma") if x86 and name in words)
