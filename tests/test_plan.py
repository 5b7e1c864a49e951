"""Launch plans: pure, never more than fits, something for every row."""

from __future__ import annotations

import contextlib
import random

import pytest

from cupy_moe_ar.abi import (
    MAX_BLOCK_THREADS,
    MAX_GRID_BLOCKS,
    MAX_ROW_BYTES,
    VECTOR_BYTES,
    epoch_bytes,
    slab_bytes,
)
from cupy_moe_ar.plan import KernelLimits, LaunchShape, all_shapes, launch_shapes, plan_rows

MAX_VECTORS = MAX_ROW_BYTES // VECTOR_BYTES
ROWS = [*range(1, 300), *range(300, MAX_VECTORS, 61), MAX_VECTORS]
ONE_ROW = ("row", "row2")
VECTORS_A_THREAD = {"row": 1, "rows": 1, "row2": 2, "rows2": 2, "long": MAX_VECTORS}
TOKENS = (1, 2, 3, 5, 16, 64, 128, 131, 132, 133, 1000, 1 << 20, (1 << 31) - 1)


def limits(largest_cluster: int, sms: int, share: int = 1) -> KernelLimits:
    """A device whose SMs hold 1024 threads of these kernels, shared by `share` ranks."""
    resident = {}
    for shape in all_shapes():
        clusters = 1024 // shape.block_threads * sms // (shape.cluster_blocks * share)
        if shape.cluster_blocks <= largest_cluster and clusters:
            resident[shape] = clusters
    return KernelLimits(resident, sms // share)


DEVICES = {
    "clusters": limits(8, 132),
    "no clusters": limits(1, 108),  # sm_80
    "crowded": limits(8, 132, share=16),
    "tiny": limits(8, 1),
}
HOPPER = DEVICES["clusters"]


def test_shapes_hold_their_rows() -> None:
    known = set(all_shapes())
    for vectors in ROWS:
        shapes = launch_shapes(vectors)
        assert known.issuperset(shapes)
        assert len(set(shapes)) == len(shapes)
        for shape in shapes:
            assert shape.cluster_blocks in (1, 2, 4, 8)
            assert shape.block_threads in range(32, MAX_BLOCK_THREADS + 1, 32)
            threads = shape.cluster_blocks * shape.block_threads
            assert threads * VECTORS_A_THREAD[shape.kernel] >= vectors
            assert (
                shape.cluster_blocks == 1 or shape.cluster_blocks * 32 < vectors + 32
            )  # none idle


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_row_has_a_plan_that_is_resident(device: KernelLimits) -> None:
    for vectors in ROWS:
        shapes = launch_shapes(vectors)
        for tokens in TOKENS:
            plans = [plan_rows(tokens, vectors, device)]
            for shape in shapes:
                if device.resident_clusters.get(shape, 0) >= (
                    tokens if shape.kernel in ONE_ROW else 1
                ):
                    with contextlib.suppress(ValueError):  # too large a grid
                        plans.append(plan_rows(tokens, vectors, device, shape))
                        assert plans[-1].shape == shape
            assert plans[0] in plans[1:]
            for plan in plans:
                clusters, rest = divmod(plan.grid_blocks, plan.shape.cluster_blocks)
                assert rest == 0
                assert plan.grid_blocks <= MAX_GRID_BLOCKS
                assert 1 <= clusters <= min(tokens, device.resident_clusters[plan.shape])
                assert clusters == tokens or plan.shape.kernel not in ONE_ROW


@pytest.mark.parametrize(
    "shape", [LaunchShape(1, 64, "rows"), LaunchShape(8, 128, "row"), LaunchShape(16, 64, "rows")]
)
def test_unfit_shapes_are_refused(shape: LaunchShape) -> None:
    """Too few threads, too few clusters for 1000 rows, too large a cluster."""
    with pytest.raises(ValueError, match=r"launch_shape must be one of .*; got LaunchShape"):
        plan_rows(1000, 896, HOPPER, shape)


def test_plans_are_pure() -> None:
    """Equal on all ranks, in whatever order they learnt the limits."""
    items = list(HOPPER.resident_clusters.items())
    random.Random(0).shuffle(items)
    shuffled = KernelLimits(dict(items), HOPPER.sm_count)
    for vectors in ROWS[::7]:
        for tokens in TOKENS:
            assert plan_rows(tokens, vectors, HOPPER) == plan_rows(tokens, vectors, shuffled)


def test_few_rows_spread_and_many_do_not() -> None:
    few, many = plan_rows(1, 896, HOPPER), plan_rows(1000, 896, HOPPER)
    assert few.shape.cluster_blocks > many.shape.cluster_blocks
    assert many.grid_blocks > 100


def test_sizes_are_exact_beyond_32_bits() -> None:
    assert slab_bytes(epoch_bytes(2, 131072 * 4096 * 2)) == 2**32 + (2 << 20)
    for size in (1, 3, 16):
        for payload in (16, 4096, 2**20 + 16, 2**33, 2**50 + 16):
            epoch = epoch_bytes(size, payload)
            assert epoch % 256 == 0
            assert 0 <= epoch - size * payload < 256
            assert slab_bytes(epoch) % (2 << 20) == 0
            assert 0 <= slab_bytes(epoch) - 2 * epoch - 4096 < 2 << 20
