"""Every kernel under ThreadSanitizer, and under AddressSanitizer and UBSan together.

Ranks are threads of a spawned Python that has the sanitizer's runtime preloaded, see
`every_kernel`. Budget on two idle cores, with nothing compiled before and with the faults that are
planted into copies of the sources: 70 s for ThreadSanitizer, 60 s for the others.

To ThreadSanitizer words of slots and control words are atomics, whose order it does not judge; it
sees shared memory, inputs, outputs. AddressSanitizer sees these too, and the control block; a slot
beyond those of a launch is no less the slab's, but is no longer empty after it, which
`cases.launch` checks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cases import backend, edit_source
from sanitizers import MEMORY, REPORT, TESTS, THREAD, sanitized_python

from cupy_moe_ar import compile as compiling
from cupy_moe_ar.compile import OPERATIONS

pytestmark = pytest.mark.skipif(backend() != "cpu", reason="about the emulator")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sanitizer", [THREAD, MEMORY])
def test_no_kernel_is_reported(sanitizer: str, size: int) -> None:
    done = sanitized_python(sanitizer, TESTS / "every_kernel.py", size, compiling.sources())
    assert (done.returncode, done.stdout.split()) == (0, list(OPERATIONS)), done.stderr[-4000:]


@pytest.mark.parametrize("sanitizer", [THREAD, MEMORY])
def test_no_quantising_kernel_is_reported(sanitizer: str) -> None:
    names = ["allreduce:fp8_per_token", "allreduce:nvfp4"]
    done = sanitized_python(sanitizer, TESTS / "every_kernel.py", 2, compiling.sources(), *names)
    assert (done.returncode, done.stdout.split()) == (0, names), done.stderr[-4000:]


@pytest.mark.parametrize(
    ("sanitizer", "name", "old", "new", "words"),
    [
        # A norm reads the sums of its block before all warps have given theirs.
        (THREAD, "moe_ar/rmsnorm.cuh", "ptx::block_sync();", "", "data race"),
        # Lanes past the end of a row take part.
        (
            MEMORY,
            "twoshot.cu",
            "return row_.column(v) < item.columns;",
            "return row_.column(v) < (item.columns + 31) / 32 * 32;",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (
            MEMORY,
            "moe_ar/rmsnorm.cuh",
            "row_ >> 1 & 1",
            "row_ >> (row_ + 32) & 1",
            "runtime error: shift exponent 32 is too large",
        ),
    ],
    ids=["race", "overrun", "shift"],
)
def test_planted_fault_is_reported(
    sanitizer: str, name: str, old: str, new: str, words: str, tmp_path: Path
) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(compiling.sources(), root)
    edit_source(root / name, old, new)
    done = sanitized_python(sanitizer, TESTS / "every_kernel.py", 2, root, "allgather")
    assert done.returncode == REPORT, done.stdout + done.stderr[-4000:]
    assert words in done.stderr
    assert re.search(rf"{re.escape(Path(name).name)}:\d+", done.stderr)
