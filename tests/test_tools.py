"""`python -m cupy_moe_ar`: what users run on a new machine, and what it says of broken ones."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import ROOT, mpirun
from cases import run as run_program

from cupy_moe_ar import __main__ as tools
from cupy_moe_ar import compile as compiling
from cupy_moe_ar import info, selfcheck
from cupy_moe_ar.compile import OPERATIONS, Variant, compile_all
from cupy_moe_ar.errors import CompileError, UnsupportedError
from cupy_moe_ar.launch import DeviceLimits
from cupy_moe_ar.sharing import Place
from cupy_moe_ar.terminal import progress
from cupy_moe_ar.testing import Outcome, run_ranks
from cupy_moe_ar.types import DType

BF16 = DType.BFLOAT16


def run(*words: object, status: int = 0, launcher: Sequence[str] = (), **env: str) -> str:
    """Run a tool as a user does; return what it printed."""
    command = (*launcher, sys.executable, "-m", "cupy_moe_ar", *words)
    return run_program(*command, status=status, **env).stdout


# ---- info ----------------------------------------------------------------------------------------


def test_info_tells_what_is_here() -> None:
    told = run("info")
    for name in ("package", "python", "packages", "MPI", "driver", "NVRTC", "cache", "/dev/shm"):
        assert f"\n{name} " in f"\n{told}", name
    assert "works between" in told
    assert told.splitlines()[-1].startswith("usable backends: c")


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X \t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_are_read_from_nvidia_smi() -> None:
    found = info.links(TOPOLOGY)
    assert {pair: link for pair, link in found.items() if pair[0] < pair[1]} == {
        ("0", "1"): "NV18",
        ("0", "2"): "SYS",
        ("1", "2"): "PHB",
    }
    assert info.links("") == info.links("no devices were found") == {}


def test_pairs_of_gpus_are_told_together() -> None:
    same = {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}
    assert info.link_words(same) == {"NV18": "all 3 pairs"}
    assert info.link_words({**same, (1, 2): "SYS"}) == {
        "NV18": "GPU 0 and 1, GPU 0 and 2",
        "SYS": "GPU 1 and 2",
    }


@pytest.mark.parametrize(
    ("library", "told", "words"),
    [
        ("MPICH Version:      5.0.2", "HYDRA build details:\n Version: 5.0.2", None),
        ("Open MPI v4.1.6", "mpirun (Open MPI) 4.1.6", None),
        ("Open MPI v4.1.6", "something new", None),
        (
            "MPICH Version: 5.0.2",
            "mpirun (Open MPI) 4.1.6",
            "is of Open MPI, but mpi4py uses MPICH",
        ),
        ("Open MPI v4.1.6", "HYDRA build details:", "start ranks with the mpirun of Open MPI"),
        ("Intel(R) MPI Library 2021.10", "HYDRA build details:", "the mpirun of Intel MPI"),
    ],
)
def test_launchers_of_another_mpi_are_named(library: str, told: str, words: str | None) -> None:
    problem = info.launcher_problem(library, "/usr/bin/mpirun", told)
    assert (problem is None) if words is None else (words in str(problem))


def test_no_launcher_is_a_problem() -> None:
    assert "Remedy: put that MPI's bin folder on PATH" in str(info.launcher_problem("X", None, ""))


class Machine:
    """GPUs that are not there: what the driver, CuPy and nvidia-smi would say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.buses = ["0000:04:00.0", "0000:05:00.0"]
        self.access = True
        smi = folder / "nvidia-smi"
        smi.write_text(
            "#!/bin/sh\ncase $1$2 in\n"
            f"topo-m) printf '{TOPOLOGY.strip()}\\n' ;;\n"
            "*index*) printf '0, 00000000:04:00.0\\n1, 00000000:05:00.0\\n' ;;\n"
            "*) echo 580.1.2 ;;\nesac\n"
        )
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: 13020, deviceCanAccessPeer=lambda one, other: self.access
        )
        cupy = SimpleNamespace(__version__="14.2", cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        self.says("device_count", lambda: 2)
        self.says("driver_version", lambda: (13, 0))
        self.says("nvrtc_version", lambda: (13, 0))
        self.says("device_limits", self.limits)
        self.says("place_on", self.place)

    def says(self, function: str, answer: Callable[..., Any]) -> None:
        self.monkeypatch.setattr(info, function, answer)

    def limits(self, device: int) -> DeviceLimits:
        return DeviceLimits("NVIDIA H200", (9, 0), "sm_90a", 132, 2048, f"uuid{device}",
                            self.buses[device])  # fmt: skip

    def place(self, device: int) -> Place:
        return Place.here().with_gpu(
            gpu=self.buses[device],
            gpu_uuid=f"uuid{device}",
            gpu_name="NVIDIA H200",
            visible=tuple(self.buses),
            mps=False,
        )

    def report(self) -> tuple[dict[str, str], list[str], list[str]]:
        found = info.gather(probe=False)
        problems = [words for words in found.problems if "mpi" not in words]
        return dict(found.facts), problems, found.backends


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_info_of_a_sound_machine(machine: Machine) -> None:
    facts, problems, backends = machine.report()
    assert facts["driver"] == "580.1.2"
    assert facts["CUDA"] == "driver up to 13.0, CuPy 14.2 on 13.2"
    expected = "NVIDIA H200, 0000:05:00.0, sm_90a, 132 SMs, uuid1, CUDA MPS off"
    assert facts["GPU 1"] == expected
    assert facts["links"] == "NV18, peer access: GPU 0 and 1"
    assert problems == []
    assert backends == ["cuda", "cpu"]


def test_info_of_gpus_without_peer_access(machine: Machine) -> None:
    machine.access = False
    facts, problems, _ = machine.report()
    assert facts["links"] == "NV18, NO peer access: GPU 0 and 1"
    assert len(problems) == 1
    assert "GPU 0000:04:00.0" in problems[0]
    assert "no peer access" in problems[0]
    assert "Remedy: use GPUs for which `nvidia-smi topo -p2p r` says OK" in problems[0]


def test_info_of_an_old_driver(machine: Machine) -> None:
    machine.says("driver_version", lambda: (12, 4))
    _, problems, backends = machine.report()
    assert "NVRTC is of CUDA 13.0, but the driver supports CUDA 12.4" in problems[0]
    assert backends == ["cpu"]


def test_info_of_an_old_gpu(machine: Machine) -> None:
    def limits(device: int) -> DeviceLimits:
        if device:
            raise UnsupportedError("compute capability 7.0 is not supported, only 8.0")
        return machine.limits(device)

    machine.says("device_limits", limits)
    facts, problems, backends = machine.report()
    assert "GPU 1 cannot be used: compute capability 7.0" in problems[0]
    assert "GPU 0" in facts
    assert "links" not in facts
    assert backends == ["cuda", "cpu"]


def test_info_without_nvrtc(machine: Machine, tmp_path: Path) -> None:
    def missing() -> tuple[int, int]:
        raise CompileError("NVRTC is not usable: install it")

    machine.says("nvrtc_version", missing)
    _, problems, backends = machine.report()
    assert problems == ["NVRTC is not usable: install it"]
    assert backends == ["cpu"]
    machine.monkeypatch.setenv("MOE_AR_PREBUILT", str(tmp_path))
    (tmp_path / "kernel.cubin").touch()
    _, problems, backends = machine.report()
    assert problems == []
    assert backends == ["cuda", "cpu"]


def test_info_without_cupy(machine: Machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "cupy", None)
    _, problems, backends = machine.report()
    assert "there is an NVIDIA driver, but GPUs cannot be used" in problems[0]
    assert "Remedy: pip install 'cupy_moe_ar[cuda13]'" in problems[0]
    assert backends == ["cpu"]


def test_info_where_nothing_knows_the_drivers_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "_driver", lambda smi: "")
    facts, problems, backends = machine.report()
    assert facts["driver"] == "of unknown version"
    assert (problems, backends) == ([], ["cuda", "cpu"])


def test_info_of_hidden_gpus(machine: Machine) -> None:
    machine.says("device_count", lambda: 0)
    _, problems, _ = machine.report()
    assert "Remedy: see CUDA_VISIBLE_DEVICES" in problems[0]


def test_info_without_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(info, "_ASK_MPI", "import no_such_mpi")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MOE_AR_CACHE_DIR", "/proc/self/moe_ar")
    monkeypatch.setenv("MOE_AR_PREBUILT", str(tmp_path / "none"))
    monkeypatch.setattr(info, "Path", lambda name: Path("/none" if "nvidia" in str(name) else name))
    assert tools.main(["info", "--no-probe"]) == 1
    told = capsys.readouterr().out
    assert "mpi4py is not usable: ModuleNotFoundError: No module named 'no_such_mpi'" in told
    assert "no C++ compiler" in told
    assert "which holds no kernels. Remedy: fill it with python -m cupy_moe_ar precompile" in told
    assert "usable backends: none; " in told


def test_memory_that_cannot_be_shared_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "mapping the peers' memory: rank 0 and rank 1 cannot share memory. Remedy: another"
    outcomes = [Outcome(words, None, 0), Outcome(None, "Traceback\nOSError: no", 1)]
    monkeypatch.setattr(info, "spawn_ranks", lambda *_, **__: outcomes)
    report = info.Report()
    info._share(report, [0, 1])
    assert report.facts == [("CUDA IPC", "does NOT work between 2 processes, a GPU each")]
    assert report.problems == [words, "OSError: no"]


# ---- check ---------------------------------------------------------------------------------------


def test_check_runs_every_operation_protocol_and_format() -> None:
    told = run("check", "--ranks", 2, "--quant", "nvfp4").splitlines()
    assert told[-1] == "PASS: 9 operations and protocols on 2 ranks, bfloat16, nvfp4"
    rights = [line for line in told if line.startswith("right")]
    assert (len(rights), sum(line.endswith("nvfp4") for line in rights)) == (9 + 7, 7)
    assert len(selfcheck.TRIALS) == sum(map(len, OPERATIONS.values()))


def test_check_of_wider_wires_and_more_ranks() -> None:
    words = ("--tokens", 1, 5, "--hidden", 136, "--dtype", "bfloat16/float32")
    told = run("check", "--ranks", 3, *words, MOE_AR_BACKEND="cpu")
    assert told.splitlines()[-1].endswith("on 3 ranks, bfloat16/float32")


def test_check_under_mpirun() -> None:
    told = run("check", launcher=mpirun(2), MOE_AR_BACKEND="cpu")
    assert told.splitlines()[-1] == "PASS: 9 operations and protocols on 2 ranks, bfloat16"
    assert told.count("PASS") == told.count("rank 1: ") == 1


def test_info_under_mpirun() -> None:
    told = run("info", "--no-probe", launcher=mpirun(2))
    assert told.count("usable backends") == 1
    assert "\nranks         2\n" in told


BROKEN = """
import sys
from cupy_moe_ar import __main__ as tools
def check(group, options, say):
    if group.Get_rank() == 1:
        raise ValueError("on purpose")
    group.barrier()
tools.check = check
sys.exit(tools.main(["check"]))
"""


def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    command = [*mpirun(2), sys.executable, str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert "FAILED: rank 1: ValueError: on purpose" in done.stdout
    assert "PASS" not in done.stdout


def test_check_without_a_compiler_fails_with_the_remedy(tmp_path: Path) -> None:
    env = {"CXX": "nonsense", "MOE_AR_CACHE_DIR": str(tmp_path), "MOE_AR_BACKEND": "cpu"}
    last = run("check", status=1, **env).splitlines()[-1]
    assert last.startswith("FAILED: preparing bfloat16: compiling: rank 0: no C++ compiler")


OPTIONS = selfcheck.Options("cpu", hidden=(64,), tokens=(1, 3))
ALLREDUCE = next(trial for trial in selfcheck.TRIALS if trial.name == "allreduce_fusion, one-shot")


def check_with(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None], **more: Any) -> str:
    """Check a broken operation on two ranks; return what every rank said."""
    broken = dataclasses.replace(ALLREDUCE, function=function)
    monkeypatch.setattr(selfcheck, "TRIALS", (broken,))
    lines: list[str] = []
    options = dataclasses.replace(OPTIONS, **more)
    told = run_ranks(2, lambda group: selfcheck.check(group, options, lines.append))
    assert told[0] == told[1]
    assert lines[-1].startswith("WRONG" if told[0] else "right")
    return str(told[0])


@pytest.mark.parametrize(
    ("output", "change", "words"),
    [
        ("allreduce_out", 1, r"rank 1: allreduce_out of 1 tokens, hidden 64: 1 of 64 .* \[0, 7\]"),
        ("norm_out", 1, "rank 1: norm_out of 1 tokens"),
        ("residual_out", float("nan"), r"rank 1: residual_out .*: nan, not"),
    ],
)
def test_check_finds_a_wrong_element(
    monkeypatch: pytest.MonkeyPatch, output: str, change: float, words: str
) -> None:
    def broken(workspace: Any, **arguments: Any) -> None:
        ALLREDUCE.function(workspace=workspace, **arguments)
        arguments[output][0, 7] += change * workspace.rank

    with pytest.raises(AssertionError, match=words):
        raise AssertionError(check_with(monkeypatch, broken))


@pytest.mark.parametrize("output", ["quant_out", "scale_out"])
def test_check_finds_a_wrong_code(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    def broken(workspace: Any, **arguments: Any) -> None:
        ALLREDUCE.function(workspace=workspace, **arguments)
        if output in arguments:
            arguments[output][0, 0] ^= 1

    told = check_with(monkeypatch, broken, quant=("nvfp4",))
    assert f"allreduce_fusion, one-shot, nvfp4, bfloat16: rank 0: {output} of 1 tokens" in told


def test_check_without_a_fitting_row() -> None:
    options = dataclasses.replace(OPTIONS, hidden=(72,), quant=("mxfp8",))
    told = run_ranks(2, lambda group: selfcheck.check(group, options, lambda line: None))
    assert told == ["mxfp8: no row length of (72,) is a multiple of its blocks"] * 2


def test_check_passes_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_with(monkeypatch, ALLREDUCE.function) == "None"


def test_check_finds_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def ulp(workspace: Any, **arguments: Any) -> None:
        ALLREDUCE.function(workspace=workspace, **arguments)
        arguments["norm_out"].view("uint16")[0, 7] += workspace.rank  # within the norm's bound

    monkeypatch.setattr(selfcheck, "NORM_ULPS", {BF16: 2})
    assert "outputs are not the same bits" in check_with(monkeypatch, ulp)


def test_check_finds_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(workspace: Any, **arguments: Any) -> None:
        if workspace.rank == 0:
            ALLREDUCE.function(workspace=workspace, **arguments)

    assert "waited in vain for rank 1" in check_with(monkeypatch, absent, timeout_s=1.0)


def test_check_tells_of_ranks_that_died(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [
        Outcome("allreduce_fusion: rank 0: wrong", None, 0),
        Outcome(None, "Traceback ...\nConnectionError: spawned ranks [2] have ended", 1),
        Outcome(None, "ended with exit code -9", -9),
    ]
    monkeypatch.setattr(tools, "spawn_ranks", lambda *_, **__: outcomes)
    assert tools.main(["check", "--ranks", "3"]) == 1
    assert capsys.readouterr().out == (
        "FAILED: allreduce_fusion: rank 0: wrong; rank 1: ConnectionError: spawned ranks [2] have "
        "ended; rank 2: ended with exit code -9\n"
    )


@pytest.mark.parametrize(
    "words",
    [["check", "--dtype", "int8"], ["check", "--ranks", "0"], ["precompile"], ["nonsense"], []],
)
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tools.main(words)
    assert "usage: python -m cupy_moe_ar" in capsys.readouterr().err


# ---- precompile ----------------------------------------------------------------------------------

BLOCKED = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
from cupy_moe_ar.compile import Variant, compile_all
from cupy_moe_ar.types import DType
variants = [Variant("allreduce", protocol, DType.BFLOAT16, DType.BFLOAT16, 2)
            for protocol in ("oneshot", "twoshot")]
print(*compile_all(variants, "sm_90a", "sm_80").values())
"""


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_precompiled_cubins_need_no_nvrtc(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    out = tmp_path / "prebuilt"
    told = run("precompile", "--out", out, "--arch", "sm_90a", "sm_80", "--ranks", 2,
               "--operation", "allreduce")  # fmt: skip
    assert told.splitlines()[-1] == f"export MOE_AR_PREBUILT={out}"
    before = contents(out)
    assert len(before) == 4
    env = {"PYTHONPATH": str(ROOT), "MOE_AR_PREBUILT": str(out)}
    cache = {"MOE_AR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", BLOCKED]
    done = subprocess.run(command, env={**os.environ, **env, **cache}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert {Path(path).parent for path in done.stdout.split()} == {out}, done.stderr
    assert contents(out) == before
    assert not (tmp_path / "cache").exists()
    next(out.glob("*twoshot*sm_80*")).unlink()
    done = subprocess.run(command, env={**os.environ, **env, **cache}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert "NVRTC, NVIDIA's run-time compiler, is not usable" in done.stderr


def test_precompiled_libraries_need_no_compiler(tmp_path: Path) -> None:
    out = tmp_path / "prebuilt"
    run("precompile", "--out", out, "--arch", "cpu", "--ranks", 2, "--quant", "nvfp4")
    before = contents(out)
    env = {"MOE_AR_PREBUILT": str(out), "MOE_AR_CACHE_DIR": str(tmp_path / "cache")}
    words = ("--ranks", 2, "--quant", "nvfp4")
    told = run("check", *words, CXX="nonsense", MOE_AR_BACKEND="cpu", **env)
    assert told.splitlines()[-1].startswith("PASS")
    assert contents(out) == before
    assert not (tmp_path / "cache").exists()


def test_precompile_tells_what_failed(tmp_path: Path) -> None:
    words = ("--out", tmp_path, "--arch", "sm_12345", "--ranks", 2, "--operation", "allgather")
    assert run("precompile", *words, status=1).startswith("FAILED: NVRTC")
    with pytest.raises(SystemExit):
        tools.main(["precompile", "--out", "x", "--arch", "volta"])


# ---- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


VARIANTS = [Variant("allreduce", "oneshot", BF16, BF16, world) for world in (2, 3)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Compile in no time, into a cache of its own."""
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MOE_AR_PREBUILT", raising=False)
    sources: list[str] = []

    def compiler(source: str, *_: object) -> bytes:
        sources.append(source)
        return b"\x7fELF"

    monkeypatch.setattr(compiling, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(compiling, "_run_nvrtc", compiler)
    return sources


def test_progress_on_a_terminal(built: list[str]) -> None:
    terminal = Terminal()
    with progress(terminal):
        compile_all(VARIANTS, "sm_90a")
    steps = [step.removeprefix("\x1b[K") for step in terminal.getvalue().split("\r")]
    assert steps == ["", "compiled 0 of 2", "compiled 1 of 2", ""]
    assert len(built) == 2
    with progress(terminal):
        compile_all(VARIANTS, "sm_90a")  # all there: nothing is long
    assert terminal.getvalue().count("\r") == 3


@pytest.mark.usefixtures("built")
def test_no_progress_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    with progress(pipe):
        compile_all(VARIANTS, "sm_90a")
    monkeypatch.setenv("PMI_RANK", "1")
    with progress(terminal):
        compile_all(VARIANTS, "sm_80")
    assert pipe.getvalue() == terminal.getvalue() == ""


def test_the_first_failure_ends_compiling(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise CompileError("refused")

    monkeypatch.setattr(compiling, "_run_nvrtc", refuse)
    terminal = Terminal()
    with pytest.raises(CompileError, match="refused"), progress(terminal):
        compile_all(VARIANTS, "sm_90a")
    assert "1 of 2" not in terminal.getvalue()
