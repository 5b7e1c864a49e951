"""What host and kernels agree on: parameters, control block, slab layout. Mirrors params.cuh."""

from __future__ import annotations

import ctypes
import enum

__all__ = [
    "MAX_BLOCK_THREADS",
    "MAX_GRID_BLOCKS",
    "MAX_RANKS",
    "MAX_ROW_BYTES",
    "MAX_WIRE_ROW_BYTES",
    "SENTINEL",
    "SLAB_FAREWELL_OFFSET",
    "SLAB_HEADER_BYTES",
    "SLAB_PROBE_OFFSET",
    "VECTOR_BYTES",
    "ControlBlock",
    "Flag",
    "Params",
    "TimeoutRecord",
    "epoch_bytes",
    "slab_bytes",
]

MAX_RANKS = 16
MAX_BLOCK_THREADS = 512
MAX_GRID_BLOCKS = 2048
VECTOR_BYTES = 16
GROUP_VECTORS = 32
MAX_ROW_BYTES = 128 * GROUP_VECTORS * VECTOR_BYTES
MAX_WIRE_ROW_BYTES = 2 * MAX_ROW_BYTES  # 16-bit rows that travel as float32
SENTINEL = 0x80000000
SLAB_HEADER_BYTES = 4096
SLAB_PROBE_OFFSET = 2048  # one 64-bit word a writer, used by the host's probe
SLAB_FAREWELL_OFFSET = 3072  # likewise: 1 once the writer will never write to this slab again
SLAB_GRANULARITY = 2 << 20  # CUDA IPC shares whole 2 MiB blocks


class Flag(enum.IntFlag):
    """Bits of `Params.flags`."""

    SCALE_IS_FLOAT32 = 1
    GAMMA_IS_FLOAT32 = 2
    TRIGGER_EARLY = 4
    VECTOR_ROUTES = 8
    WARM_UP = 16
    SCALE_TILED = 32
    SCALE_IS_UE8M0 = 64
    TRIGGER_HEARD = 128


class TimeoutRecord(ctypes.Structure):
    """Why a rank gave up, written once by its kernel."""

    _fields_ = (
        ("valid", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("missing_rank", ctypes.c_uint32),
        ("token", ctypes.c_uint32),
        ("launch", ctypes.c_uint64),
    )


class ControlBlock(ctypes.Structure):
    """State of a rank that its launches share."""

    _fields_ = (
        ("epoch", ctypes.c_uint32 * MAX_GRID_BLOCKS),
        ("slab", ctypes.c_uint64 * MAX_RANKS),
        ("record", ctypes.c_uint64),
        ("broken", ctypes.c_uint32),
        ("launches", ctypes.c_uint64),
        ("_pad", ctypes.c_uint8 * 104),
    )


class Params(ctypes.Structure):
    """The by-value parameter of every kernel."""

    _fields_ = (
        ("control", ctypes.c_uint64),
        ("allreduce_in", ctypes.c_uint64),
        ("route_index", ctypes.c_uint64),
        ("route_scale", ctypes.c_uint64),
        ("shared_expert", ctypes.c_uint64),
        ("residual_in", ctypes.c_uint64),
        ("rms_gamma", ctypes.c_uint64),
        ("allreduce_out", ctypes.c_uint64),
        ("residual_out", ctypes.c_uint64),
        ("norm_out", ctypes.c_uint64),
        ("epoch_bytes", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("num_permuted_rows", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("token_num", ctypes.c_int32),
        ("row_vectors", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("routed_scaling_factor", ctypes.c_float),
        ("rms_eps", ctypes.c_float),
        ("weight_bias", ctypes.c_float),
        ("inverse_hidden", ctypes.c_float),
        ("flags", ctypes.c_uint32),
        ("cluster_log2", ctypes.c_uint32),
        ("delays", ctypes.c_uint32),
        ("scale_factor", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
        ("scale_in", ctypes.c_uint64),
        ("quant_out", ctypes.c_uint64),
        ("scale_out", ctypes.c_uint64),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def epoch_bytes(world_size: int, oneshot_bytes: int, payload_bytes: int) -> int:
    """Return the bytes of one epoch's slots, which serve every protocol.

    Args:
        world_size: Number of ranks; each writes into slots of its own.
        oneshot_bytes: Most bytes (tokens x hidden_dim x wire item) of a call by one-shot, which has
            a slot for each rank and token.
        payload_bytes: Most bytes of any call. Two-shot has a slot for each rank and token that this
            rank owns, and one for the total of each token; shares of equal length leave less than
            a row for each rank empty.
    """
    ragged = (world_size - 1) * min(payload_bytes, MAX_WIRE_ROW_BYTES)
    return _round_up(max(world_size * oneshot_bytes, 2 * payload_bytes + ragged), 256)


def slab_bytes(epoch: int) -> int:
    """Return the bytes of a slab with two epochs of `epoch` bytes each."""
    return _round_up(SLAB_HEADER_BYTES + 2 * epoch, SLAB_GRANULARITY)
