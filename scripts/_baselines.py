"""Floors of the machine, and what users would run instead of a fused operation. GPUs only.

Times are taken as those of the operations themselves (`Rank.time_us`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _ranks import Rank
from _workload import Case

from cupy_moe_ar import DType, Workspace, abi, plan_allreduce_fusion
from cupy_moe_ar import compile as compiler
from cupy_moe_ar.compile import Variant
from cupy_moe_ar.cuda_backend import place_on
from cupy_moe_ar.group import staged
from cupy_moe_ar.launch import Kernel, KernelLaunch, device_limits, load
from cupy_moe_ar.symmetric import CudaSlab, SymmetricMemory

__all__ = ["Floors", "Kernels", "NcclBaseline", "compile_baseline", "connect_nccl"]

SOURCE = Path(__file__).with_name("baseline.cu")
KERNELS = ("empty", "exchange", "store", "finalize", "residual_norm")
_BANDWIDTH_BYTES = 256 << 20
_DEVICE_TO_DEVICE = 3


class _Nothing(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_uint32),)


class _Exchange(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_uint64 * abi.MAX_RANKS),
        ("control", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )


class _Store(ctypes.Structure):
    _fields_ = (("to", ctypes.c_uint64), ("vectors", ctypes.c_uint64))


class _Finalize(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("scale", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint32),
        ("row_vectors", ctypes.c_uint32),
        ("tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


class _ResidualNorm(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_uint64),
        ("residual_in", ctypes.c_uint64),
        ("gamma", ctypes.c_uint64),
        ("residual_out", ctypes.c_uint64),
        ("norm_out", ctypes.c_uint64),
        ("row_vectors", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("weight_bias", ctypes.c_float),
        ("inverse_hidden", ctypes.c_float),
    )


def compile_baseline(arch: str, dtype: DType, world_size: int) -> Path:
    """Return the cubin of baseline.cu, from the library's cache or compiled now."""
    macros = compiler._macros(Variant("moe_finalize", "oneshot", dtype, dtype, world_size))
    flags = (f"-arch={arch}", "-std=c++17", "-lineinfo", *macros)
    stem = f"bench_baseline_{dtype.short}_w{world_size}.{arch}"
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    return compiler._find_or_build(
        compiler._Build(
            stem,
            ".cubin",
            (*flags, source),
            lambda: f"NVRTC {compiler.nvrtc_version()}",
            functools.partial(compiler._run_nvrtc, str(SOURCE), flags, stem),
        )
    )


class Kernels:
    """The kernels of baseline.cu, loaded on this rank's device."""

    def __init__(self, rank: Rank, dtype: DType) -> None:
        """Compile, on rank 0 first, and load; collective."""
        self.limits = device_limits(rank.device)
        get = functools.partial(compile_baseline, self.limits.arch, dtype, rank.size)
        if rank.index == 0:
            get()
        rank.meet()
        self._kernels: dict[str, Kernel] = dict(
            zip(KERNELS, load(get(), *(f"bench_{name}" for name in KERNELS)), strict=True)
        )
        self.programmatic = self.limits.compute_capability >= (9, 0)

    def launch(self, name: str, grid: int, block: int, *, programmatic: bool = False) -> Any:
        """Prepare a launch."""
        programmatic = programmatic and self.programmatic
        return KernelLaunch(self._kernels[name], grid, block, programmatic=programmatic)


class Floors:
    """What no kernel on this machine can beat.

    Attributes:
        empty_us: An empty kernel of one 128-thread CTA an SM, launched as the others.
        store_bandwidth: Bytes a second that a kernel on rank 0's device stores to rank 1's; None
            without one.
        copy_bandwidth: Bytes a second that a copy within rank 0's device reads and writes.
    """

    def __init__(self, rank: Rank, loaded: Kernels) -> None:
        """Measure what does not depend on the case; collective."""
        import cupy

        self._rank = rank
        self._kernels = loaded
        self._cupy = cupy
        nothing = _Nothing()
        empty = loaded.launch("empty", loaded.limits.sm_count, 128, programmatic=True)
        self.empty_us = rank.time_us(
            lambda: empty.launch(ctypes.addressof(nothing), rank.stream.ptr)
        )
        self.store_bandwidth, self.copy_bandwidth = self._bandwidths()

    def exchange_us(self, message_bytes: int) -> float:
        """Time the bare exchange of a message to every peer; collective."""
        rank = self._rank
        vectors = message_bytes // abi.VECTOR_BYTES
        with self._slab(3 * rank.size * message_bytes) as slots:
            control = self._cupy.zeros(2, "uint32")
            parameters = _Exchange(control=control.data.ptr, vectors=vectors, rank=rank.index)
            parameters.slots[: rank.size] = slots
            grid = min(self._kernels.limits.sm_count, -(-vectors // 128))
            launch = self._kernels.launch("exchange", grid, 128, programmatic=True)
            return rank.time_us(
                lambda: launch.launch(ctypes.addressof(parameters), rank.stream.ptr)
            )

    def _exchanged_bytes(self, case: Case, protocol: str) -> float:
        """Bytes that a rank sends, and as many that it gets."""
        peers = self._rank.size - 1
        to_each = 1.0 if protocol == "oneshot" else 2 / self._rank.size
        return peers * to_each * case.message_bytes

    def link_us(self, case: Case, protocol: str) -> float | None:
        """Time of pushing the messages at the store bandwidth."""
        if self.store_bandwidth is None:
            return None
        return self._exchanged_bytes(case, protocol) / self.store_bandwidth * 1e6

    def memory_us(self, case: Case, bytes_read: int, outputs: int, protocol: str) -> float:
        """Time of the memory traffic of a launch at the copy bandwidth.

        Args:
            case: The shape.
            bytes_read: Read by the producer.
            outputs: Number of arrays written.
            protocol: That serves it.
        """
        residual_and_outputs = (1 + outputs) * case.tokens * case.row_bytes
        # A slot is written by the peer, read and restored.
        slots = 3 * self._exchanged_bytes(case, protocol)
        return (bytes_read + residual_and_outputs + slots) / self.copy_bandwidth * 1e6

    @contextlib.contextmanager
    def _slab(self, nbytes: int) -> Iterator[list[int]]:
        """Memory on every rank, filled with the sentinel; yields each rank's address."""
        rank = self._rank
        granularity = abi.SLAB_GRANULARITY
        total = -(-(abi.SLAB_HEADER_BYTES + nbytes) // granularity) * granularity
        memory = SymmetricMemory(
            rank.group, lambda: CudaSlab(total, rank.device, place_on(rank.device))
        )
        yield [pointer + abi.SLAB_HEADER_BYTES for pointer in memory.pointers]
        rank.meet()
        memory.close(60.0)

    def _bandwidths(self) -> tuple[float | None, float]:
        rank = self._rank
        store: float | None = None
        copy = 0.0
        with self._slab(_BANDWIDTH_BYTES) as slabs:
            if rank.index == 0:
                half = _BANDWIDTH_BYTES // 2
                copy = _BANDWIDTH_BYTES / self._seconds(
                    lambda: self._cupy.cuda.runtime.memcpyAsync(
                        slabs[0] + half, slabs[0], half, _DEVICE_TO_DEVICE, rank.stream.ptr
                    )
                )
            if rank.index == 0 and rank.size > 1:
                parameters = _Store(slabs[1], _BANDWIDTH_BYTES // abi.VECTOR_BYTES)
                launch = self._kernels.launch("store", 2 * self._kernels.limits.sm_count, 1024)
                store = _BANDWIDTH_BYTES / self._seconds(
                    lambda: launch.launch(ctypes.addressof(parameters), rank.stream.ptr)
                )
        store, copy = rank.group.bcast((store, copy))
        return store, copy

    def _seconds(self, enqueue: Any) -> float:
        samples = [self._rank.event_us(enqueue) for _ in range(7)]
        return statistics.median(samples[2:]) * 1e-6


def separate_finalize(
    rank: Rank, kernels: Kernels, case: Case, inputs: dict[str, Any], partial: Any
) -> Callable[[], None]:
    """Return what enqueues a finalize kernel of its own, which writes this rank's `partial`."""

    def pointer(name: str) -> int:
        return int(inputs[name].data.ptr) if name in inputs else 0

    vectors = case.row_bytes // abi.VECTOR_BYTES
    parameters = _Finalize(
        rows=pointer("allreduce_in"),
        index=pointer("expanded_idx_to_permuted_idx"),
        scale=pointer("expert_scale_factor"),
        shared=pointer("shared_expert_output"),
        partial=partial.data.ptr,
        num_rows=inputs["allreduce_in"].shape[0],
        row_vectors=vectors,
        tokens=case.tokens,
        top_k=case.model.top_k,
        factor=case.model.factor,
    )
    launch = kernels.launch("finalize", -(-case.tokens * vectors // 128), 128)
    return lambda: launch.launch(ctypes.addressof(parameters), rank.stream.ptr)


def ar_fusion_us(
    rank: Rank,
    kernels: Kernels,
    workspace: Workspace,
    case: Case,
    inputs: dict[str, Any],
    residual_out: Any,
    norm_out: Any,
) -> float:
    """Time a finalize kernel and `allreduce_fusion` as one launch; collective.

    Args:
        rank: This one.
        kernels: Loaded ones.
        workspace: Of `allreduce_fusion`.
        case: The shape.
        inputs: Arrays on the device, by the operation's argument names.
        residual_out: On the device; written.
        norm_out: On the device; written.
    """
    import cupy

    partial = cupy.empty_like(residual_out)
    finalize = separate_finalize(rank, kernels, case, inputs, partial)
    rest = plan_allreduce_fusion(
        partial,
        workspace,
        residual_in=inputs["residual_in"],
        rms_gamma=inputs["rms_gamma"],
        rms_eps=case.eps,
        weight_bias=case.model.weight_bias,
        residual_out=residual_out,
        norm_out=norm_out,
        dtype=case.dtype,
        launch_with_pdl=True,
        stream=rank.stream,
    )

    def enqueue() -> None:
        finalize()
        rest.run()

    return rank.time_us(enqueue)


def connect_nccl(rank: Rank, dtype: DType) -> tuple[Any, int, int]:
    """Return CuPy's NCCL communicator, and NCCL's numbers for a type and for a sum; collective.

    Raises:
        RuntimeError: NCCL cannot be used here; the same on every rank.
    """
    from cupy.cuda import nccl

    told = rank.group.allgather((nccl.available, device_limits(rank.device).uuid, os.getpid()))
    available, devices, processes = (set(column) for column in zip(*told, strict=True))
    if available != {True}:
        raise RuntimeError("NCCL is not installed (pip install nvidia-nccl-cu12)")
    if len(devices) < rank.size or len(processes) < rank.size:
        raise RuntimeError("NCCL needs a GPU and a process for each rank")
    unique = rank.group.bcast(nccl.get_unique_id() if rank.index == 0 else None)
    communicator = staged(
        rank.group,
        "setting up NCCL",
        lambda: nccl.NcclCommunicator(rank.size, unique, rank.index),
    )
    types = {
        DType.BFLOAT16: nccl.NCCL_BFLOAT16,
        DType.FLOAT16: nccl.NCCL_FLOAT16,
        DType.FLOAT32: nccl.NCCL_FLOAT32,
    }
    return communicator, types[dtype], nccl.NCCL_SUM


class NcclBaseline:
    """A finalize kernel, NCCL's all-reduce, a residual + RMSNorm kernel."""

    def __init__(self, rank: Rank, loaded: Kernels, dtype: DType) -> None:
        """Set up NCCL; collective.

        Raises:
            RuntimeError: NCCL cannot be used here; the same on every rank.
        """
        self._rank = rank
        self._kernels = loaded
        self._nccl, self._type, self._sum = connect_nccl(rank, dtype)

    def time_us(
        self, case: Case, inputs: dict[str, Any], residual_out: Any, norm_out: Any
    ) -> float:
        """Time the three as one launch, without a finalize for parts; collective.

        Writes the outputs.

        Args:
            case: The shape.
            inputs: Arrays on the device, by the operation's argument names.
            residual_out: On the device.
            norm_out: On the device.
        """
        import cupy

        rank = self._rank
        vectors = case.row_bytes // abi.VECTOR_BYTES
        count = case.tokens * case.model.hidden

        partial = cupy.empty_like(residual_out)
        source, finalize = inputs["allreduce_in"], None
        if "expanded_idx_to_permuted_idx" in inputs:
            source = partial
            finalize = separate_finalize(rank, self._kernels, case, inputs, partial)
        norm = _ResidualNorm(
            total=partial.data.ptr,
            residual_in=int(inputs["residual_in"].data.ptr),
            gamma=int(inputs["rms_gamma"].data.ptr),
            residual_out=residual_out.data.ptr,
            norm_out=norm_out.data.ptr,
            row_vectors=vectors,
            eps=case.eps,
            weight_bias=case.model.weight_bias,
            inverse_hidden=1.0 / case.model.hidden,
        )
        threads = min(1024, -(-vectors // 32) * 32)
        last = self._kernels.launch("residual_norm", case.tokens, threads)

        def enqueue() -> None:
            stream = rank.stream.ptr
            if finalize:
                finalize()
            self._nccl.allReduce(
                source.data.ptr, partial.data.ptr, count, self._type, self._sum, stream
            )
            last.launch(ctypes.addressof(norm), stream)

        return rank.time_us(enqueue)

    def close(self) -> None:
        """Let NCCL go; collective."""
        self._nccl.destroy()
