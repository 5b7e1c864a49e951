"""Are faults of the protocol noticed? Each control plants one into the sources.

What the stress test runs is a test build whose ranks are late at random before a push, between push
and poll, before a restore, before the epoch advances and at the end: without a fault they still
pass.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from cases import Rank, Ranks, backend, check, crowded, edit_source, finalize, random_case

from cupy_moe_ar import Workspace, WorkspaceError
from cupy_moe_ar import compile as compiling
from cupy_moe_ar.plan import LaunchShape
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


def plant(folder: Path, edits: Edits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels made of a copy of the sources with these edits."""
    root = folder / "cuda_src"
    shutil.copytree(compiling.sources(), root)
    for name, old, new in edits:
        edit_source(root / name, old, new, 3 if name.endswith(".cu") else 1)
    monkeypatch.setattr(compiling, "sources", lambda: root)
    monkeypatch.setenv("MOE_AR_BACKEND", "cpu")


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
    plant(folder, edits, monkeypatch)
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


@pytest.mark.parametrize("waits", [False, True])
def test_a_warp_that_nobody_waits_for_may_starve(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three groups of a row, two blocks of two warps: the last has none, and runs last of all.

    Were it to wait for rows' totals, it would find that the mbarrier's phases have gone round.
    """
    pick = "const u32 pick = static_cast<u32>(next_random(rt) % rt.queue_size);\n"
    starved = """u32 pick = static_cast<u32>(next_random(rt) % rt.queue_size);
    for (u32 i = 0; i < rt.queue_size; ++i) {
      const Fiber& fiber = *rt.queue[(rt.queue_head + pick) & rt.queue_mask];
      if (fiber.block_index % 2 == 0 || fiber.thread_index < kWarp) break;
      pick = (pick + 1) % rt.queue_size;
    }
"""
    leaves = "kLeaves && kVectors == 1 && reduction.spread() &&"
    edits = [("cpu/emulator.cpp", pick, starved)]
    if waits:
        edits.append(("moe_ar/row.cuh", leaves, f"false && {leaves}"))
    plant(tmp_path, edits, monkeypatch)
    monkeypatch.setenv("MOE_AR_CPU_SEED", "1")
    case = random_case(1, 16, 3 * 32 * 8)

    def body(rank: Rank, workspace: Workspace) -> None:
        judged = pytest.raises(WorkspaceError, match="deadlock") if waits else nullcontext()
        with crowded(workspace, 1), judged:
            check(case, finalize(rank, workspace, case, launch_shape=LaunchShape(2, 64, "rows")))

    Ranks(1).with_workspace(case)(body)
