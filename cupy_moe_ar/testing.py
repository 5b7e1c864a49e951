"""Help for tests and scripts: ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .group import ThreadGroup, run_threads

__all__ = ["run_ranks"]

_T = TypeVar("_T")


def run_ranks(world_size: int, body: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Run `body(group)` on each of `world_size` ranks, each a thread of this process.

    Args:
        world_size: Number of ranks.
        body: Gets the rank's member of the group, which is what `Workspace` takes as `comm`.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: What the first failing rank raised.

    Example:
        >>> run_ranks(2, lambda group: group.allgather(group.Get_rank()))
        [[0, 1], [0, 1]]
    """
    return run_threads(world_size, body)
