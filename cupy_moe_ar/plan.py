"""Which launch serves a call: a pure function of the call and of limits that all ranks share.

Every rank must launch the same grid, so nothing here may depend on the rank, on timing or on free
memory. The bits of the result never depend on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .abi import GROUP_VECTORS, MAX_BLOCK_THREADS

__all__ = ["KernelLimits", "LaunchShape", "RowPlan", "all_shapes", "launch_shapes", "plan_rows"]

CLUSTER_SIZES = (1, 2, 4, 8)
_WARP = 32


@dataclass(frozen=True)
class LaunchShape:
    """How the threads of a cluster share a row.

    Attributes:
        cluster_blocks: CTAs that hold one row together: 1, 2, 4 or 8.
        block_threads: Threads of a CTA, a multiple of 32.
        long_rows: Whether a thread holds several 16-byte vectors, one after the other.
    """

    cluster_blocks: int
    block_threads: int
    long_rows: bool


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


def launch_shapes(row_vectors: int) -> list[LaunchShape]:
    """Return every shape that can hold a row of `row_vectors` 16-byte vectors."""
    groups = -(-row_vectors // GROUP_VECTORS)
    shapes = []
    for cluster in CLUSTER_SIZES:
        warps = -(-groups // cluster)
        if cluster > 1 and cluster > groups:
            continue
        if warps * _WARP <= MAX_BLOCK_THREADS:
            shapes.append(LaunchShape(cluster, warps * _WARP, long_rows=False))
        threads = min(max(_WARP, warps * _WARP // 2), MAX_BLOCK_THREADS)
        shapes.append(LaunchShape(cluster, -(-threads // _WARP) * _WARP, long_rows=True))
    return shapes


def plan_rows(
    token_num: int, row_vectors: int, limits: KernelLimits, shape: LaunchShape | None = None
) -> RowPlan:
    """Choose the launch for `token_num` rows; `shape` forces one of `launch_shapes`.

    Raises:
        ValueError: `shape` cannot hold such a row or cannot be launched here.
    """
    candidates = [s for s in launch_shapes(row_vectors) if limits.resident_clusters.get(s, 0) > 0]
    if shape is not None:
        if shape not in candidates:
            raise ValueError(f"launch_shape must be one of {candidates}; got {shape}")
    else:
        shape = _choose(token_num, candidates, limits)
    clusters = min(token_num, limits.resident_clusters[shape])
    return RowPlan(shape, clusters * shape.cluster_blocks)


def _choose(token_num: int, candidates: list[LaunchShape], limits: KernelLimits) -> LaunchShape:
    """Spread a few rows over many SMs, and give many rows small clusters."""
    single = [s for s in candidates if not s.long_rows]
    if not single:  # long rows without clusters: the most threads
        return max(candidates, key=lambda s: s.cluster_blocks * s.block_threads)
    fitting = [s for s in single if s.cluster_blocks * token_num <= limits.sm_count]
    if fitting:
        return max(fitting, key=lambda s: s.cluster_blocks)
    return min(single, key=lambda s: s.cluster_blocks)


def all_shapes() -> list[LaunchShape]:
    """Return every shape that any row may ask for."""
    return [
        LaunchShape(cluster, threads, long_rows)
        for cluster in CLUSTER_SIZES
        for threads in range(_WARP, MAX_BLOCK_THREADS + 1, _WARP)
        for long_rows in (False, True)
    ]
