"""Exceptions of the package. Argument faults are `ValueError`s, the rest `RuntimeError`s."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArgumentError",
    "CompileError",
    "MoeArError",
    "PeerTimeoutError",
    "UnsupportedError",
    "WorkspaceError",
]


class MoeArError(Exception):
    """Base class of every exception that the package raises on purpose."""


class ArgumentError(MoeArError, ValueError):
    """One or more arguments of a call are wrong; `faults` names each of them.

    Raised before anything is launched. The workspace stays usable.
    """

    def __init__(self, function: str, faults: Sequence[str]) -> None:
        self.function = function
        self.faults = tuple(faults)
        super().__init__(function, self.faults)

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return f"{self.function}: {self.faults[0]}"
        return f"{self.function}: {len(self.faults)} faults:" + "".join(
            f"\n  - {fault}" for fault in self.faults
        )


class WorkspaceError(MoeArError, RuntimeError):
    """The workspace cannot do this in its present state (closed, unprepared, other stream)."""


class UnsupportedError(MoeArError, RuntimeError):
    """The ranks, devices or software found here cannot run this; the message says the remedy."""


class CompileError(MoeArError, RuntimeError):
    """A compiler is missing or refused a kernel; the message holds its log."""


class PeerTimeoutError(MoeArError, RuntimeError):
    """A peer did not answer within the workspace's `timeout_s`; the workspace is broken.

    Attributes:
        rank: Rank that gave up waiting.
        missing_rank: Rank that was waited for; `rank` itself if its peers gave it up.
        token: Token (row) that was waited for.
        launch: Number of the launch, counted from 0 since the workspace was built or restored.
    """

    def __init__(self, rank: int, missing_rank: int, token: int, launch: int) -> None:
        self.rank = rank
        self.missing_rank = missing_rank
        self.token = token
        self.launch = launch
        super().__init__(rank, missing_rank, token, launch)

    def __str__(self) -> str:
        waited = f"rank {self.rank} waited in vain for rank {self.missing_rank}"
        if self.rank == self.missing_rank:
            waited = f"a peer waited in vain for rank {self.rank}, which is this rank"
        return (
            f"{waited} (token {self.token}, launch {self.launch}); outputs of that launch and of "
            "all later ones are NaN. Close the workspace and build a new one with the ranks that "
            "are left"
        )
