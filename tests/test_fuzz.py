"""Random calls, right and wrong, under AddressSanitizer and UBSan; and whether fuzz.py has teeth.

Budget, on two idle cores and with nothing compiled before: 40 s. The sanitized kernels of W = 2 are
those of test_sanitizer, but for four.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
from cases import backend
from sanitizers import MEMORY, sanitized_python
from test_scripts import SCRIPTS

from cupy_moe_ar import checks, workspace
from cupy_moe_ar.arrays import ArrayView

sys.path.insert(0, str(SCRIPTS))

import fuzz

pytestmark = pytest.mark.skipif(backend() != "cpu", reason="about the CPU backend")


@pytest.fixture(autouse=True, scope="module")
def import_path() -> Iterator[None]:
    yield
    sys.path.remove(str(SCRIPTS))


def counts(printed: str) -> dict[str, int]:
    """Of calls and of faults, as fuzz.py prints them."""
    faults, calls = printed.splitlines()[-2:]
    assert re.fullmatch(r"\d+ calls tried: \d+ right, \d+ rejected, \d+ failed", calls), printed
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", f"{faults} {calls}")}


def test_calls_under_sanitizers() -> None:
    done = sanitized_python(MEMORY, SCRIPTS / "fuzz.py", "--calls", 400, "--seed", 1)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith("seed 1, 2 ranks\n")
    found = counts(done.stdout)
    assert (found["calls"], found["failed"]) == (400, 0)
    assert found["right"] >= 120
    assert found["rejected"] >= 120
    for fault in (*fuzz.FAULTS, "size", "indices", "unprepared"):
        assert found[fault] > 0, fault


FORGOTTEN = {  # a rule that is not checked, or a state that is not restored
    "overlap": (checks.Checker, "_overlaps", lambda *args: None),
    "gaps": (ArrayView, "contiguous", True),
    "shape": (checks.Checker, "shape", lambda *args: None),
    "number": (checks.Checker, "number", lambda self, name, value, minimum=None: 1.0),
    "indices": (workspace.Workspace, "agree", lambda self, function, faults, call:
                workspace._agree(self._group, function, faults, call and call.same)),
}  # fmt: skip


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_forgotten_rule_is_noticed(
    forgotten: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(*FORGOTTEN[forgotten])
    state = fuzz.Fuzz(2)
    assert state.run(1000, 1) == 1
    state.close()
    assert counts(capsys.readouterr().out)["failed"] == 1
