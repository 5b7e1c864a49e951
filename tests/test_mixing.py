"""One workspace for all: operations, protocols, dtypes and shapes in any order, nothing reset."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    Array,
    Buffer,
    Case,
    Rank,
    Ranks,
    check,
    check_bits,
    crowded,
    dense_case,
    each_world,
    finalize,
    random_case,
    reduction_case,
)

from cupy_moe_ar import (
    Workspace,
    allgather_residual_rmsnorm,
    moe_finalize_reduce_scatter,
    reduce_scatter,
)

MOST = 9  # tokens


def cases(size: int) -> list[Case]:
    """Each producer with other dtypes, wires and hidden sizes."""
    return [
        random_case(size, MOST, 264, 4),
        reduction_case(size, MOST, 64, [2, 5], F16),
        dense_case(size, MOST, 520, BF16, F32),
        dense_case(size, MOST, 264),
    ]


@dataclass
class Queued:
    """A call whose arrays are ready, and what it must write."""

    launch: Callable[[], None]
    written: Buffer
    expected: Array
    words: str


class Mixer:
    """Makes calls of any kind over the same cases."""

    def __init__(self, rank: Rank, workspace: Workspace, several: Sequence[Case]) -> None:
        self.rank, self.workspace = rank, workspace
        for case in several:
            scatters = {"moe_finalize": ["moe_finalize_reduce_scatter"], "moe_reduction": []}
            halves = ["allgather", *scatters.get(case.operation, ["reduce_scatter"])]
            workspace.prepare(
                dtype=case.dtype, comm_dtype=case.comm_dtype, operations=[case.operation, *halves]
            )
        self.inputs = []
        self.right = []
        for case in several:
            arrays = case.arrays(rank.rank)
            self.inputs.append({name: rank.put(x) for name, x in arrays.items()})
            self.right.append(finalize(rank, workspace, case))
            check(case, self.right[-1])
        self.several = several

    def queue(self, which: int, tokens: int, kind: str) -> Queued:
        """Get a call ready: `kind` is a protocol or a half."""
        case, rank = self.several[which].first(tokens), self.rank
        right = {name: x[:tokens] for name, x in self.right[which].items()}
        share = self.workspace.share(tokens)
        arrays = {name: rank.put(x) for name, x in case.arrays(rank.rank).items()}
        options: dict[str, Any] = {"workspace": self.workspace, "stream": rank.stream}
        if kind in ("oneshot", "twoshot"):
            function: Callable[..., None] = case.function
            output, expected = "residual_out", right["residual_out"]
            options |= {**case.numbers, "use_oneshot": kind == "oneshot"}
        elif kind == "reduce_scatter":
            function = reduce_scatter
            options |= {"dtype": case.dtype, "comm_dtype": case.comm_dtype}
            if case.operation == "moe_finalize":
                function = moe_finalize_reduce_scatter
            arrays = {name: x for name, x in arrays.items()
                      if name not in ("residual_in", "rms_gamma")}  # fmt: skip
            output, expected = "reduce_scatter_out", right["allreduce_out"][share]
        else:
            function = allgather_residual_rmsnorm
            total = right["allreduce_out"]
            arrays = {"allgather_in": rank.put(total[share])}
            options |= {"dtype": case.dtype}
            output, expected = "allgather_out", total
        written = rank.put(np.zeros_like(expected))
        given = {name: buffer.array for name, buffer in (arrays | {output: written}).items()}
        keep = arrays

        def launch() -> None:
            assert keep
            function(**given, **options)

        return Queued(launch, written, expected, f"{kind} of {tokens} tokens, case {which}")

    def draw(self, dice: random.Random) -> Queued:
        """Get a random call ready, the same on every rank."""
        which = dice.randrange(len(self.several))
        kinds = ["oneshot", "twoshot", "allgather"]
        if self.several[which].operation != "moe_reduction":
            kinds.append("reduce_scatter")
        size = self.workspace.world_size
        tokens = dice.choice([1, 1, max(1, size - 1), size, MOST, dice.randint(1, MOST)])
        return self.queue(which, tokens, dice.choice(kinds))


def settle(rank: Rank, workspace: Workspace, calls: Sequence[Queued]) -> None:
    """Wait for calls and judge them."""
    rank.meet()
    workspace.check()
    for call in calls:
        check_bits(call.written.read(), call.expected, call.words)


SIZES: dict[str, Any] = {"max_token_num": MOST, "hidden_dim": 520, "dtype": F32, "operations": []}


@each_world(2, 3)
def test_calls_of_any_kind_in_any_order(ranks: Ranks) -> None:
    """Queued without meeting; ranks come late at times."""
    several = cases(ranks.size)

    @ranks.with_workspace(None, **SIZES)
    def body(rank: Rank, workspace: Workspace) -> None:
        mixer = Mixer(rank, workspace, several)
        dice, own_dice = random.Random(ranks.size), random.Random(rank.rank)
        for clusters in (1 << 20, 2):
            with crowded(workspace, clusters):
                for _ in range(6):
                    calls = [mixer.draw(dice) for _ in range(12)]
                    rank.meet()
                    for call in calls:
                        if own_dice.random() < 0.1:
                            time.sleep(0.005)
                        call.launch()
                    settle(rank, workspace, calls)


@pytest.mark.parametrize("kinds", [("twoshot", "oneshot"), ("reduce_scatter", "twoshot")])
@each_world(2, 3)
def test_decode_after_prefill(ranks: Ranks, kinds: tuple[str, str]) -> None:
    """A large launch, then small ones, and again: each finds its slots empty."""
    several = cases(ranks.size)

    @ranks.with_workspace(None, **SIZES)
    def body(rank: Rank, workspace: Workspace) -> None:
        mixer = Mixer(rank, workspace, several)
        for which in (0, 2):
            large, small = kinds
            order = [
                (MOST, large),
                (1, small),
                (1, small),
                (MOST, large),
                (2, small),
                (MOST, small),
            ]
            calls = [mixer.queue(which, tokens, kind) for tokens, kind in order]
            rank.meet()
            for call in calls:
                call.launch()
            settle(rank, workspace, calls)


@pytest.mark.gpu
@each_world(2, 4)
def test_one_graph_of_everything(ranks: Ranks) -> None:
    several = cases(ranks.size)

    @ranks.with_workspace(None, **SIZES)
    def body(rank: Rank, workspace: Workspace) -> None:
        mixer = Mixer(rank, workspace, several)
        dice = random.Random(7)
        calls = [mixer.draw(dice) for _ in range(21)]  # odd: each replay uses the other epoch
        rank.meet()
        rank.stream.begin_capture()
        for call in calls:
            call.launch()
        graph = rank.stream.end_capture()
        graph.upload(rank.stream)
        for _ in range(3):
            rank.meet()
            for _ in range(50):
                graph.launch(rank.stream)
            settle(rank, workspace, calls)
