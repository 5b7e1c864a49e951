"""Does the stress test notice a broken protocol? Each control plants one fault into the sources.

The kernels are a test build whose ranks are late at random before a push, between push and poll,
before a restore, before the epoch advances and at the end: without a fault they still pass.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cases import backend

from cupy_moe_ar import compile as compiling
from cupy_moe_ar.testing import run_ranks

SCRIPTS = str(Path(__file__).parent.parent / "scripts")
sys.path.insert(0, SCRIPTS)

import stress  # noqa: E402

pytestmark = pytest.mark.skipif(backend() != "cpu", reason="plants faults for the emulator")

LAMPORT = "moe_ar/lamport.cuh"
Edits = Sequence[tuple[str, str, str]]  # file, what stands there, what shall

FAULTS: dict[str, Edits] = {
    "one epoch only": [(LAMPORT, "(epoch_ != 0 ? p_.epoch_bytes : 0)", "0")],
    "no restore": [
        (LAMPORT, "      store(slots, empty());\n", ""),
        (LAMPORT, "if (writer != p_.rank) store(slots + j * writer_bytes(), empty());", ""),
    ],
    "no sanitise": [
        ("moe_ar/vec.cuh", "word = ptx::drop_negative_zero_bf16x2(word);", ""),
        ("moe_ar/vec.cuh", "word = word == 0x80000000u ? 0u : word;", ""),
    ],
    "last word not polled": [(LAMPORT, "v.w[3] == kEmptyWord;", "false;")],
    "tail not polled": [
        (LAMPORT, "for (const Vec16& v : payload.v) empty = empty || holds_empty_word(v);",
         "empty = holds_empty_word(payload.v[0]);"),
    ],
    "epochs of absent blocks stay": [(LAMPORT, "b < kMaxGridBlocks;", "b < step;")],
    "push before the grid dependency wait": [
        *((source, "  ptx::pdl_wait();\n", "") for source in ("oneshot.cu", "twoshot.cu")),
        *((source, "session.advance();\n", "ptx::pdl_wait(); session.advance();\n")
          for source in ("oneshot.cu", "twoshot.cu")),
    ],
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def import_path() -> Iterator[None]:
    yield
    sys.path.remove(SCRIPTS)


def run(
    folder: Path,
    edits: Edits,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    wire: str,
    launches: int,
    programmatic: bool,
) -> list[stress.Result]:
    """Stress kernels with these edits."""
    root = folder / "cuda_src"
    shutil.copytree(compiling.sources(), root)
    for name, old, new in edits:
        text = (root / name).read_text()
        assert text.count(old) == (3 if name.endswith(".cu") else 1), f"adapt this test: {old!r}"
        (root / name).write_text(text.replace(old, new))
    monkeypatch.setattr(compiling, "sources", lambda: root)
    monkeypatch.setenv("MOE_AR_BACKEND", "cpu")
    monkeypatch.setenv("MOE_AR_DELAYS", "1")
    options = stress.Options(
        seed=5,
        launches=launches,
        operations=("allreduce",),
        dtypes=(wire,),
        timeout_s=1.0,
        programmatic=programmatic,
    )
    return run_ranks(size, lambda group: stress.stress(group, options))


@pytest.mark.parametrize(
    ("size", "wire", "programmatic"), [(2, "bfloat16/float32", True), (3, "bfloat16", False)]
)
def test_delays_alone_harm_nothing(
    size: int, wire: str, programmatic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in run(tmp_path, [], monkeypatch, size, wire, 192, programmatic):
        assert (result.launches, result.failures) == (192, {})


@pytest.mark.parametrize(
    ("fault", "size", "wire"),
    [
        ("one epoch only", 2, "bfloat16/float32"),
        ("one epoch only", 3, "bfloat16"),
        ("no restore", 2, "bfloat16"),
        ("no restore", 3, "bfloat16"),
        ("no sanitise", 2, "bfloat16"),
        ("no sanitise", 2, "bfloat16/float32"),
        ("last word not polled", 2, "bfloat16"),
        ("tail not polled", 2, "bfloat16/float32"),
        ("epochs of absent blocks stay", 2, "bfloat16"),
        ("push before the grid dependency wait", 2, "bfloat16"),
    ],
)
def test_planted_fault_is_noticed(
    fault: str, size: int, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(tmp_path, FAULTS[fault], monkeypatch, size, wire, 1024, "grid" in fault)
    assert any(result.failures for result in results)
