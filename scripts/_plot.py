"""The picture of a benchmark's rows: time over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot"]

_LINES = (  # column, label, style
    ("us", "fused (ours)", {"color": "tab:blue", "marker": "o", "linewidth": 2}),
    ("floor_us", "bare exchange", {"color": "tab:green", "marker": "s"}),
    ("ar_fusion_us", "finalize kernel, all-reduce fusion", {"color": "tab:orange", "marker": "^"}),
    ("nccl_us", "separate kernels and NCCL", {"color": "tab:red", "marker": "v"}),
    ("link_us", "link limit", {"color": "0.5", "linestyle": ":"}),
    ("memory_us", "memory limit", {"color": "0.5", "linestyle": "--"}),
)
_LIMITS = ("link_us", "memory_us")
_PANEL = ("op", "protocol", "world", "hidden", "top_k", "dtype", "comm_dtype", "preset")


def plot(rows: Sequence[Mapping[str, Any]], png: Path) -> None:
    """Draw a panel for each operation and shape of rows that are not quantised; write the file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in (row for row in rows if row.get("quant") is None):
        panels.setdefault(tuple(row.get(key) for key in _PANEL), []).append(row)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4.2 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, found) in zip(axes.flat, panels.items(), strict=False):
        found = sorted(found, key=lambda row: row["tokens"])
        tokens = sorted({row["tokens"] for row in found})
        lowest = float("inf")
        for column, label, style in _LINES:
            points = [(row["tokens"], row[column]) for row in found if row.get(column) is not None]
            if not points:
                continue
            size = 4 if len(points) <= 24 else 0
            axis.plot(*zip(*points, strict=True), label=label, markersize=size, **style)
            if column not in _LIMITS:
                lowest = min(lowest, *(us for _, us in points))
        named = dict(zip(_PANEL, panel, strict=True))
        wire = "" if named["comm_dtype"] == named["dtype"] else f" ({named['comm_dtype']} travels)"
        axis.set_title(
            (f"{named['preset']}: " if named["preset"] else "")
            + f"{named['op']}, {named['protocol']}, hidden {named['hidden']}, "
            f"{named['world']} ranks, {named['dtype']}{wire}",
            fontsize=9,
        )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        # The limits go on to nothing; above is room for the legend.
        axis.set_ylim(lowest / 2, 4 * axis.get_ylim()[1])
        if len(tokens) <= 12:
            axis.set_xticks(tokens, map(str, tokens))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens")
        axis.set_ylabel("µs a launch")
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize=8)
    figure.suptitle(f"{rows[0]['gpu']}, commit {rows[0]['commit']}", fontsize=10)
    figure.savefig(png, dpi=130)
    pyplot.close(figure)
