"""What sanitize.sh makes of compute-sanitizer's findings; here a script stands in for the tool."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_scripts import SCRIPTS, run

TOOL = """#!/bin/bash
while [[ $1 != *python* ]]; do
  [[ $1 == --tool ]] && tool=$2
  shift
done
ranks=${*: -1}
{ELSE}
summary="ERROR SUMMARY: 0 errors"
if [[ $tool == racecheck ]]; then
  summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
fi
echo "========= $summary"
"""
CLEAN = [f"{tool} 0 errors on 2 ranks, status 0"
         for tool in ("memcheck", "racecheck", "synccheck", "initcheck")]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "status", "changed"),
    [
        ("", 0, {}),
        (
            '[[ $tool == memcheck ]] && { echo "========= ERROR SUMMARY: 7 errors"; exit 0; }',
            1,
            {0: "memcheck 7 errors on 2 ranks, status 0"},
        ),
        (
            "[[ $tool == racecheck ]] && "
            '{ echo "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors)"; exit; }',
            1,
            {1: "racecheck 2 errors on 2 ranks, status 0"},
        ),
        (
            "[[ $tool == initcheck && $ranks == 2 ]] && exit 3",  # waited in vain
            0,
            {3: "initcheck 0 errors on 1 ranks, status 0"},
        ),
        (
            "[[ $tool == synccheck && $ranks == 2 ]] && sleep 60",
            0,
            {2: "synccheck 0 errors on 1 ranks, status 0"},
        ),
        (
            "[[ $tool == synccheck ]] && exit 1",
            1,
            {2: "synccheck unknown errors on 2 ranks, status 1"},
        ),
    ],
    ids=["clean", "errors", "hazards", "serial", "hangs", "dies"],
)
def test_findings(what: str, status: int, changed: dict[int, str], tmp_path: Path) -> None:
    tool, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    tool.write_text(TOOL.replace("{ELSE}", what))
    tool.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MOE_AR_BACKEND": "cpu",
        "PYTHON": sys.executable,
        "SANITIZE_S": "3",
    }
    done = run(SCRIPTS / "sanitize.sh", log, status=status, **env)
    right = [changed.get(i, words) for i, words in enumerate(CLEAN)]
    assert done.stdout.splitlines()[-1] == "sanitize.sh: " + "; ".join(right) + "; "
    assert log.read_text().splitlines()[-1] == done.stdout.splitlines()[-1]
    assert "45 launches on 2 ranks, CPU emulator: 0 wrong" in log.read_text()
