"""What a benchmark tells: on the terminal, in a log and in a JSON file."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from _checkout import IS_CHECKOUT, ROOT
from _ranks import Rank, table

from cupy_moe_ar import __version__
from cupy_moe_ar.launch import driver_version

__all__ = ["Log", "Row", "line", "shape_table"]

Row = dict[str, Any]


class Log:
    """What rank 0 tells: on its terminal, in the log and in the JSON file."""

    def __init__(self, rank: Rank, options: argparse.Namespace) -> None:
        """Write the header; collective."""
        self._rank = rank
        self._json: Path = options.out_json
        self._file = self._json.with_suffix(".log")
        self._rows: list[Row] = []
        devices = rank.group.allgather(rank.device_name)
        self.facts: Row = {}
        if rank.index:
            return
        self._json.parent.mkdir(parents=True, exist_ok=True)
        if options.append and self._json.exists():
            self._rows = json.loads(self._json.read_text())
        if not options.append:
            self._file.unlink(missing_ok=True)
        self.facts = {
            "gpu": devices[0].partition(" (")[0] if rank.on_gpu else None,
            "driver": _driver() if rank.on_gpu else None,
            "commit": _commit(),
        }
        launcher = "threads" if options.in_process else "processes"
        self.say(f"date     {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}")
        self.say(f"command  {shlex.join(sys.argv)}, {rank.size} ranks as {launcher}")
        self.say(f"commit   {self.facts['commit']}")
        self.say(f"backend  {'cuda' if rank.on_gpu else 'cpu'}")
        for index, device in enumerate(devices):
            self.say(f"rank {index:<3} {device}")
        if rank.on_gpu:
            self.say(f"driver   {self.facts['driver']}, CUDA {driver_version()}")
        self.say(f"versions {_versions()}\n")

    def say(self, text: str = "") -> None:
        """Print a line on rank 0, and put it into the log."""
        if self._rank.index == 0:
            print(text, flush=True)
            with self._file.open("a") as file:
                print(text, file=file)

    def add(self, row: Row) -> None:
        """Add a row to the JSON file."""
        if self._rank.index == 0:
            self._rows.append(row)
            partly = self._json.with_suffix(".partly")
            partly.write_text("[\n" + ",\n".join(json.dumps(row) for row in self._rows) + "\n]\n")
            partly.replace(self._json)


def _commit() -> str:
    if not IS_CHECKOUT:
        return f"wheel {__version__}"
    if os.environ.get("MOE_AR_COMMIT"):
        return os.environ["MOE_AR_COMMIT"]
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _versions() -> str:
    words = [f"python {sys.version.split()[0]}"]
    for name in ("numpy", "mpi4py", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings",
                 "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12"):  # fmt: skip
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            words.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(words)


COLUMNS = (  # option that asks for it, key, head, format
    ("preset", "preset", "         preset", "s"),
    ("op", "hidden", "hidden", "d"),
    ("op", "top_k", "top_k", "d"),
    ("op", "tokens", "tokens", "d"),
    ("quant", "quant", "              quant", "s"),
    ("op", "us", "       us", ".2f"),
    ("quant", "us_over_plain", "over plain", ".3f"),
    ("floor", "floor_us", "floor_us", ".2f"),
    ("floor", "ratio", "ratio", ".2f"),
    ("baselines", "ar_fusion_us", "ar_fusion_us", ".2f"),
    ("baselines", "nccl_us", " nccl_us", ".2f"),
    ("prefill", "after_prefill_us", "after prefill", ".2f"),
    ("floor", "link_us", " link_us", ".2f"),
    ("floor", "memory_us", "memory_us", ".2f"),
    ("host", "host_call_us", "host: call", ".1f"),
    ("host", "host_describe_us", "of it checks", ".1f"),
    ("host", "host_plan_us", "planned", ".1f"),
    ("host", "host_launch_us", "bare launch", ".1f"),
    ("op", "residual_mean_abs_error", "residual error", ".3e"),
    ("op", "residual_rounding_floor", "rounding floor", ".3e"),
    ("op", "bits_equal", "ranks equal", ""),
)


def line(options: argparse.Namespace, row: Row | None = None) -> str:
    """Write a row for people; without one the head of the table."""
    cells = []
    for option, key, head, layout in COLUMNS:
        if not getattr(options, option):
            continue
        text = head
        if row is not None:
            value = row.get(key)
            if key == "ratio" and row["floor_us"]:
                value = row["us"] / row["floor_us"]
            text = "-" if value is None else format(value, layout)
        cells.append(text.rjust(len(head)))
    return "  ".join(cells)


def shape_table(shapes: list[Row]) -> str:
    """Write launch shapes for people, the fastest first; a star marks the planner's choice."""
    head = ("", "cluster", "threads", "long", "grid", "us")
    rows = [
        (
            "*" if shape["chosen"] else "",
            str(shape["cluster_blocks"]),
            str(shape["block_threads"]),
            shape["kernel"],
            str(shape["grid_blocks"]),
            f"{shape['us']:.2f}",
        )
        for shape in sorted(shapes, key=lambda shape: shape["us"])
    ]
    return table(head, rows)
