"""Time the fused finalize at every token count, and look for cliffs.

    mpirun -n 2 python scripts/sweep.py sweep.json --most 300
    python scripts/sweep.py sweep.json --plot sweep.png        draws what was measured before

A cliff is a token count T with t(T+1) > 1.15 t(T), t(2T) > 2.1 t(T), or a larger count that is
faster by more than the noise. The counts that it rests on are timed again, and the shorter times
taken, before it is believed. The method is bench.py's, with fewer replays and data that the counts
share. Exit status 1 if there is a cliff.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from _ranks import Rank, choose_backend, parse, positive, start
from _report import Log
from _workload import OPERATIONS, Case, Preset, common_inputs

from cupy_moe_ar import DType, Workspace, reference
from cupy_moe_ar.group import Group

NOISE = 1.07  # two runs of one count differ by up to this
RETRIES = 2
OPERATION = OPERATIONS["moe_finalize"]


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_json", metavar="OUT_JSON", type=Path)
    parser.add_argument("--most", type=positive, default=300, help="largest token count")
    parser.add_argument("--hidden", type=positive, nargs="+", default=[2880, 4096, 6144, 7168])
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument("--replays", type=positive, default=30)
    parser.add_argument("--in-process", type=positive, metavar="RANKS", help="ranks as threads")
    parser.set_defaults(append=False)
    parser.add_argument("--plot", metavar="PNG", type=Path, help="draw OUT_JSON and run nothing")
    return parser


def cliffs(us: dict[int, float]) -> dict[str, tuple[int, int]]:
    """Say where times over token counts jump or fall, and which counts that rests on."""
    found = {}
    fastest = max(us)  # of the larger counts
    for tokens in sorted(us, reverse=True):
        if us[tokens] < us[fastest]:
            fastest = tokens
        if us[tokens] > NOISE * us[fastest]:
            words = f"{tokens} tokens take {us[tokens]:.2f} us, {fastest} take {us[fastest]:.2f}"
            found[words] = (tokens, fastest)
        for factor, other in ((1.15, tokens + 1), (2.1, 2 * tokens)):
            if other in us and us[other] > factor * us[tokens]:
                words = f"{tokens} -> {other} tokens: {us[tokens]:.2f} -> {us[other]:.2f} us"
                found[words] = (tokens, other)
    return found


class Sweep:
    """The launches of one hidden size on one rank."""

    def __init__(
        self, rank: Rank, workspace: Workspace, hidden: int, options: argparse.Namespace
    ) -> None:
        """Make the data that the token counts share."""
        self.rank, self.workspace, self.options = rank, workspace, options
        model = Preset(hidden, options.top_k, shared=True, factor=2.5)
        self.case = case = Case(options.most, model, DType.BFLOAT16, DType.BFLOAT16)
        data = OPERATION.inputs(case, rank.index) | common_inputs(case)
        poison = np.full((case.tokens, hidden), np.nan, reference.numpy_dtype(case.dtype))
        data |= {"residual_out": poison, "norm_out": poison}
        self.arrays = {name: rank.put(x) for name, x in data.items() if x is not None}

    def time_us(self, tokens: int) -> float:
        """Time a count."""
        whole = ("allreduce_in", "rms_gamma")
        call = functools.partial(
            OPERATION.call,
            workspace=self.workspace,
            **{name: x if name in whole else x[:tokens] for name, x in self.arrays.items()},
            **OPERATION.options(self.case),
            dtype=self.case.dtype,
            launch_with_pdl=True,
            stream=self.rank.stream,
        )
        return round(self.rank.time_us(call, self.options.replays), 3)

    def run(self) -> dict[str, Any]:
        """Time all counts, doubtful ones again."""
        us = {tokens: self.time_us(tokens) for tokens in range(1, self.options.most + 1)}
        again: set[int] = set()
        for _ in range(RETRIES):
            doubtful = {tokens for pair in cliffs(us).values() for tokens in pair}
            again |= doubtful
            for tokens in sorted(doubtful):
                us[tokens] = min(us[tokens], self.time_us(tokens))
        found = list(cliffs(us))
        return {"us": list(us.values()), "cliffs": found, "timed_again": sorted(again)}


def sweep(group: Group, options: argparse.Namespace) -> int:
    """Measure on one rank; return its exit status, the same on all."""
    clean = True
    with Workspace(
        group,
        max_token_num=options.most,
        hidden_dim=max(options.hidden),
        dtype="bfloat16",
        operations=["moe_finalize"],
        backend=choose_backend(group),
        timeout_s=60.0,
    ) as workspace:
        rank = Rank(group, workspace)
        log = Log(rank, options)
        for hidden in options.hidden:
            row = Sweep(rank, workspace, hidden, options).run()
            clean = clean and not row["cliffs"]
            log.add({"hidden": hidden, **row, **log.facts})
            log.say(f"hidden {hidden}: " + ("; ".join(row["cliffs"]) or "no cliff"))
    return 0 if clean else 1


def plot(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw time over tokens, a line for each hidden size."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        axis.plot(range(1, len(row["us"]) + 1), row["us"], label=f"hidden {row['hidden']}")
    axis.set_xlabel("tokens")
    axis.set_ylabel("µs a launch")
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend()
    axis.set_title(f"moe_finalize at every token count, {rows[0]['gpu']}", fontsize=10)
    figure.savefig(png, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    given = parse(arguments())
    if given.plot:
        plot(json.loads(given.out_json.read_text()), given.plot)
    else:
        start(lambda group: sweep(group, given), given.in_process)
