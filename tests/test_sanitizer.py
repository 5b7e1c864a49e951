"""Every kernel under ThreadSanitizer, on small cases: about a minute on two cores.

Ranks are threads of a spawned Python that has the sanitizer's runtime preloaded. Words of slots and
control words are atomics, whose order it does not judge; it sees shared memory, inputs, outputs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import backend

from cupy_moe_ar import compile as compiling
from cupy_moe_ar.compile import OPERATIONS
from cupy_moe_ar.errors import CompileError

REPORT = 66
TESTS = Path(__file__).parent

CHILD = """
import sys
from pathlib import Path

import cases
from cupy_moe_ar import compile as compiling
from cupy_moe_ar import ArgumentError
from cupy_moe_ar.plan import launch_shapes
from test_quant import OPTIONS, quantised
from test_twoshot import PRODUCERS, gather, scatter

operation, sources, *quant = sys.argv[1:]
compiling.sources = lambda: Path(sources)
name = {"moe_finalize_reduce_scatter": "moe_finalize"}.get(operation, operation)
case = PRODUCERS[name if name in PRODUCERS else "allreduce"](2, 5, 288)

def body(rank, workspace):
    def each(call):
        for shape in launch_shapes(36):
            for clusters in (1 << 20, 2):
                with cases.crowded(workspace, clusters):
                    try:
                        call(launch_shape=shape)
                    except ArgumentError as error:  # fewer clusters than rows
                        assert "launch_shape must be" in str(error)

    for seed in (0, 1):
        workspace._backend.seed = seed
        if quant:
            given = quant[0], OPTIONS[quant[0]][0]
            for oneshot in (True, False):
                each(lambda **o: quantised(rank, workspace, case, *given, use_oneshot=oneshot, **o))
        elif operation in PRODUCERS:
            for oneshot in (True, False):
                each(lambda **o: cases.finalize(rank, workspace, case, use_oneshot=oneshot, **o))
        elif operation == "allgather":
            rows = case.rows[0][workspace.share(5)]
            each(lambda **o: gather(rank, workspace, case, rows, **o))
        else:
            each(lambda **o: scatter(rank, workspace, case, **o))

cases.Ranks(2).with_workspace(case, operations=[operation], quant=quant)(body)
print("ran to the end")
"""


def sanitized(operation: str, sources: Path, *quant: str) -> subprocess.CompletedProcess[str]:
    """Run every kernel of an operation, or of one format of it, compiled from these sources."""
    try:
        compiler = compiling._cxx()
    except CompileError as error:
        pytest.skip(str(error))
    named = subprocess.run(
        [*compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=False
    )
    library = named.stdout.strip()
    env = {
        **os.environ,
        "LD_PRELOAD": library,
        "MOE_AR_BACKEND": "cpu",
        "MOE_AR_SANITIZE": "thread",
        "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
        "TSAN_OPTIONS": f"exitcode={REPORT}",
    }
    if not Path(library).is_file():
        pytest.skip(f"{compiler[0]} has no libtsan.so")

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=180, check=False
        )

    tried = python("-c", "")
    if tried.returncode:
        pytest.skip(f"Python does not run under ThreadSanitizer: {tried.stderr[-300:]}")
    return python("-c", CHILD, operation, str(sources), *quant)


pytestmark = pytest.mark.skipif(backend() != "cpu", reason="about the emulator")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_kernel_has_a_race(operation: str) -> None:
    done = sanitized(operation, compiling.sources())
    assert (done.returncode, "ran to the end" in done.stdout) == (0, True), done.stderr[-4000:]


@pytest.mark.parametrize("quant", ["fp8_per_token", "nvfp4"])
def test_no_quantising_kernel_has_a_race(quant: str) -> None:
    done = sanitized("allreduce", compiling.sources(), quant)
    assert (done.returncode, "ran to the end" in done.stdout) == (0, True), done.stderr[-4000:]


def test_planted_race_is_reported(tmp_path: Path) -> None:
    """The norm of a block that reads sums before all its warps have given theirs."""
    root = tmp_path / "cuda_src"
    shutil.copytree(compiling.sources(), root)
    header = root / "moe_ar" / "rmsnorm.cuh"
    text = header.read_text()
    assert text.count("ptx::block_sync();") == 1
    header.write_text(text.replace("ptx::block_sync();", ""))
    done = sanitized("allgather", root)
    assert done.returncode == REPORT, done.stdout + done.stderr[-4000:]
    assert "rmsnorm.cuh" in done.stderr
