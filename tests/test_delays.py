"""Test builds: chosen ranks wait at chosen points of a kernel; nothing of it is in other builds."""

from __future__ import annotations

import hashlib
import shutil
import struct
import time
from pathlib import Path

import pytest
from cases import (
    BF16,
    Rank,
    Ranks,
    backend,
    check,
    check_bits,
    dense_case,
    each_protocol,
    each_world,
    finalize,
)
from test_compile import ARCH, needs_nvrtc

from cupy_moe_ar import Workspace, plan_allreduce_fusion
from cupy_moe_ar import compile as compiling
from cupy_moe_ar.compile import Variant

POINTS = {"push": 1, "poll": 2, "restore": 4, "advance": 8, "end": 16}  # delay.cuh's
WAIT_S = 0.3
HOOK = "delay(p"  # in each line that calls it


@pytest.mark.skipif(backend() != "cpu", reason="times calls that return when they are done")
@pytest.mark.parametrize("point", POINTS)
@each_protocol
@each_world(2)
def test_a_rank_waits_where_it_is_told(
    ranks: Ranks, oneshot: bool, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_AR_DELAYS", "1")
    case = dense_case(ranks.size, 1, 64)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        def seconds(delays: int) -> float:
            workspace._params.delays = delays
            workspace.launches.clear()  # those have parameters of their own
            begin = time.monotonic()
            check(case, finalize(rank, workspace, case, use_oneshot=oneshot))
            return time.monotonic() - begin

        late = rank.rank == 0
        assert min(seconds(0) for _ in range(3)) < WAIT_S
        # The calls end with a meeting, so the other rank's takes as long.
        assert seconds(POINTS[point] | int(WAIT_S * 1e6) << 8 if late else 0) >= WAIT_S


@pytest.mark.skipif(backend() != "cpu", reason="about the emulator")
@each_world(2)
def test_programmatic_launches_overlap(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returns once its launch has triggered, which the next cannot before this one's end."""
    monkeypatch.setenv("MOE_AR_DELAYS", "1")
    case = dense_case(ranks.size, 1, 64)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        given = {name: rank.put(x).array for name, x in case.arrays(rank.rank).items()}
        out = rank.put(case.rows[0] * 0)
        workspace._backend.overlap = True
        workspace._params.delays = POINTS["end"] | int(WAIT_S * 1e6) << 8
        planned = plan_allreduce_fusion(
            workspace=workspace,
            **given,
            residual_out=out.array,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
        )

        def times() -> tuple[float, ...]:
            rank.meet()
            begin = time.monotonic()
            planned.run()
            first = time.monotonic() - begin
            planned.run()
            second = time.monotonic() - begin
            workspace._backend.synchronize()
            return first, second, time.monotonic() - begin

        # A busy machine may make any of them longer, none shorter.
        first, second, both = zip(*(times() for _ in range(3)), strict=True)
        assert min(first) < WAIT_S
        assert WAIT_S <= min(second) < 2 * WAIT_S
        assert min(both) >= 2 * WAIT_S
        check_bits(out.read(), case.float32.residual_out, "residual_out")


@needs_nvrtc
def test_other_builds_have_the_machine_code_of_kernels_without_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(compiling.sources(), root)
    hooks = 0
    for path in root.rglob("moe_ar/*.cuh"):
        if path.name != "delay.cuh":
            lines = path.read_text().splitlines(keepends=True)
            hooks += sum(HOOK in line for line in lines)
            kept = [line.replace("return delay(p_, Point::kRestore)", "return") for line in lines]
            path.write_text("".join(line for line in kept if HOOK not in line))
    assert hooks == 6
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path / "cache"))
    variant = Variant("allreduce", "twoshot", BF16, BF16, 2)
    with_hooks = machine_code(compiling.compile_cuda(variant, ARCH))
    monkeypatch.setenv("MOE_AR_DELAYS", "1")
    delayed = machine_code(compiling.compile_cuda(variant, ARCH))
    monkeypatch.delenv("MOE_AR_DELAYS")
    monkeypatch.setattr(compiling, "sources", lambda: root)
    assert len(with_hooks) == len(variant.kernels)
    assert with_hooks == machine_code(compiling.compile_cuda(variant, ARCH))
    assert not set(with_hooks.items()) & set(delayed.items())


def machine_code(cubin: Path) -> dict[str, str]:
    """Digest of each kernel's code, by section."""
    elf = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    step, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * step) for i in range(count)]
    found = {}
    for name, _, _, _, offset, size in sections:
        start = sections[names][4] + name
        text = elf[start : elf.index(b"\0", start)].decode()
        if text.startswith(".text."):
            found[text] = hashlib.sha256(elf[offset : offset + size]).hexdigest()
    return found
