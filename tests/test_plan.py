"""Launch plans: pure, never more than fits, something for every row."""

from __future__ import annotations

import contextlib
import random

import pytest

from cupy_moe_ar.abi import (
    MAX_BLOCK_THREADS,
    MAX_GRID_BLOCKS,
    MAX_ROW_BYTES,
    MAX_WIRE_ROW_BYTES,
    VECTOR_BYTES,
    epoch_bytes,
    slab_bytes,
)
from cupy_moe_ar.plan import (
    KernelLimits,
    LaunchShape,
    all_shapes,
    choose_oneshot,
    crossover_bytes,
    launch_shapes,
    plan_rows,
    share_of,
)

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


@pytest.mark.parametrize("dense", [False, True])
def test_choice_over_token_counts(dense: bool) -> None:
    """Within what is resident a row each; then what has the fullest rounds; then two vectors.

    The limits are an H200's.
    """
    row, row2 = LaunchShape(8, 128, "row"), LaunchShape(2, 224, "row2")
    eight, four, two = (LaunchShape(*shape, "rows") for shape in ((8, 128), (4, 224), (2, 448)))
    rows2 = LaunchShape(2, 224, "rows2")
    held = KernelLimits({row: 64, row2: 132, eight: 62, four: 62, two: 66, rows2: 132}, 132)
    best = {1: row, 64: row, 65: row2, 132: row2}
    best |= dict.fromkeys((133, 166, 186), eight if dense else four)
    best |= dict.fromkeys((187, 198), eight if dense else two)
    best |= dict.fromkeys((199, 248, 264, 265, 300, 512, 2048), eight if dense else rows2)
    for tokens, shape in best.items():
        assert plan_rows(tokens, 896, held, dense=dense).shape == shape, tokens


def test_fewer_turns_are_worth_smaller_pieces() -> None:
    two, four = (LaunchShape(blocks, 384 // blocks, "rows2") for blocks in (2, 4))
    held = KernelLimits({two: 132, four: 160}, 132)
    best = {264: two, 265: four, 320: four, 321: two, 400: four, 512: two}
    for tokens, shape in best.items():
        plan = plan_rows(tokens, 768, held)
        assert plan.shape == shape, tokens
        assert -(-tokens * shape.cluster_blocks // plan.grid_blocks) == held.rounds(shape, tokens)


def test_sizes_are_exact_beyond_32_bits() -> None:
    assert slab_bytes(epoch_bytes(2, 131072 * 4096 * 2, 131072 * 4096 * 2)) == 2**32 + (2 << 20)
    for size in (1, 3, 16):
        for payload in (16, 4096, 2**20 + 16, 2**33, 2**50 + 16):
            for oneshot in (0, payload // 16, payload):
                epoch = epoch_bytes(size, oneshot, payload)
                assert epoch % 256 == 0
                twoshot = 2 * payload + (size - 1) * min(payload, MAX_WIRE_ROW_BYTES)
                assert 0 <= epoch - max(size * oneshot, twoshot) < 256
                assert slab_bytes(epoch) % (2 << 20) == 0
                assert 0 <= slab_bytes(epoch) - 2 * epoch - 4096 < 2 << 20


def test_every_protocol_has_room() -> None:
    """Slots of calls with other shapes than the workspace's, as the kernels lay them out."""
    for size in (1, 2, 3, 8, 16):
        for payload in (16, 2048, 1 << 20):
            epoch = epoch_bytes(size, 0, payload)
            for row_bytes in (16, 1040, 2048, MAX_WIRE_ROW_BYTES):
                tokens = payload // row_bytes
                if tokens == 0:
                    continue
                rows_of_share = -(-tokens // size)
                assert size * rows_of_share <= epoch // row_bytes
                assert (size * rows_of_share + tokens) * row_bytes <= epoch, (size, row_bytes)
                assert max(tokens, size) * row_bytes <= epoch  # the gathering half greets too


def test_shares_are_runs_of_nearly_equal_length() -> None:
    for size in (1, 2, 3, 8, 16):
        for tokens in (0, 1, size - 1, size, size + 1, 5 * size + 3):
            shares = [share_of(rank, size, tokens) for rank in range(size)]
            assert [token for share in shares for token in share] == list(range(tokens))
            assert len(shares[0]) - len(shares[-1]) in (0, 1)


def test_owners_take_turns_in_a_cluster() -> None:
    """Every token is dealt once, and a cluster's to all owners, as the kernels deal them."""
    for size in (2, 3, 8, 16):
        for tokens in (1, size - 1, 300, 331):
            for device in DEVICES.values():
                plan = plan_rows(tokens, 64, device, protocol="twoshot", world_size=size)
                clusters = plan.grid_blocks // plan.shape.cluster_blocks
                assert clusters <= device.clusters(plan.shape)
                dealt = []
                for cluster in range(clusters):
                    owners = []
                    for step, item in enumerate(
                        range(cluster, -(-tokens // size) * size, clusters)
                    ):
                        turn = step if clusters % size == 0 else 0
                        owner, row = (item + turn) % size, item // size
                        share = share_of(owner, size, tokens)
                        if row < len(share):
                            owners.append(owner)
                            dealt.append(share[row])
                    counts = [owners.count(owner) for owner in range(size)]
                    if clusters % size == 0:
                        assert max(counts) - min(counts) <= 2
                assert sorted(dealt) == list(range(tokens))


def test_crossover() -> None:
    """Two ranks never gain by two-shot; more ranks do the earlier."""
    for size in (1, 2):
        assert choose_oneshot(1 << 40, size, 1 << 41)
    bounds = [crossover_bytes(size) for size in range(3, 17)]
    assert bounds == sorted(bounds, reverse=True)
    assert 4 * 14336 > crossover_bytes(8) > 3 * 14336
    for size in (3, 8, 16):
        bound = crossover_bytes(size)
        assert choose_oneshot(bound, size, 1 << 41)
        assert not choose_oneshot(crossover_bytes(size) + 1, size, 1 << 63)
        assert not choose_oneshot(16, size, 0)
