"""Rules for every test: under mpirun the first failure of any rank ends the job.

Without them `mpirun python -m pytest` hangs for ever once a rank fails while its peers wait for it.
What is skipped or left out depends only on what is equal on all ranks: the environment, never on a
rank's own findings.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import hypothesis
import pytest
from cases import RANK, Ranks, backend

if RANK is None:  # many ranks on one GPU, a stream each; read when CUDA starts
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# All ranks must draw the same examples.
hypothesis.settings.register_profile("moe_ar", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("moe_ar")


def end_job(where: str, text: str) -> NoReturn:
    """Say what failed on this rank and take all ranks down."""
    print(f"\n[rank {RANK}] {where}\n{text}", file=sys.stderr, flush=True)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # not reached


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if RANK is not None:
        # A rank that fails before it has joined MPI could not end the job.
        from mpi4py import MPI  # noqa: F401
    if RANK:  # not rank 0: its failures are told by `end_job`
        config.pluginmanager.unregister(name="terminalreporter")
        quiet = pytest.TerminalReporter(config, open(os.devnull, "w"))  # noqa: SIM115
        config.pluginmanager.register(quiet, "terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if backend() == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.mpi)
    if RANK is not None:
        left_out = [item for item in items if not item.get_closest_marker("mpi")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("mpi")]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """As many ranks as `cases.each_world` asks for; a test with it also runs under mpirun."""
    return Ranks(request.param)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RANK is not None and report.failed:
        captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
        end_job(f"{report.nodeid} failed in {report.when}", report.longreprtext + captured)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if RANK is not None and report.failed:
        end_job(f"{report.nodeid} could not be collected", report.longreprtext)


def pytest_internalerror(excrepr: object) -> None:
    if RANK is not None:
        end_job("error inside pytest", str(excrepr))


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    if RANK is not None:
        end_job("interrupted", excinfo.exconly())
