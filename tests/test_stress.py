"""The stress test as a user starts it, for a few seconds; test_negative_controls has its teeth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_scripts import SCRIPTS, mpirun, run

from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.testing import run_ranks

sys.path.insert(0, str(SCRIPTS))

import stress

SCRIPT = (sys.executable, SCRIPTS / "stress.py")
CPU = {"MOE_AR_BACKEND": "cpu"}  # on GPUs thousands of graph replays follow
FEW = ("--dtypes", "bfloat16", "--operations", "moe_finalize", "allreduce", "--seed", 3)


@pytest.fixture(autouse=True, scope="module")
def import_path() -> Iterator[None]:
    yield
    sys.path.remove(str(SCRIPTS))


def last_line(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+) passed, (\d+) failed", done.stdout.splitlines()[-1])
    assert found, done.stdout + done.stderr
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("size", [2, 3])
def test_spawned_ranks(size: int) -> None:
    done = run(*SCRIPT, *FEW, "--ranks", size, "--launches", 100, **CPU)
    assert done.stdout.startswith(f"seed 3, {size} ranks\n")
    assert last_line(done) == (100, 0)


def test_skew_is_recorded_and_drawn(tmp_path: Path) -> None:
    file, png = tmp_path / "skew.json", tmp_path / "skew.png"
    for launches in (30, 20):
        run(*SCRIPT, *FEW, "--ranks", 2, "--launches", launches, "--record", file, **CPU)
    rows = json.loads(file.read_text())
    assert [sum(row["launches"]) for row in rows] == [30, 20]
    assert all(sum(row["launches"][1:]) > 0 for row in rows)  # some came late
    assert {(row["world"], row["backend"], row["wrong"]) for row in rows} == {(2, "cpu", 0)}
    pytest.importorskip("matplotlib")
    run(*SCRIPT, "--plot", file, png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_killed_rank() -> None:
    passed, failed = last_line(run(*SCRIPT, *FEW, "--ranks", 3, "--kill", 1, "--seconds", 1, **CPU))
    assert passed >= 2 * stress.BLOCK  # those of the survivors
    assert failed == 0


def test_ranks_of_mpi() -> None:
    done = run(*mpirun(2), *SCRIPT, "--seed", 3, "--launches", 40, *FEW[:5])
    assert last_line(done) == (40, 0)


@pytest.mark.parametrize("wrong", [["--kill", 0], ["--ranks", 2, "--kill", 2], ["--ranks", 0]])
def test_wrong_options(wrong: list[object]) -> None:
    done = run(*SCRIPT, *wrong, status=2)
    assert done.returncode == 2
    assert "--kill must name" in done.stderr or "must be positive" in done.stderr


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    both = [stress.Result(10, {3: "wrong"}), stress.Result(10, {3: "wrong", 7: "late"})]
    assert stress.judge(both) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "8 passed, 2 failed"
    assert stress.judge([stress.Result(10), "ended with exit code -11"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "10 passed, 1 failed"
    assert stress.judge([stress.Result(10), stress.Result(5, {-1: "not in time"})]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "10 passed, 1 failed"
    assert stress.judge([stress.Result(), stress.Result()]) == 1  # nothing was tried
    assert stress.judge([stress.Result(10), stress.Result(10)]) == 0


def test_specs_depend_on_the_seed_and_data_on_the_launch() -> None:
    one, other = stress.Options(seed=1), stress.Options(seed=2)
    sizes = (12, 512)
    specs = [stress.Spec.draw(one, sizes, number) for number in range(200)]
    assert specs == [stress.Spec.draw(one, sizes, number) for number in range(200)]
    assert specs != [stress.Spec.draw(other, sizes, number) for number in range(200)]
    assert {spec.operation for spec in specs} == set(stress.FUNCTIONS)
    assert {(spec.dtype, spec.comm_dtype) for spec in specs} == set(stress.DTYPES.values())
    for spec in specs[:50]:
        first, second = (spec.own(one, number, 1) for number in (8, 9))
        assert {name: x.shape for name, x in first.items()} == {
            name: x.shape for name, x in second.items()
        }
        rows = next(iter(first.values())).astype(float)
        known = rows[np.isfinite(rows)]
        assert (known == np.round(known)).all()
        assert spec.expected(one, 8, 3).residual_out.shape == (spec.tokens, spec.hidden)


def test_replays_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs do with CUDA graphs, with a graph that calls."""
    monkeypatch.setenv("MOE_AR_BACKEND", "cpu")
    options = stress.Options(seed=3, operations=("allreduce",), dtypes=("bfloat16",), timeout_s=1.0)

    def body(group: ThreadGroup) -> stress.Stress:
        state = stress.Stress(group, options)
        with state._workspace() as workspace:
            rank = stress.Rank(group, workspace)
            trials = [
                stress.Trial(rank, workspace, options, stress.Spec.draw(options, (4, 64), 0, index))
                for index in range(3)
            ]
            lost: list[stress.Trial] = []
            graph = SimpleNamespace(
                launch=lambda stream: [trial.launch() for trial in trials if trial not in lost]
            )
            for _ in range(4):
                assert state._replay(rank, workspace, graph, trials)
            assert (state.result.launches, state.result.failures) == (12, {})
            group.barrier()
            lost.append(trials[1])  # as if a launch of the graph had not run
            assert state._replay(rank, workspace, graph, trials)
            assert (state.result.launches, set(state.result.failures)) == (15, {13})
            if group.Get_rank() == 0:
                lost.append(trials[2])  # a call would raise what the graph leaves to `check`
                assert not state._replay(rank, workspace, graph, trials)
                assert "in vain for rank 1" in str(state.timed_out)
            group.barrier()
        return state

    run_ranks(2, body)


def test_repeats_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs do without a wait in between; a launch that is lost is told by its number."""
    monkeypatch.setenv("MOE_AR_BACKEND", "cpu")
    options = stress.Options(
        seed=5, operations=("allreduce",), dtypes=("bfloat16",), timeout_s=5.0, repeats=60
    )
    calls = dict.fromkeys(range(2), 0)

    def body(group: ThreadGroup) -> stress.Result:
        state = stress.Stress(group, options)
        me = group.Get_rank()
        with state._workspace() as workspace:
            rank = stress.Rank(group, workspace)
            state._repeat(rank, workspace)
            assert (state.result.launches, state.result.failures) == (stress.POOL + 60, {})
            group.barrier()
            original = stress.Trial.launch

            def lossy(trial: stress.Trial) -> None:
                calls[trial.rank.index] += 1
                if calls[trial.rank.index] != stress.POOL + 11:
                    original(trial)

            if me == 0:
                monkeypatch.setattr(stress.Trial, "launch", lossy)
            group.barrier()
            state._repeat(rank, workspace)
            group.barrier()
        return state.result

    for result in run_ranks(2, body):
        assert set(result.failures) == {stress.POOL + 60 + stress.POOL + 10}
