"""Calls that are planned once, and calls that were made before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, Rank, Ranks, check_bits, current_rank, each_world, finalize, random_case

from cupy_moe_ar import (
    ArgumentError,
    Workspace,
    WorkspaceError,
    moe_finalize_allreduce_fusion,
    ops,
    plan_moe_finalize_allreduce_fusion,
)


def arrays(rank: Rank, case: Case) -> dict[str, Any]:
    """The case's arguments on the device, with room for `residual_out`."""
    given = case.arrays(rank.rank)
    buffers = {name: rank.put(x) for name, x in given.items()}
    buffers["residual_out"] = rank.put(given["residual_in"] * 0)
    return buffers


def write(array: Any, host: Any) -> None:
    """Copy values from the host into an array on the device."""
    if isinstance(array, np.ndarray):
        array[...] = host
    else:
        array.set(host)


@each_world(2, 3)
def test_a_planned_call_reads_its_arrays_at_each_run(ranks: Ranks) -> None:
    cases = [random_case(ranks.size, 4, 264, seed=seed) for seed in (0, 1)]

    @ranks.with_workspace(cases[0])
    def body(rank: Rank, workspace: Workspace) -> None:
        expected = [finalize(rank, workspace, case)["residual_out"] for case in cases]
        buffers = arrays(rank, cases[0])
        given = {name: buffer.array for name, buffer in buffers.items()}
        planned = plan_moe_finalize_allreduce_fusion(
            workspace=workspace, **given, **cases[0].numbers, stream=rank.stream
        )
        for index in (0, 1, 1, 0):
            for name, host in cases[index].arrays(rank.rank).items():
                write(buffers[name].array, host)
            rank.meet()
            planned.run()
            rank.meet()
            check_bits(buffers["residual_out"].read(), expected[index], f"case {index}")
        rank.meet()
        workspace.close()
        with pytest.raises(WorkspaceError, match="closed"):
            planned.run()


@each_world(2)
def test_planning_checks_the_call(ranks: Ranks) -> None:
    case = random_case(ranks.size, 4, 264)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        given = {name: buffer.array for name, buffer in arrays(rank, case).items()}
        options = {**case.numbers, "rms_eps": -1.0}
        with pytest.raises(ArgumentError, match="rms_eps must be finite and at least 0"):
            plan_moe_finalize_allreduce_fusion(
                workspace=workspace, **given, **options, stream=rank.stream
            )
        with pytest.raises(TypeError, match="no_such"):
            plan_moe_finalize_allreduce_fusion(workspace=workspace, **given, no_such=1)


@each_world(2, 3)
def test_plans_are_compared_over_the_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_AR_CHECK", "1")
    case = random_case(ranks.size, 4, 264)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        buffers = arrays(rank, case)
        given = {name: buffer.array for name, buffer in buffers.items()}
        options = {**case.numbers, "weight_bias": float(rank.rank == 1)}
        with pytest.raises(ArgumentError, match="must be the same on every rank") as caught:
            plan_moe_finalize_allreduce_fusion(
                workspace=workspace, **given, **options, stream=rank.stream
            )
        rank.same(str(caught.value))
        planned = plan_moe_finalize_allreduce_fusion(
            workspace=workspace, **given, **case.numbers, stream=rank.stream
        )
        planned.run()
        rank.meet()
        right = case.float32.residual_out
        check_bits(buffers["residual_out"].read(), right, "residual_out")


@each_world(2)
def test_a_call_that_was_made_before_is_not_checked_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(ranks.size, 4, 264)
    described: list[tuple[int, float]] = []

    def describe(home: Any, **arguments: Any) -> Any:
        described.append((current_rank(), arguments["routed_scaling_factor"]))
        return original(home, **arguments)

    original = ops.describe_moe_finalize
    monkeypatch.setattr(ops, "describe_moe_finalize", describe)

    @ranks.with_workspace(case)
    def body(rank: Rank, workspace: Workspace) -> None:
        given = {name: buffer.array for name, buffer in arrays(rank, case).items()}
        for factor in (1.0, 2.0, 1.0, 2.0):
            options = {**case.numbers, "routed_scaling_factor": factor}
            moe_finalize_allreduce_fusion(
                workspace=workspace, **given, **options, stream=rank.stream
            )
            rank.meet()
        shorter = {**given, "residual_in": given["residual_in"][:2], **case.numbers}
        with pytest.raises(ArgumentError):  # another view of the same memory is another call
            moe_finalize_allreduce_fusion(workspace=workspace, **shorter, stream=rank.stream)
        factors = [factor for index, factor in described if index == rank.rank]
        assert factors == [1.0, 2.0, case.numbers["routed_scaling_factor"]]
