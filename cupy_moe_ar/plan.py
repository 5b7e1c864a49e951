"""Which launch serves a call: a pure function of the call and of limits that all ranks share.

Every rank must launch the same grid, so nothing here may depend on the rank, on timing or on free
memory. The bits of the result never depend on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .abi import GROUP_VECTORS, MAX_BLOCK_THREADS, MAX_GRID_BLOCKS

__all__ = [
    "KERNELS",
    "KernelLimits",
    "LaunchShape",
    "RowPlan",
    "all_shapes",
    "choose_oneshot",
    "crossover_bytes",
    "launch_shapes",
    "plan_rows",
    "share_of",
]

CLUSTER_SIZES = (1, 2, 4, 8)
KERNELS = ("row", "row2", "rows", "rows2", "long")
_WARP = 32
_SPREAD = 2.0  # times the rows that are resident together, two vectors a thread
_FULLER = 1.1  # times as full; at 1.06, 210 to 248 tokens of 7168, 2% faster to 3% slower
_SECOND_WAIT_S = 0.8e-6
_STORE_BYTES_PER_S = 365e9  # NVLink 4 of an H200, measured


@dataclass(frozen=True)
class LaunchShape:
    """How the threads of a cluster share the work.

    Attributes:
        cluster_blocks: CTAs that hold one row together: 1, 2, 4 or 8.
        block_threads: Threads of a CTA, a multiple of 32.
        kernel: "row": a cluster holds one row and a thread one 16-byte vector of it; "rows": one
            row after the other; "row2", "rows2": two vectors a thread; "long": any number.
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

    def rounds(self, shape: LaunchShape, token_num: int) -> int:
        """Return how many rows a cluster of such a launch takes in turn."""
        return -(-token_num // self.clusters(shape))

    def fill(self, shape: LaunchShape, token_num: int) -> float:
        """Return how full these rounds are: the share of what is resident in them with a row."""
        return token_num / (self.rounds(shape, token_num) * self.clusters(shape))


def crossover_bytes(world_size: int) -> int:
    """Return the payload (tokens x hidden_dim x wire item) up to which one-shot is chosen unasked.

    One-shot sends it to every peer. Two-shot sends `1 / world_size` of it to every peer, twice, and
    waits for the link a second time, which takes 0.9 us more at 1 token on two H200s. Two ranks
    send as much in either way, and two-shot is never the faster: 26.9 against 24.7 us for 512 dense
    tokens of 7168, 32.2 against 30.1 for 512 that are gathered, 428 against 406 for 8192. For more
    ranks it is a model, not measured yet: that one-shot is the slower once the bytes that it sends
    beyond two-shot's take longer than that.
    """
    spared = (world_size - 1) * (world_size - 2)  # payloads, x world_size
    if spared <= 0:
        return 1 << 62
    return int(_SECOND_WAIT_S * _STORE_BYTES_PER_S * world_size / spared)


def choose_oneshot(payload_bytes: int, world_size: int, oneshot_bytes: int) -> bool:
    """Whether one-shot, which takes `oneshot_bytes` at most, serves a call; else two-shot does."""
    return payload_bytes <= min(oneshot_bytes, crossover_bytes(world_size))


def share_of(rank: int, world_size: int, token_num: int) -> range:
    """Return the tokens that a rank owns in two-shot: a run, of equal lengths or one token more."""
    base, extra = divmod(token_num, world_size)
    begin = rank * base + min(rank, extra)
    return range(begin, begin + base + (rank < extra))


def launch_shapes(row_vectors: int) -> list[LaunchShape]:
    """Return every shape that can hold a row of `row_vectors` 16-byte vectors."""
    groups = -(-row_vectors // GROUP_VECTORS)
    shapes = []
    for cluster in CLUSTER_SIZES:
        if cluster > groups:
            continue
        warps = -(-groups // cluster)
        half = -(-warps // 2)
        if warps * _WARP <= MAX_BLOCK_THREADS:
            shapes += [LaunchShape(cluster, warps * _WARP, kernel) for kernel in ("row", "rows")]
        if half * _WARP <= MAX_BLOCK_THREADS and warps > 1:
            shapes += [LaunchShape(cluster, half * _WARP, kernel) for kernel in ("row2", "rows2")]
        shapes.append(LaunchShape(cluster, min(half * _WARP, MAX_BLOCK_THREADS), "long"))
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
    token_num: int,
    row_vectors: int,
    limits: KernelLimits,
    shape: LaunchShape | None = None,
    *,
    protocol: str = "oneshot",
    world_size: int = 1,
    dense: bool = False,
) -> RowPlan:
    """Choose the launch for `token_num` rows; `shape` forces one of `launch_shapes`.

    Where tokens have owners, a cluster's tokens may take the owners in turn as long as the number
    of clusters is a multiple of theirs. In the halves of two-shot ranks without a token have an
    item to greet by. `dense` is for operations that gather nothing.

    Raises:
        ValueError: `shape` cannot hold so many or such rows, or cannot be launched here.
    """
    if protocol in ("reduce_scatter", "allgather"):
        token_num = max(token_num, world_size)
    candidates = [
        candidate
        for candidate in launch_shapes(row_vectors)
        if limits.clusters(candidate) >= (token_num if candidate.kernel in ("row", "row2") else 1)
    ]
    if shape is None:
        shape = _choose(candidates, token_num, limits, dense)
    elif shape not in candidates:
        raise ValueError(f"launch_shape must be one of {candidates}; got {shape}")
    most = limits.clusters(shape)
    rounds = limits.rounds(shape, token_num)
    clusters = -(-token_num // rounds)  # the same number of rows each, or one less
    if protocol != "oneshot" and clusters < token_num:
        clusters = min(-(-clusters // world_size), most // world_size) * world_size or clusters
    return RowPlan(shape, clusters * shape.cluster_blocks)


def _choose(
    candidates: list[LaunchShape], token_num: int, limits: KernelLimits, dense: bool
) -> LaunchShape:
    """Choose by what holds the rows, most parallel first.

    Measured on two H200s, hidden 7168, us. One row a cluster, a vector a thread, large clusters:
    8 / 4 / 2 CTAs take 3.28 / 3.36 / 3.84 at 1 token, 4.27 / 4.37 / 4.43 at 16, 4.97 / 5.02 / 5.26
    at 32, 6.51 / 6.9 / 6.72 at 64. When those are no longer resident together, two vectors a
    thread: 2 / 1 CTAs take 9.86 / 10.0 at 128 tokens, against 10.0 for two rows a cluster in turn.

    Beyond, rows in turn. Gathers hide their latency best with two vectors a thread: 2 / 1 CTAs take
    18.1 / 18.3 at 264 tokens, 30.8 / 31.4 at 512, 8 CTAs with a vector a thread 19.1 / 33.7. But a
    few rows more than are resident leave most threads without a row in the second round, and rounds
    of a vector a thread, which hold fewer rows, may be fuller: 4 / 8 CTAs then take 11.2 / 11.4 at
    155 tokens, 12.6 / 13.0 at 180, 2 CTAs with two vectors 12.9 / 14.1. The fewest rounds of them:
    at 187 tokens 2 CTAs (three) take 12.9, 4 CTAs (four) 14.6; at 199 of hidden 6144 8 CTAs (three)
    12.2, 4 CTAs (four) 13.2, two vectors 13.4. With several rounds that is worth less: 19.7 and
    19.0 at 265 of 7168. Dense rows need no hiding: at 512 tokens 25.2 against 27.2 in one-shot,
    25.6 against 28.5 in two-shot.

    Where more CTAs a row are resident for more rows, so that these take fewer turns, that is worth
    more than few CTAs: hidden 6144 on one H200 alone (world size 1), two vectors a thread, 4 / 2
    CTAs take 13.6 / 16.9 at 265 tokens (2 and 3 turns), 19.8 / 22.4 at 400 (3 and 4), 25.3 / 24.8
    at 512 (4 each).

    The gathers' figures are one-shot's. Two-shot's clusters are a multiple of the ranks, so its
    rounds may be less full than is reckoned here.
    """

    def first(kernel: str, blocks: int, *, rounds: bool = False) -> LaunchShape | None:
        def rank(s: LaunchShape) -> tuple[int, int]:
            return limits.rounds(s, token_num) if rounds else 0, abs(s.cluster_blocks - blocks)

        shapes = [shape for shape in candidates if shape.kernel == kernel]
        return min(shapes, key=rank, default=None)

    single = first("rows", 8) if dense else first("rows", 4, rounds=True)
    pair = first("rows2", 2, rounds=True)
    spread = dense or (
        single is not None
        and pair is not None
        and token_num <= _SPREAD * limits.clusters(pair)
        and limits.fill(single, token_num) > _FULLER * limits.fill(pair, token_num)
    )
    many = (single, pair) if spread else (pair, first("rows", 2))
    for shape in (first("row", 8), first("row2", 2), *many):
        if shape is not None:
            return shape
    shapes = [shape for shape in candidates if shape.kernel == "long"]
    if not shapes:
        raise ValueError("no launch holds such a row on these devices")
    return max(shapes, key=lambda s: s.cluster_blocks * s.block_threads)
