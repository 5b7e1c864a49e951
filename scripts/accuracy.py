"""How exact the fused end of a layer is, by the NumPy reference, and what a workspace takes.

    python scripts/accuracy.py accuracy.json
    python scripts/accuracy.py accuracy.json --plot accuracy.png      draws what was computed before

The kernels give the reference's `residual_out` bit for bit, so no GPU is needed. Errors are mean
|error| against float64, bfloat16, top-8: after one layer with 2, 4 and 8 ranks, and along 60 layers
that each add to the residual stream. Beside them: to round the exact result only, which nothing can
beat, and to add routes, ranks and residual in bfloat16, as kernels do that accumulate in 16 bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from _ranks import parse
from numpy.typing import NDArray

from cupy_moe_ar import DType, Workspace, reference

Array = NDArray[Any]

TOKENS, HIDDEN, TOP_K, LAYERS = 16, 1024, 8, 60
WORLDS = (2, 4, 8)
CAPACITIES = tuple(1 << bits for bits in range(4, 14))  # tokens of hidden 7168


class Layer:
    """The routes of one layer, the same on every rank, and each rank's rows."""

    def __init__(self, world_size: int, seed: int) -> None:
        """Draw; a rank's rows are a slice of what the experts make."""
        rng = np.random.default_rng([world_size, seed])
        logits = rng.standard_normal((TOKENS, TOP_K))
        scales = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        self.scales = self._rounded(scales)
        self.index = np.arange(TOKENS * TOP_K, dtype=np.int32).reshape(TOKENS, TOP_K)
        deviation = 1.0 / np.sqrt(world_size)
        self.rows = [
            self._rounded(rng.standard_normal((TOKENS * TOP_K, HIDDEN)) * deviation)
            for _ in range(world_size)
        ]

    @staticmethod
    def _rounded(values: Array) -> Array:
        return reference.round_to(values, DType.BFLOAT16)

    def partials(self) -> list[Array]:
        """Return each rank's part in float64."""
        return [reference.moe_finalize(rows, self.index, self.scales) for rows in self.rows]

    def in_16_bits(self, residual: Array) -> Array:
        """Add route by route, rank by rank and to the residual, rounding each time."""
        total = None
        for rows in self.rows:
            part = np.zeros((TOKENS, HIDDEN), rows.dtype)
            for k in range(TOP_K):
                weighed = self._rounded(
                    rows[self.index[:, k]].astype(np.float32)
                    * self.scales[:, k : k + 1].astype(np.float32)
                )
                part = self._rounded(part.astype(np.float32) + weighed.astype(np.float32))
            total = part if total is None else self._rounded(
                total.astype(np.float32) + part.astype(np.float32)
            )  # fmt: skip
        assert total is not None
        return self._rounded(total.astype(np.float32) + residual.astype(np.float32))


def errors_along(world_size: int, layers: int) -> list[dict[str, float]]:
    """Return the errors of the residual stream after each layer."""
    start = Layer._rounded(np.random.default_rng(0).standard_normal((TOKENS, HIDDEN)))
    exact = start.astype(np.float64)
    ours = ours_wide = narrow = start
    found = []
    for number in range(layers):
        layer = Layer(world_size, number)
        partials = layer.partials()
        exact = exact + np.sum(partials, axis=0)

        def ends(residual: Array, comm_dtype: DType, partials: list[Array] = partials) -> Array:
            return reference.finish(
                partials, dtype=DType.BFLOAT16, comm_dtype=comm_dtype, residual_in=residual
            ).residual_out

        ours = ends(ours, DType.BFLOAT16)
        ours_wide = ends(ours_wide, DType.FLOAT32)
        narrow = layer.in_16_bits(narrow)
        found.append(
            {
                name: float(np.abs(values.astype(np.float64) - exact).mean())
                for name, values in (
                    ("rounding", Layer._rounded(exact)),
                    ("ours", ours),
                    ("ours_float32_wire", ours_wide),
                    ("in_16_bits", narrow),
                )
            }
        )
    return found


def compute() -> dict[str, Any]:
    """Compute what is drawn."""
    return {
        "one_layer": {str(size): errors_along(size, 1)[0] for size in WORLDS},
        "layers": errors_along(8, LAYERS),
        "workspace_mib": {
            str(size): [
                Workspace.bytes_required(world_size=size, max_token_num=tokens, hidden_dim=7168)
                / 2**20
                for tokens in CAPACITIES
            ]
            for size in WORLDS
        },
    }


LINES = (
    ("in_16_bits", "16-bit accumulation", "tab:red"),
    ("ours", "ours", "tab:blue"),
    ("ours_float32_wire", "ours, float32 travels", "tab:cyan"),
    ("rounding", "rounding the exact result", "tab:green"),
)


def plot(found: dict[str, Any], png: Path) -> None:
    """Draw errors and megabytes."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (one, many, memory) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    places = np.arange(len(WORLDS))
    for offset, (name, label, color) in enumerate(LINES):
        heights = [found["one_layer"][str(size)][name] for size in WORLDS]
        one.bar(places + 0.2 * (offset - 1.5), heights, 0.2, label=label, color=color)
        many.plot(
            range(1, LAYERS + 1), [row[name] for row in found["layers"]], label=label, color=color
        )
    one.set_xticks(places, [f"{size} ranks" for size in WORLDS])
    one.set_title("residual_out after one layer", fontsize=10)
    many.set_xlabel("layers")
    many.set_title("residual stream, 8 ranks", fontsize=10)
    for size, mib in found["workspace_mib"].items():
        memory.plot(CAPACITIES, mib, marker="o", label=f"{size} ranks")
    memory.set_xscale("log", base=2)
    memory.set_yscale("log", base=2)
    memory.set_xticks(CAPACITIES, map(str, CAPACITIES))
    memory.set_xlabel("max_token_num, hidden 7168, bfloat16")
    memory.set_title("MiB that a rank shares", fontsize=10)
    for axis in (one, many):
        axis.set_ylabel("mean |error|")
    for axis in (one, many, memory):
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8, framealpha=1, loc="lower right" if axis is one else "upper left")
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_json", metavar="OUT_JSON", type=Path)
    parser.add_argument("--plot", metavar="PNG", type=Path, help="draw OUT_JSON, compute nothing")
    given = parse(parser)
    if given.plot:
        plot(json.loads(given.out_json.read_text()), given.plot)
        return
    found = compute()
    given.out_json.write_text(json.dumps(found, indent=1) + "\n")
    for size in WORLDS:
        print(f"{size} ranks:", found["one_layer"][str(size)])
    print(f"after {LAYERS} layers:", found["layers"][-1])


if __name__ == "__main__":
    main()
