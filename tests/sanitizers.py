"""Python with a sanitizer's runtime preloaded, to load kernels that were compiled for it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_moe_ar import compile as compiling
from cupy_moe_ar.errors import CompileError

REPORT = 66  # exit status after a report
THREAD, MEMORY = "thread", "address,undefined"  # as MOE_AR_SANITIZE takes them
TESTS = Path(__file__).parent
# libubsan comes with the kernels; libasan wants to see libstdc++ first, whose functions it wraps.
_PRELOADED = {THREAD: ("libtsan.so",), MEMORY: ("libasan.so", "libstdc++.so.6")}
_OPTIONS = {
    # libc frees what a thread kept for itself when the next thread takes its stack.
    "TSAN_OPTIONS": f"exitcode={REPORT}:suppressions={TESTS / 'tsan.supp'}",
    "ASAN_OPTIONS": f"exitcode={REPORT}:detect_leaks=0",  # Python leaves much to the system
    "UBSAN_OPTIONS": f"exitcode={REPORT}:print_stacktrace=1",
}


@functools.cache
def _environment(sanitizer: str) -> dict[str, str]:
    try:
        compiler = compiling._cxx()
    except CompileError as error:
        pytest.skip(str(error))
    libraries = []
    for name in _PRELOADED[sanitizer]:
        command = [*compiler, f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        libraries.append(done.stdout.strip())
        if not Path(libraries[-1]).is_file():
            pytest.skip(f"{compiler[0]} has no {name}")
    return {
        **os.environ,
        **_OPTIONS,
        "LD_PRELOAD": " ".join(libraries),
        "MOE_AR_BACKEND": "cpu",
        "MOE_AR_SANITIZE": sanitizer,
        # Every object between red zones.
        "PYTHONMALLOC": "malloc" if sanitizer == MEMORY else "pymalloc",
        "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
    }


def sanitized_python(
    sanitizer: str, *arguments: object, timeout: float = 180.0
) -> subprocess.CompletedProcess[str]:
    """Run Python; skip the test where it does not run with this sanitizer."""
    env = _environment(sanitizer)

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    tried = python("-c", "")
    if tried.returncode:
        pytest.skip(f"Python does not run under {sanitizer}: {tried.stderr[-300:]}")
    return python(*map(str, arguments))
