from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_moe_ar import compile as compile_module
from cupy_moe_ar.compile import (
    CPU,
    CUDA_TARGETS,
    OPERATIONS,
    Variant,
    compile_all,
    compile_cpu,
    compile_cuda,
    nvrtc_version,
    prebuild,
    sources,
)
from cupy_moe_ar.errors import CompileError
from cupy_moe_ar.types import DType

ARCH = "sm_90a"
CROSS = "aarch64-linux-gnu-g++"
BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
REPOSITORY = Path(compile_module.__file__).parents[1]

try:
    nvrtc_version()
except CompileError as error:
    NVRTC_REASON = str(error)
else:
    NVRTC_REASON = ""
needs_nvrtc = pytest.mark.skipif(bool(NVRTC_REASON), reason=NVRTC_REASON)
both_targets = pytest.mark.parametrize("target", [CPU, pytest.param(ARCH, marks=needs_nvrtc)])

TOY = {
    "oneshot.cu": """
        #include <moe_ar/ptx.cuh>
        #include <moe_ar/value.cuh>
        KERNEL MOE_AR_KERNEL_NAME(float* out) {
          *out = out[1] * out[2] + out[3] / out[4] + kValue * MOE_AR_WORLD_SIZE + kBase;
        }
    """,
    "moe_ar/value.cuh": "constexpr int kValue = 1;\n",
    "moe_ar/ptx.cuh": '#define KERNEL extern "C" __global__ void\nconstexpr int kBase = 0;\n',
    "cpu/moe_ar/ptx.cuh": (
        '#define KERNEL extern "C" void\nextern "C" int base();\nconst int kBase = base();\n'
    ),
    "cpu/emulator.cpp": 'extern "C" int base() { return 40; }\n',
}


def variant(dtype: DType = BF16, comm_dtype: DType | None = None, world_size: int = 2) -> Variant:
    return Variant("moe_finalize", "oneshot", dtype, comm_dtype or dtype, world_size)


def compile_one(target: str) -> Path:
    return compile_cpu(variant()) if target == CPU else compile_cuda(variant(), target)


def run_cpu(library: Path) -> float:
    out = (ctypes.c_float * 5)(0, 0, 0, 0, 1)
    getattr(ctypes.CDLL(str(library)), variant().kernel_name)(out)
    return out[0]


class Elf:
    """A cubin's sections; of each name, type, flags, address, offset, size, link and three more."""

    def __init__(self, cubin: Path) -> None:
        self.data = data = cubin.read_bytes()
        (table,) = struct.unpack_from("<Q", data, 0x28)
        step, count, names = struct.unpack_from("<HHH", data, 0x3A)
        self.sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, table + i * step) for i in range(count)
        ]
        self.by_name = {self.text(names, section[0]): section for section in self.sections}

    def text(self, section: int, offset: int) -> str:
        start = self.sections[section][4] + offset
        return self.data[start : self.data.index(b"\0", start)].decode()


def resources(cubin: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return registers a thread by kernel, and bytes of stack a thread by kernel or subroutine.

    A register is spilled to the stack: no stack means no spills.
    """
    file = Elf(cubin)
    elf, sections, text = file.data, file.sections, file.text
    info = file.by_name[".nv.info"]
    symbols = sections[info[6]]
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    values = {0x2F: registers, 0x11: stack}  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
    at = info[4]
    while at < info[4] + info[5]:
        form, attribute, size = struct.unpack_from("<BBH", elf, at)
        if attribute in values:
            symbol, value = struct.unpack_from("<II", elf, at + 4)
            (name,) = struct.unpack_from("<I", elf, symbols[4] + 24 * symbol)
            values[attribute][text(symbols[6], name)] = value
        at += 4 + (size if form == 4 else 0)  # other forms hold the value where this has the size
    return registers, stack


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MOE_AR_PREBUILT", raising=False)
    monkeypatch.delenv("MOE_AR_SANITIZE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def toy(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a toy in place of the kernel sources."""
    root = tmp_path / "cuda_src"
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(compile_module, "sources", lambda: root)
    return root


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the sources that a compiler runs on."""
    recorded = []
    for name in ("_run_cxx", "_run_nvrtc"):
        run = getattr(compile_module, name)

        def wrapped(source, *args, run=run):
            recorded.append(source)
            return run(source, *args)

        monkeypatch.setattr(compile_module, name, wrapped)
    return recorded


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)


def test_variant_has_a_readable_name_and_its_macros():
    assert variant().kernel_name == "moe_finalize_oneshot_bf16_w2"
    wide = variant(F16, F32, 16)
    assert wide.kernel_name == "moe_finalize_oneshot_f16_f32wire_w16"
    assert wide.source == "oneshot.cu"
    half = Variant("moe_finalize_reduce_scatter", "reduce_scatter", F32, F32, 2)
    assert half.kernel_name == "moe_finalize_reduce_scatter_f32_w2"
    assert half.source == "twoshot.cu"
    quantised = Variant("allgather", "allgather", BF16, BF16, 2, "nvfp4")
    assert quantised.kernel_name == "allgather_bf16_w2_nvfp4"
    assert quantised.defines["MOE_AR_QUANT"] == "3"
    assert wide.defines == {
        "MOE_AR_PRODUCER": "0",
        "MOE_AR_PROTOCOL": "0",
        "MOE_AR_DTYPE": "1",
        "MOE_AR_COMM_DTYPE": "2",
        "MOE_AR_QUANT": "0",
        "MOE_AR_WORLD_SIZE": "16",
        "MOE_AR_KERNEL_NAME": wide.kernel_name,
        "MOE_AR_DELAYS": "0",
    }


def test_sources_are_found_in_the_checkout():
    assert (sources() / "moe_ar" / "config.cuh").is_file()


def test_cpu_library_runs_and_shadows_ptx(toy: Path, runs: list[str]):
    library = compile_cpu(variant())
    assert library.name.startswith("moe_finalize_oneshot_bf16_w2.cpu-")
    assert run_cpu(library) == 42
    assert runs == ["oneshot.cu", "cpu/emulator.cpp"] or runs == ["cpu/emulator.cpp", "oneshot.cu"]


@both_targets
def test_second_compile_is_a_hit(toy: Path, runs: list[str], target: str):
    first = compile_one(target)
    count = len(runs)
    assert compile_one(target) == first
    assert len(runs) == count


@both_targets
@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_any_change_below_the_sources_is_a_miss(toy: Path, target: str, change: str):
    first = compile_one(target)
    if change == "edit":
        (toy / "moe_ar" / "value.cuh").write_text("constexpr int kValue = 2;\n")
    elif change == "add":
        (toy / "moe_ar" / "new.cuh").touch()
    else:
        (toy / "moe_ar" / "value.cuh").rename(toy / "value.inc")
        (toy / "moe_ar" / "value.cuh").symlink_to(toy / "value.inc")
    second = compile_one(target)
    assert second != first
    if target == CPU and change == "edit":
        assert (run_cpu(first), run_cpu(second)) == (42, 44)


def test_cpu_emulator_is_compiled_once_for_all_variants(toy: Path, runs: list[str]):
    variants = [variant(world_size=w) for w in (1, 2, 3, 4)]
    built = compile_all(variants, CPU)
    assert list(built) == [(v, CPU) for v in variants]
    assert len(set(built.values())) == 4
    assert runs.count("cpu/emulator.cpp") == 1


@needs_nvrtc
def test_key_covers_architecture_variant_and_compiler(toy: Path, monkeypatch: pytest.MonkeyPatch):
    paths = set(compile_all([variant(), variant(F16)], "sm_80", ARCH).values())
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: (99, 0))
    paths.add(compile_cuda(variant(), ARCH))
    assert len(paths) == 5


@needs_nvrtc
def test_key_does_not_cover_where_the_sources_lie(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
):
    first = compile_cuda(variant(), ARCH)
    toy.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(compile_module, "sources", lambda: tmp_path / "elsewhere")
    assert compile_cuda(variant(), ARCH) == first
    assert len(runs) == 1


@both_targets
@pytest.mark.parametrize("fault", ["empty", "cut", "bit", "zeros", "short"])
def test_corrupt_entry_is_a_miss(toy: Path, runs: list[str], target: str, fault: str):
    path = compile_one(target)
    good = path.read_bytes()
    bad = {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "bit": good[:999] + bytes([good[999] ^ 1]) + good[1000:],
        "zeros": bytes(len(good)),
        "short": b"\x7fELF",
    }[fault]
    path.write_bytes(bad)
    runs.clear()
    assert compile_one(target) == path
    assert len(path.read_bytes()) == len(good)
    assert runs == ["oneshot.cu"]


@both_targets
def test_error_holds_the_compilers_log(toy: Path, cache: Path, target: str):
    (toy / "moe_ar" / "value.cuh").write_text("constexpr int kValue = nonsense;\n")
    with pytest.raises(CompileError, match=r"oneshot(?s:.*)value\.cuh(?s:.*)nonsense"):
        compile_one(target)
    assert not list(cache.glob("moe_finalize*"))


@both_targets
def test_source_edited_during_compilation_is_compiled_again(
    toy: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, target: str
):
    name = "_run_cxx" if target == CPU else "_run_nvrtc"
    run = getattr(compile_module, name)
    edits = ["constexpr int kValue = 3;\n"]

    def edit_and_run(source, *args):
        if source == "oneshot.cu" and edits:
            (toy / "moe_ar" / "value.cuh").write_text(edits.pop())
        return run(source, *args)

    monkeypatch.setattr(compile_module, name, edit_and_run)
    path = compile_one(target)
    assert list(cache.glob("moe_finalize*")) == [path]
    assert compile_one(target) == path
    if target == CPU:
        assert run_cpu(path) == 46


def test_missing_cxx_compiler_says_what_to_install(toy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O9")
    with pytest.raises(CompileError, match=r"no-such-compiler not found.*apt-get install g\+\+"):
        compile_cpu(variant())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(toy))
    with pytest.raises(CompileError, match=r"g\+\+, c\+\+, clang\+\+ not found.*conda"):
        compile_cpu(variant())


def test_missing_nvrtc_says_what_to_install(toy: Path, no_nvrtc: None):
    with pytest.raises(CompileError, match=r"pip install 'cupy_moe_ar\[cuda12\]'"):
        compile_cuda(variant(), ARCH)


@needs_nvrtc
def test_unknown_architecture_is_an_error(toy: Path):
    with pytest.raises(CompileError, match="sm_12345"):
        compile_cuda(variant(), "sm_12345")


@pytest.mark.parametrize("target", [CPU, ARCH])
def test_unwritable_cache_says_the_remedy(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(compile_module, "_run_nvrtc", lambda *_: b"")
    with pytest.raises(CompileError, match="MOE_AR_CACHE_DIR"):
        compile_one(target)


@needs_nvrtc
def test_prebuilt_comes_first_and_needs_no_compiler(
    toy: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "prebuilt"
    (path,) = prebuild([variant()], [ARCH], folder)
    assert list(folder.iterdir()) == [path]
    for entry in cache.iterdir():
        entry.unlink()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setenv("MOE_AR_PREBUILT", f"{tmp_path}{os.pathsep}{folder}")
    assert compile_cuda(variant(), ARCH) == path
    with pytest.raises(CompileError, match="NVRTC"):
        compile_cuda(variant(), "sm_80")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CompileError, match="NVRTC"):
        compile_cuda(variant(), ARCH)


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}")
@pytest.mark.parametrize(("operation", "protocol"), [("moe_finalize", "oneshot"),
                                                     ("allreduce", "twoshot")])  # fmt: skip
def test_kernels_compile_for_aarch64(
    cache: Path, monkeypatch: pytest.MonkeyPatch, operation: str, protocol: str
):
    monkeypatch.setenv("CXX", CROSS)
    monkeypatch.setattr(compile_module.platform, "machine", lambda: "aarch64")
    library = compile_cpu(Variant(operation, protocol, BF16, BF16, 2))
    assert "cpu-aarch64" in library.name
    aarch64 = 183
    assert int.from_bytes(library.read_bytes()[18:20], "little") == aarch64


@pytest.mark.parametrize("sanitize", ["thread", "address", "address,undefined"])
def test_sanitized_libraries_are_entries_of_their_own(
    toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, sanitize: str
):
    plain = compile_cpu(variant())
    monkeypatch.setenv("MOE_AR_SANITIZE", sanitize)
    path = compile_cpu(variant())
    assert path != plain
    assert sanitize.replace(",", "-") in path.name
    assert b"san" in path.read_bytes()
    assert len(list(cache.glob("emulator.*"))) == 2


def test_wrong_sanitizer_is_an_error(toy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOE_AR_SANITIZE", "nonsense")
    with pytest.raises(CompileError, match="nonsense"):
        compile_cpu(variant())


@both_targets
def test_processes_publish_side_by_side(toy: Path, cache: Path, target: str):
    program = (
        "import sys; from pathlib import Path; from cupy_moe_ar import compile as c;"
        "from cupy_moe_ar.types import DType as D;"
        f"c.sources = lambda: Path({str(toy)!r});"
        "v = c.Variant('moe_finalize', 'oneshot', D.BFLOAT16, D.BFLOAT16, 2);"
        f"print(*c.compile_all([v], {target!r}).values())"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert paths == {str(compile_one(target))}
    assert not list(cache.glob(".*"))


@needs_nvrtc
def test_floats_are_neither_contracted_nor_flushed_nor_approximated(toy: Path):
    ptx = compile_cuda(variant(), ARCH).read_bytes()  # -lineinfo keeps the PTX in the cubin
    assert b"div.rn.f32" in ptx
    assert b"mul" in ptx
    assert b"fma" not in ptx.replace(b"-fmad", b"")
    assert b".ftz" not in ptx


@needs_nvrtc
def test_resources_tell_spills(toy: Path):
    (toy / "oneshot.cu").write_text("""
        extern "C" __global__ void small(float* x) { *x += 1; }
        extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {
          float a[64];
          #pragma unroll
          for (int i = 0; i < 64; ++i) a[i] = x[threadIdx.x * 64 + i];
          __syncthreads();
          #pragma unroll
          for (int i = 0; i < 64; ++i) x[threadIdx.x * 64 + i] = a[i] * a[(i * 7 + 3) % 64];
        }
    """)
    registers, stack = resources(compile_cuda(variant(), ARCH))
    assert registers.keys() == stack.keys() == {"small", "spills"}
    assert registers["small"] <= 16
    assert stack["small"] == 0
    assert registers["spills"] == 32
    assert stack["spills"] > 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "quant", "converts"),
    [
        ("sm_80", "fp8_static", False),
        (ARCH, "fp8_static", True),
        (ARCH, "nvfp4", False),
        *((arch, "nvfp4", True) for arch in ("sm_100a", "sm_103a", "sm_120a")),
    ],
)
def test_codes_are_converted_by_the_hardware_that_can(
    cache: Path, arch: str, quant: str, converts: bool
):
    one = Variant("allreduce", "oneshot", BF16, BF16, 2, quant)
    instruction = {"fp8_static": b"e4m3x2.f32", "nvfp4": b"e2m1x2.f32"}
    ptx = compile_cuda(one, arch).read_bytes()  # -lineinfo keeps the PTX in the cubin
    assert (b".satfinite." + instruction[quant] in ptx) == converts


def early_waits(cubin: Path) -> dict[str, int]:
    """Count by kernel the instructions between last push and first poll that wait for loads since.

    Of Hopper's machine code: 16 bytes an instruction, of which bits 105 to 121 name the scoreboard
    that its result is announced by (7: none) and, a bit each, those of six that it waits for.
    """
    load, store = 0x981, 0x986

    def is_exchange(low: int, high: int, operation: int) -> bool:
        """Whether it is a relaxed.sys access to 16 bytes."""
        return low & 0xFFF == operation and high >> 13 & 15 == 10 and high >> 9 & 7 == 6

    def count(code: list[tuple[int, int]]) -> int:
        poll = next(i for i, words in enumerate(code) if is_exchange(*words, load))
        push = max(i for i in range(poll) if is_exchange(*code[i], store))
        pending: set[int] = set()
        found = 0
        for low, high in code[push + 1 : poll + 1]:
            waits = {board for board in range(6) if high >> 52 + board & 1}
            found += bool(waits & pending)
            pending -= waits
            if low & 0xFFF == load:
                pending.add(high >> 46 & 7)
        return found

    elf = Elf(cubin)
    code = {
        name.removeprefix(".text."): elf.data[section[4] : section[4] + section[5]]
        for name, section in elf.by_name.items()
        if name.startswith(".text.")
    }
    return {kernel: count(list(struct.iter_unpack("<QQ", words))) for kernel, words in code.items()}


# Each operation and protocol, where registers are short: many ranks, wide wires.
CROWDED = [
    variant(BF16, BF16, 2),
    variant(BF16, F32, 2),
    variant(F16, F16, 4),
    variant(BF16, BF16, 8),
    variant(F16, F32, 16),
    Variant("moe_finalize", "twoshot", BF16, F32, 2),
    Variant("moe_finalize", "twoshot", BF16, BF16, 8),
    Variant("moe_finalize_reduce_scatter", "reduce_scatter", BF16, F32, 8),
    Variant("moe_reduction", "oneshot", BF16, BF16, 8),
    Variant("moe_reduction", "twoshot", F16, F32, 4),
    Variant("allreduce", "oneshot", F16, F32, 8),
    Variant("allreduce", "twoshot", BF16, BF16, 16),
    Variant("reduce_scatter", "reduce_scatter", F32, F32, 2),
    Variant("allgather", "allgather", BF16, BF16, 8),
    Variant("moe_finalize", "twoshot", BF16, F32, 2, "fp8_per_token"),
    Variant("moe_reduction", "twoshot", F16, F32, 4, "fp8_per_token_group"),
    Variant("allreduce", "oneshot", F16, F32, 8, "nvfp4"),
    Variant("allgather", "allgather", BF16, BF16, 8, "mxfp8"),
]


@needs_nvrtc
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kernel_compiles_for_every_target_without_spills(operation: str):
    variants = [v for v in CROWDED if v.operation == operation]
    assert {v.protocol for v in variants} == set(OPERATIONS[operation])
    for (one, target), cubin in compile_all(variants, *CUDA_TARGETS).items():
        registers, stack = resources(cubin)
        assert registers.keys() == set(one.kernels.values()), (one, target)
        assert stack.keys() >= registers.keys(), (one, target)
        assert not any(stack.values()), (one, target, stack)
        if target == ARCH and one.protocol == "oneshot":
            waits = early_waits(cubin)
            assert waits.keys() == registers.keys(), one
            if one.operation != "allreduce" and one.quant is None:  # a norm lies in between
                del waits[one.kernels["rows2"]]
            assert not any(waits.values()), (one, waits)


@needs_nvrtc
def test_early_waits_are_found(toy: Path):
    kernel = """
        extern "C" __global__ void %s(int* p, int4* q, int at) {
          int4 v;
          asm volatile("st.relaxed.sys.global.v4.u32 [%%0], {%%1, %%1, %%1, %%1};"
                       ::"l"(q), "r"(at));
          int x = p[1];
          %s
          asm volatile("ld.relaxed.sys.global.v4.u32 {%%0, %%1, %%2, %%3}, [%%4];"
                       : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(q + 1) : "memory");
          p[2] = v.x + v.y + v.z + v.w + x;
        }
    """
    # Where x is stored first, the poll waits for its load, too.
    both = kernel % ("early", "p[0] = x + 1;") + kernel % ("late", "")
    (toy / "oneshot.cu").write_text(both)
    assert early_waits(compile_cuda(variant(), ARCH)) == {"early": 1, "late": 0}
