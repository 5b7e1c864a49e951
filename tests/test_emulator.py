"""The CPU emulator on small kernels (tests/cpu): what is right passes, what is planted is found."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_moe_ar import codecs
from cupy_moe_ar.cpu_backend import _LaunchConfig

ROOT = Path(__file__).parents[1]
SOURCES = (
    "cuda_src/cpu/emulator.cpp",
    *(
        f"tests/cpu/{name}"
        for name in ("kernels.cu", "row_sums.cu", "quotients.cu", "self_test.cpp")
    ),
)
INCLUDES = (f"-I{ROOT}/cuda_src/cpu", f"-I{ROOT}/cuda_src")
FLAGS = ("-std=c++20", "-O2", "-g", "-fPIC", "-pthread", "-ffp-contract=off")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")
BUILDS = {
    "plain": (),
    "ucontext": ("-DMOE_AR_EMULATOR_UCONTEXT",),  # what machines other than x86-64 use
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address",),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
}
CROSS = "aarch64-linux-gnu-g++"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
WRONG, DEADLOCK, WATCHDOG, MISUSE = 1, 11, 12, 13  # exit statuses of self_test
TSAN_REPORT, ASAN_REPORT = 66, 1


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function that compiles a build once: its executable, or a library for ctypes.

    Headers in a folder of the caller's go before those of the library where `row_sums.cu` is
    compiled.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]}")
    folder = tmp_path_factory.mktemp("emulator")
    numbers = itertools.count()

    @functools.cache
    def compile_once(*arguments: str) -> tuple[Path, str]:
        output = folder / f"output{next(numbers)}"
        command = [*compiler, *FLAGS, *arguments, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return output, done.stderr

    def compiled(*arguments: str) -> str:
        output, errors = compile_once(*arguments)
        assert not errors, errors
        return str(output)

    def build(name: str, headers: Path | None = None) -> Path:
        library = name == "library"
        flags = () if library else BUILDS[name]
        objects = []
        for source in SOURCES[:-1] if library else SOURCES:
            first = (f"-I{headers}",) if headers and "row_sums" in source else ()
            what = ("-c", "-x", "c++", str(ROOT / source))
            objects.append(compiled(*flags, *WARNINGS, *first, *INCLUDES, *what))
        return Path(compiled(*flags, *(("-shared",) if library else ()), *objects))

    return build


def run(executable: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(executable), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("build", BUILDS)
def test_barriers_shuffles_clusters_and_exchanges_are_right(built, build, seed):
    done = run(built(build), "clean", seed)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("planted", [1, 2])
@pytest.mark.parametrize("build", ["plain", "ucontext"])
def test_a_missing_barrier_gives_wrong_words(built, build, planted):
    done = run(built(build), "barrier", 1, planted)
    assert done.returncode == WRONG, done.stdout


def test_a_poll_of_one_word_is_found_by_some_interleaving(built):
    statuses = [run(built("plain"), "exchange", s, 1, 0.3).returncode for s in range(1, 9)]
    assert set(statuses) & {WRONG, WATCHDOG}, statuses


def test_slots_that_nobody_restores_give_stale_words(built):
    assert run(built("plain"), "exchange", 0, 2, 0.3).returncode in (WRONG, WATCHDOG)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("build", ["plain", "ucontext", "thread", "address"])
@pytest.mark.parametrize(
    ("planted", "status", "words"),
    [
        (1, DEADLOCK, "block 0: 63 in block_sync, 1 have returned; block 1: 64 have returned"),
        (2, DEADLOCK, "block 0: 32 in block_sync, 32 in shfl_xor_f32"),
        (3, WATCHDOG, "no progress for 0.3 s; block 0: 1 spinning, 63 in block_sync"),
        (4, MISUSE, "no multiple of 16"),
    ],
)
def test_a_launch_that_cannot_end_says_why_and_the_next_is_fine(
    built, build, seed, planted, status, words
):
    done = run(built(build), "stuck", seed, planted, 0.3)
    assert (done.returncode, words in done.stdout) == (status, True), done.stdout + done.stderr


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("build", ["plain", "ucontext", "thread", "address"])
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (5, "block 0: 64 in cluster_wait; block 1: 64 have returned"),
        (6, "block 0: 64 in tx_barrier_wait; block 1: 64 in tx_barrier_wait"),
        (7, "block 0: 64 in tx_barrier_wait; block 1: 64 in tx_barrier_wait"),
    ],
)
def test_a_cluster_that_waits_for_ever_is_found(built, build, seed, planted, words):
    done = run(built(build), "cluster", seed, planted)
    assert (done.returncode, words in done.stdout) == (DEADLOCK, True), done.stdout + done.stderr


@pytest.mark.parametrize("planted", [1, 2, 3])
def test_words_of_a_cluster_that_are_not_waited_for_are_wrong(built, planted):
    statuses = [run(built("plain"), "cluster", seed, planted).returncode for seed in range(1, 5)]
    # Or a block returns without them, and is then written to; or it misses a phase.
    assert set(statuses) <= {0, WRONG, MISUSE, DEADLOCK}
    assert statuses.count(0) < 3, statuses


OF_PEER = "is in the shared memory of another block"
NOT_KNOWN = "a TxBarrier is used, but no cluster_wait came after its init"
MISUSES = {
    "kNoInit": "a TxBarrier is used before tx_barrier_init",
    "kInitTwice": "tx_barrier_init twice",
    "kInitOfPeer": OF_PEER,
    "kInitAfterArrive": NOT_KNOWN,
    "kUseBeforeWait": f"{NOT_KNOWN}|used before tx_barrier_init",
    "kUseAfterArrive": f"{NOT_KNOWN}|used before tx_barrier_init",
    "kUnalignedBarrier": "no multiple of 8",
    "kExpectTwice": "tx_barrier_expect twice in a phase",
    "kExpectOfPeer": OF_PEER,
    "kWaitForPeer": OF_PEER,
    "kTooManyBytes": "4 bytes more in a phase than tx_barrier_expect was told",
    "kOtherBarrier": "st_async_u32 to a block counts on the barrier of another",
    "kWaitBeforeArrive": "cluster_wait without an arrive",
    "kArriveTwice": "cluster_arrive twice without a wait",
    "kStoreBeforeWait": r"access to block \d of the cluster, which may not have started",
    "kStoreToReturned": "access to block 1 of the cluster, which has returned",
    "kPlainStoreToPeer": OF_PEER,
    "kPlainLoadFromPeer": OF_PEER,
    "kPlaceOfPeer": OF_PEER,
    "kPlaceBeyondCluster": "block 2 of a cluster of 2",
    "kPlaceOutside": "is not in the cluster's shared memory",
    "kTwoTypes": "block_shared of two types in one block",
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("planted", MISUSES)
def test_misuse_of_a_cluster_is_named(built, seed, planted):
    header = (ROOT / "tests/cpu/kernels.h").read_text()
    names = re.findall(r"\w+", re.search(r"enum Misuse[^{]*{([^}]*)}", header)[1])
    assert names[1:] == list(MISUSES)
    done = run(built("plain"), "misuse", seed, names.index(planted))
    assert done.returncode == MISUSE, done.stdout
    assert re.search(MISUSES[planted], done.stdout), done.stdout


@pytest.fixture
def faulty(built, tmp_path):
    """Return faulty(build, pattern, replacement): a build with a fault in rmsnorm.cuh."""

    def build(name: str, pattern: str, replacement: str) -> Path:
        text = (ROOT / "cuda_src/moe_ar/rmsnorm.cuh").read_text()
        changed, count = re.subn(pattern, replacement, text)
        assert count, f"rmsnorm.cuh has no {pattern}"
        (tmp_path / "moe_ar").mkdir()
        (tmp_path / "moe_ar/rmsnorm.cuh").write_text(changed)
        return built(name, tmp_path)

    return build


def test_a_store_to_a_block_that_has_not_started_is_named(faulty):
    executable = faulty("plain", r"ptx::cluster_wait\(\)", "(void)0")
    for seed in range(4):
        done = run(executable, "row_sums", seed)
        assert done.returncode == MISUSE, done.stdout
        assert re.search(f"which may not have started|{NOT_KNOWN}", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("pattern", "replacement", "test", "words"),
    [
        (r"ptx::tx_barrier_wait\([^;]*\);", "", "row_sums", "data race"),
        (r"row_ & 1", "0", "row_sums", "data race"),  # one half for all rows
        (r"row_ >> 1 & 1", "0", "row_sums", "data race"),  # one parity for all rows
        (r"ptx::warp_sync\(\)", "(void)0", "row_sums", "data race"),
        (r"ptx::block_sync\(\)", "(void)0", "row_sums_of_blocks", "data race"),
        (r"groups \* kGroupBytes", "groups * kGroupBytes + 4", "row_sums", "deadlock"),
        (r"ptx::tx_barrier_init\(ready_ \+[^;]*\);", "", "row_sums", MISUSES["kNoInit"]),
        (r"ptx::cluster_arrive_relaxed\(\)", "(void)0", "row_sums", "without an arrive"),
    ],
)
def test_a_fault_in_the_sum_over_a_row_is_found(faulty, pattern, replacement, test, words):
    executable = faulty("thread", pattern, replacement)
    for seed in range(3):
        done = run(executable, test, seed)
        assert done.returncode in (TSAN_REPORT, DEADLOCK, MISUSE), done.stdout + done.stderr
        assert words in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "planted"),
    [
        ("barrier", 1),
        ("barrier", 2),
        ("shuffle", 1),  # a shuffle orders no memory
        ("cluster", 1),
        ("cluster", 2),
        ("cluster", 3),
        ("cluster", 4),  # nor does a cluster's barrier
        ("publish", 1),  # nor does a relaxed flag
    ],
)
def test_thread_sanitizer_reports_races_within_a_rank(built, kernel, planted, seed):
    done = run(built("thread"), kernel, seed, planted)
    assert done.returncode == TSAN_REPORT, done.stdout + done.stderr
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert "kernels.cu" in done.stderr


@pytest.mark.parametrize(
    ("planted", "words"), [(5, "use-after-poison"), (6, "heap-buffer-overflow")]
)
def test_address_sanitizer_reports_overruns(built, planted, words):
    done = run(built("address"), "stuck", 0, planted)
    assert done.returncode == ASAN_REPORT, done.stdout + done.stderr
    assert f"AddressSanitizer: {words}" in done.stderr


class QuotientParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("divisor", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class ConvertParams(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("what", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def launch(built):
    """Return launch(kernel's name, parameters)."""
    library = ctypes.CDLL(str(built("library")))
    library.moe_ar_emulator_error.restype = ctypes.c_char_p

    def run_kernel(name: str, params: ctypes.Structure) -> None:
        config = _LaunchConfig(4, 128, 1, 0, 0, 10.0)
        kernel = library[name]
        status = library.moe_ar_emulator_launch(kernel, ctypes.byref(params), ctypes.byref(config))
        assert status == 0, library.moe_ar_emulator_error()

    return run_kernel


@pytest.fixture(scope="module")
def convert(launch):
    """Return convert(what, input, count): the uint32 words that `count` threads give."""

    def convert(what: int, array: np.ndarray, count: int) -> np.ndarray:
        array = np.ascontiguousarray(array)
        output = np.empty(count, np.uint32)
        launch("convert", ConvertParams(array.ctypes.data, output.ctypes.data, count, what))
        return output

    return convert


ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
BFLOAT16 = ml_dtypes.bfloat16
QUIET = {"over": "ignore", "under": "ignore", "invalid": "ignore"}


def floats_around(dtype: type) -> np.ndarray:
    """Every value of a 16-bit type, every midpoint of two, the neighbours of both, and others."""
    values = ALL_HALVES[: 1 << 15].view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    steps = np.diff(values)
    with np.errstate(**QUIET):
        middles = values + np.append(steps, steps[-1]) / 2  # the last is where infinity begins
        near = np.concatenate([values, middles])
        near = np.concatenate(
            [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))]
        )
    words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    special = np.array([0, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1], np.uint32)
    return np.concatenate([near, -near, words.view(np.float32), special.view(np.float32)])


@pytest.mark.parametrize(("what", "dtype"), [(0, ml_dtypes.bfloat16), (1, np.float16)])
def test_packing_rounds_to_nearest_even_and_makes_nans_canonical(convert, what, dtype):
    x = floats_around(dtype)
    with np.errstate(**QUIET):
        expected = x.astype(dtype).view(np.uint16)
    expected[np.isnan(x)] = 0x7FFF
    pairs = np.stack([x, x[::-1]], axis=1)  # low half first
    got = convert(what, pairs, len(x))
    np.testing.assert_array_equal(got & 0xFFFF, expected)
    np.testing.assert_array_equal(got >> 16, expected[::-1])


def test_every_float16_unpacks(convert):
    got = convert(2, ALL_HALVES, 1 << 16)
    halves = ALL_HALVES.view(np.float16)
    expected = halves.astype(np.float32).view(np.uint32)
    expected[np.isnan(halves)] = 0x7FFFFFFF
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("what", "dtype"), [(3, ml_dtypes.bfloat16), (4, np.float16)])
def test_negative_zero_is_dropped_and_all_else_stays(convert, what, dtype):
    expected = ALL_HALVES.astype(np.uint32)
    expected[0x8000] = 0
    with np.errstate(**QUIET):
        expected[np.isnan(ALL_HALVES.view(dtype))] = 0x7FFF
    words = ALL_HALVES.astype(np.uint32) | ALL_HALVES[::-1].astype(np.uint32) << 16
    got = convert(what, words, 1 << 16)
    np.testing.assert_array_equal(got & 0xFFFF, expected)
    np.testing.assert_array_equal(got >> 16, expected[::-1])


def test_reciprocal_square_root(convert):
    words = np.random.default_rng(1).integers(1, 0x7F800000, 1 << 16, dtype=np.uint32)
    x = np.concatenate([words.view(np.float32), np.float32([1, 4, 1e-45])])
    got = convert(5, x, len(x)).view(np.float32)
    exact = 1 / np.sqrt(x.astype(np.float64))
    assert np.all(np.abs(got - exact) <= np.spacing(exact.astype(np.float32)))
    special = convert(5, np.float32([0.0, -0.0, np.inf, -1.0, np.nan]), 5).view(np.float32)
    np.testing.assert_array_equal(special, np.float32([np.inf, -np.inf, 0, np.nan, np.nan]))


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}")
def test_aarch64(tmp_path: Path) -> None:
    command = [CROSS, *FLAGS, *INCLUDES, "-x", "c++", *(str(ROOT / source) for source in SOURCES)]
    program = tmp_path / "self_test"
    done = subprocess.run([*command, "-o", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    aarch64 = 183
    assert int.from_bytes(program.read_bytes()[18:20], "little") == aarch64
    qemu = next(filter(None, map(shutil.which, QEMU)), None)
    if qemu is None:
        pytest.skip(f"compiled, but there is no {QEMU[0]} to run it")
    libraries = {"QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu", **os.environ}
    for seed in ("0", "7"):
        command = [qemu, str(program), "clean", seed]
        done = subprocess.run(command, env=libraries, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- codes of quantised outputs ------------------------------------------------------------------


@pytest.fixture(scope="module")
def floats() -> np.ndarray:
    """Every bfloat16 and float16 value, what lies around ties of E4M3 and E2M1, and others."""
    codes = [codecs.decode_e4m3(np.arange(127)), codecs.decode_e2m1(np.arange(8))]
    middles = np.concatenate([(values[1:] + values[:-1]) / np.float32(2) for values in codes])
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    beside = [np.nextafter(x, np.float32(to)) for x in (middles, powers) for to in (0, np.inf)]
    with np.errstate(**QUIET):
        halves = [ALL_HALVES.view(dtype).astype(np.float32) for dtype in (np.half, BFLOAT16)]
    words = np.random.default_rng(2).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    x = np.concatenate([middles, powers, *beside])
    every = np.concatenate([x, -x, *halves, words.view(np.float32)])
    return every[: len(every) // 4 * 4]


def test_e4m3_codes(convert, floats):
    got = convert(7, np.stack([floats, floats[::-1]], axis=1), len(floats))
    expected = codecs.encode_e4m3(floats)
    np.testing.assert_array_equal(got & 0xFF, expected)
    np.testing.assert_array_equal(got >> 8, expected[::-1])


def test_e2m1_codes(convert, floats):
    numbers = np.where(np.isnan(floats), np.float32(0), np.abs(floats))
    got = convert(8, numbers, len(numbers) // 4)
    nibbles = np.stack([got >> 4 * i & 15 for i in range(4)], axis=1)
    np.testing.assert_array_equal(nibbles.reshape(-1), codecs.encode_e2m1(numbers))
    assert (got >> 16 == 0).all()


def test_every_e4m3_code_has_its_value(convert):
    codes = np.arange(256, dtype=np.uint32)
    expected = codecs.decode_e4m3(codes).view(np.uint32)
    expected[[127, 255]] = 0x7FFFFFFF
    np.testing.assert_array_equal(convert(9, codes | 0xABCD00, 256), expected)


def test_codes_of_quotients_are_those_of_true_division(launch, floats):
    """Divisors of all sizes for all values, then quotients next to ties.

    The last group has those that a single correction could get wrong: it is right unless a quotient
    is within 3 * 2**-24 ulp of half an ulp beside a tie, and a tie has five bits. That takes a
    divisor whose 24 bits are a multiple of 2**20, more or less at most 6.
    """
    rng = np.random.default_rng(3)
    divisors = rng.integers(0, 1 << 32, len(floats), dtype=np.uint32).view(np.float32)
    mild = np.exp2(rng.uniform(-12, 12, len(floats))).astype(np.float32)
    ties = floats[: len(floats) // 8]
    ties = np.tile(ties[np.abs(ties) < 1e3], 64)
    near = np.exp2(rng.uniform(-100, 100, len(ties))).astype(np.float32)
    edges = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, 2**-90, 2**90])
    x = [floats, floats, *[ties * near * np.float32(1 + k * 2**-23) for k in (-1, 0, 1)]]
    d = [divisors, mild, near, near, near]
    x.append(np.tile(floats[:: len(floats) // 2000], len(edges)))
    d.append(np.repeat(edges, len(x[-1]) // len(edges)))
    near_multiples = (np.arange(32, 65)[:, None] * 2**18 + np.arange(-64, 65)).reshape(-1)
    ties = np.concatenate([np.arange(1, 16) * 2.0**-10, np.arange(17, 32, 2) * 2.0**-4])
    narrow = np.repeat(near_multiples.astype(np.float32), len(ties)) * np.float32(2**-23)
    exact = narrow.astype(np.float64) * np.tile(ties, len(near_multiples))
    for ulps in range(-2, 3):
        x.append((exact.astype(np.float32).view(np.int32) + ulps).view(np.float32))
        d.append(narrow)
    values, divisor = np.concatenate(x), np.concatenate(d)
    output = np.empty((len(values), 4), np.uint32)
    addresses = (a.ctypes.data for a in (values, divisor, output))
    launch("quotients", QuotientParams(*addresses, len(values)))
    with np.errstate(divide="ignore", **QUIET):
        quotient = values / divisor
    usable = (divisor != 0) & ~np.isinf(divisor)
    number = np.where(np.isnan(quotient), 0, np.abs(quotient))
    codes = codecs.encode_e4m3(quotient) | codecs.encode_e2m1(number).astype(np.uint32) << 8
    for way in (0, 1):
        np.testing.assert_array_equal(output[:, way], np.where(usable, codes, 0))


def test_scales_of_maxima(launch, floats):
    """max / 448 as one division rounds it, and as a power of two that is not below."""
    maxima = np.abs(floats)
    fractions = np.arange(1 << 23, 1 << 24, 5, dtype=np.float32)
    powers = 448 * np.ldexp(np.float32(1), np.arange(-100, 119))
    maxima = np.concatenate([maxima, fractions, powers])
    with np.errstate(**QUIET):
        beside = [np.nextafter(maxima, np.float32(to)) for to in (0, np.inf)]
    maxima = np.concatenate([maxima, *beside])
    maxima = maxima[np.isfinite(maxima) & (maxima >= 2.0**-90)]
    output = np.empty((len(maxima), 4), np.uint32)
    addresses = (a.ctypes.data for a in (maxima, maxima, output))
    launch("quotients", QuotientParams(*addresses, len(maxima)))
    with np.errstate(**QUIET):
        quotient = maxima / np.float32(448)
        exact = maxima.astype(np.float64) / 448
    np.testing.assert_array_equal(output[:, 2].view(np.float32), quotient)
    np.testing.assert_array_equal(output[:, 3], codecs.encode_ue8m0(exact))
