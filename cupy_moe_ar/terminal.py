"""The command line and the terminal of programs that `mpirun` may have started."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

__all__ = ["launcher_rank", "parse", "positive", "progress"]

# Where launchers (Open MPI, MPICH and Intel MPI, PMIx) tell a process its rank.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launcher_rank() -> int | None:
    """Return the rank that `mpirun` gave this process; None if it was not started by one."""
    told = (os.environ.get(name, "") for name in _RANK_VARIABLES)
    return next((int(text) for text in told if text.isdigit()), None)


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line; of all processes that mpirun started, only the first complains."""
    if not launcher_rank():
        return parser.parse_args(words)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_args(words)


def positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive; got {value}")
    return value


@contextlib.contextmanager
def progress(stream: TextIO | None = None) -> Iterator[None]:
    """Show in one line how far compiling is, where that goes to a terminal and on rank 0 only.

    Args:
        stream: Where to; None is standard error.
    """
    stream = stream or sys.stderr
    if launcher_rank() or not stream.isatty():
        yield
        return
    log = logging.getLogger(f"{__package__}.compile")
    handler = _Line(stream)
    level = log.level
    log.addHandler(handler)
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Line(logging.Handler):
    """Writes records that have `progress` over each other."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self._stream = stream
        self.addFilter(lambda record: hasattr(record, "progress"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; the last of a series is wiped out."""
        number, of = record.progress  # type: ignore[attr-defined]
        self._stream.write("\r\x1b[K" + (record.getMessage() if number < of else ""))
        self._stream.flush()
