"""Launch plans: pure, never more than fits, something for every row."""

from __future__ import annotations

import random

import pytest

from cupy_moe_ar.abi import MAX_BLOCK_THREADS, MAX_ROW_BYTES, VECTOR_BYTES, epoch_bytes, slab_bytes
from cupy_moe_ar.plan import (
    KernelLimits,
    LaunchShape,
    RowPlan,
    all_shapes,
    launch_shapes,
    plan_rows,
)

MAX_VECTORS = MAX_ROW_BYTES // VECTOR_BYTES
ROWS = [*range(1, 300), *range(300, MAX_VECTORS, 61), MAX_VECTORS]
TOKENS = (1, 2, 3, 5, 16, 64, 128, 131, 132, 133, 1000, 1 << 20, (1 << 31) - 1)


def limits(largest_cluster: int, sms: int = 132, share: int = 1) -> KernelLimits:
    """A device whose SMs hold 1024 threads of these kernels, shared by `share` ranks."""
    resident = {}
    for shape in all_shapes():
        per_sm = 1024 // shape.block_threads
        count = per_sm * sms // (shape.cluster_blocks * share)
        if shape.cluster_blocks <= largest_cluster and count:
            resident[shape] = count
    return KernelLimits(resident, sms // share)


HOPPER, AMPERE = limits(8), limits(1, sms=108)  # with and without clusters
CROWDED, TINY = limits(8, share=16), limits(8, sms=1)
ALL_LIMITS = pytest.mark.parametrize(
    "device", [HOPPER, AMPERE, CROWDED, TINY], ids=["hopper", "ampere", "crowded", "tiny"]
)


def test_shapes_hold_their_rows() -> None:
    known = set(all_shapes())
    for vectors in ROWS:
        shapes = launch_shapes(vectors)
        assert len(set(shapes)) == len(shapes) > 0
        assert LaunchShape in {type(shape) for shape in shapes}
        assert {shape.cluster_blocks for shape in shapes} >= {1}
        for shape in shapes:
            assert shape in known
            assert shape.cluster_blocks in (1, 2, 4, 8)
            assert shape.block_threads % 32 == 0
            assert 32 <= shape.block_threads <= MAX_BLOCK_THREADS
            threads = shape.cluster_blocks * shape.block_threads
            assert shape.long_rows or threads >= vectors
            # No block is idle: groups of 32 vectors go to blocks in turn.
            assert shape.cluster_blocks == 1 or shape.cluster_blocks <= -(-vectors // 32)


@ALL_LIMITS
def test_every_row_has_a_plan_that_is_resident(device: KernelLimits) -> None:
    for vectors in ROWS:
        for tokens in TOKENS:
            plan = plan_rows(tokens, vectors, device)
            assert plan.shape in launch_shapes(vectors)
            clusters, rest = divmod(plan.grid_blocks, plan.shape.cluster_blocks)
            assert rest == 0
            assert 1 <= clusters <= min(tokens, device.resident_clusters[plan.shape])


@ALL_LIMITS
def test_forced_shapes(device: KernelLimits) -> None:
    for vectors in (8, 129, 896, MAX_VECTORS):
        for shape in launch_shapes(vectors):
            if shape in device.resident_clusters:
                plan = plan_rows(7, vectors, device, shape)
                blocks = min(7, device.resident_clusters[shape]) * shape.cluster_blocks
                assert plan == RowPlan(shape, blocks)
            else:
                with pytest.raises(ValueError, match="launch_shape must be one of .*; got"):
                    plan_rows(7, vectors, device, shape)


def test_forced_shape_must_hold_the_row() -> None:
    with pytest.raises(ValueError, match="launch_shape must be one of"):
        plan_rows(1, 896, HOPPER, LaunchShape(1, 64, long_rows=False))


def test_plans_are_pure() -> None:
    """Equal on all ranks, in whatever order they learnt the limits."""
    items = list(HOPPER.resident_clusters.items())
    random.Random(0).shuffle(items)
    shuffled = KernelLimits(dict(items), HOPPER.sm_count)
    for vectors in ROWS[::7]:
        for tokens in TOKENS:
            plan = plan_rows(tokens, vectors, HOPPER)
            assert plan == plan_rows(tokens, vectors, HOPPER) == plan_rows(tokens, vectors, shuffled)


def test_few_rows_spread_over_clusters() -> None:
    few, many = plan_rows(1, 896, HOPPER), plan_rows(1000, 896, HOPPER)
    assert few.shape.cluster_blocks > many.shape.cluster_blocks
    assert not few.shape.long_rows
    assert many.grid_blocks > 100


def test_sizes_are_exact_beyond_32_bits() -> None:
    payload = 131072 * 4096 * 2
    assert epoch_bytes(2, payload) == 2 * payload == 2**31
    assert slab_bytes(2**31) == 2**32 + (2 << 20)
    assert epoch_bytes(3, 16) == 256
    assert epoch_bytes(16, 2**50 + 16) == 2**54 + 256
    for size in (1, 3, 16):
        for payload in (16, 4096, 2**20 + 16, 2**33):
            epoch = epoch_bytes(size, payload)
            assert size * payload <= epoch < size * payload + 256
            assert epoch % 256 == 0
            assert 0 <= slab_bytes(epoch) - 2 * epoch - 4096 < 2 << 20
            assert slab_bytes(epoch) % (2 << 20) == 0
