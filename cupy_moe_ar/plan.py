"""Which launch serves a call: a pure function of the call and of limits that all ranks share.

Every rank must launch the same grid, so nothing here may depend on the rank, on timing or on free
memory. The bits of the result never depend on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .abi import GROUP_VECTORS, MAX_BLOCK_THREADS, MAX_GRID_BLOCKS

__all__ = ["KernelLimits", "LaunchShape", "RowPlan", "all_shapes", "launch_shapes", "plan_rows"]

CLUSTER_SIZES = (1, 2, 4, 8)
KERNELS = ("row", "rows", "long")
_WARP = 32


@dataclass(frozen=True)
class LaunchShape:
    """How the threads of a cluster share the work.

    Attributes:
        cluster_blocks: CTAs that hold one row together: 1, 2, 4 or 8.
        block_threads: Threads of a CTA, a multiple of 32.
        kernel: "row": a cluster holds one row and a thread one 16-byte vector of it; "rows": one
            row after the other; "long": also several vectors a thread.
    """

    cluster_blocks: int
    block_threads: int
    kernel: str


@dataclass(frozen=True)
class RowPlan:
    """A launch: its shape and the number of CTAs."""

    shape: LaunchShape
    grid_blocks: int


@dataclass(frozen=True)
class KernelLimits:
    """What one device holds of a module's kernels at a time; the minimum over all ranks.

    Attributes:
        resident_clusters: For each possible shape, the number of clusters that can run side by
            side with those of the other ranks on the device. A missing shape cannot be launched.
        sm_count: Streaming multiprocessors that this rank may fill.
    """

    resident_clusters: Mapping[LaunchShape, int]
    sm_count: int

    def clusters(self, shape: LaunchShape) -> int:
        """Return the most clusters of a launch of this shape."""
        return min(self.resident_clusters.get(shape, 0), MAX_GRID_BLOCKS // shape.cluster_blocks)


def launch_shapes(row_vectors: int) -> list[LaunchShape]:
    """Return every shape that can hold a row of `row_vectors` 16-byte vectors."""
    groups = -(-row_vectors // GROUP_VECTORS)
    shapes = []
    for cluster in CLUSTER_SIZES:
        if cluster > groups:
            continue
        warps = -(-groups // cluster)
        if warps * _WARP <= MAX_BLOCK_THREADS:
            shapes += [LaunchShape(cluster, warps * _WARP, kernel) for kernel in ("row", "rows")]
        threads = min(-(-warps // 2) * _WARP, MAX_BLOCK_THREADS)
        shapes.append(LaunchShape(cluster, threads, "long"))
    return shapes


def all_shapes() -> list[LaunchShape]:
    """Return every shape that any row may ask for."""
    return [
        LaunchShape(cluster, threads, kernel)
        for cluster in CLUSTER_SIZES
        for threads in range(_WARP, MAX_BLOCK_THREADS + 1, _WARP)
        for kernel in KERNELS
    ]


def plan_rows(
    token_num: int, row_vectors: int, limits: KernelLimits, shape: LaunchShape | None = None
) -> RowPlan:
    """Choose the launch for `token_num` rows; `shape` forces one of `launch_shapes`.

    Raises:
        ValueError: `shape` cannot hold so many or such rows, or cannot be launched here.
    """
    candidates = [
        candidate
        for candidate in launch_shapes(row_vectors)
        if limits.clusters(candidate) >= (token_num if candidate.kernel == "row" else 1)
    ]
    if shape is None:
        shape = _choose(token_num, candidates, limits)
    elif shape not in candidates:
        raise ValueError(f"launch_shape must be one of {candidates}; got {shape}")
    clusters = min(token_num, limits.clusters(shape))
    return RowPlan(shape, clusters * shape.cluster_blocks)


def _choose(token_num: int, candidates: list[LaunchShape], limits: KernelLimits) -> LaunchShape:
    """Spread a few rows over many SMs, and give many rows small clusters."""
    for kernel in KERNELS:
        shapes = [s for s in candidates if s.kernel == kernel]
        if not shapes:
            continue
        if kernel == "long":  # rows without clusters: the most threads
            return max(shapes, key=lambda s: s.cluster_blocks * s.block_threads)
        fitting = [s for s in shapes if s.cluster_blocks * token_num <= limits.sm_count]
        if fitting:
            return max(fitting, key=lambda s: s.cluster_blocks)
        return min(shapes, key=lambda s: s.cluster_blocks)
    raise ValueError("no launch holds such a row on these devices")
