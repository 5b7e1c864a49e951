"""The workspace: what the ranks of one group share, and what each of them has prepared."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import abi, cuda_backend
from .call import Call
from .checks import ACTIVATIONS, Home, comm_dtype_of, row_problem
from .compile import OPERATIONS, QUANTISING, Variant
from .cpu_backend import CpuBackend
from .cuda_backend import CudaBackend
from .errors import ArgumentError, PeerTimeoutError, UnsupportedError, WorkspaceError
from .formats import parse_quant
from .group import Group, as_group, host_identity, meet, run_threads, staged
from .plan import KernelLimits, LaunchShape, RowPlan, crossover_bytes, plan_rows, share_of
from .sharing import why_slow
from .types import DType

__all__ = ["Workspace", "travels_as"]

_CLOSE_S = 60.0  # that `close` waits for peers
_CLOSED = "is closed"
_CHECKPOINT = "is prepared for a checkpoint; every rank must call checkpoint_restore(comm) first"
_log = logging.getLogger(__name__)


class Launch:
    """A checked and planned call, bound to a workspace and to the addresses of its arrays."""

    __slots__ = ("_enqueue", "_record", "_workspace")

    def __init__(self, workspace: Workspace, enqueue: Callable[[int], None]) -> None:
        """Bind; for `Workspace.plan`."""
        self._workspace = workspace
        self._record = workspace._backend.record
        self._enqueue = enqueue

    def run(self, stream: int) -> None:
        """Launch on a stream.

        Raises:
            ArgumentError: The stream belongs to another device.
            WorkspaceError: The workspace is closed, prepared for a checkpoint or bound to another
                stream.
            PeerTimeoutError: An earlier launch gave up waiting for a peer.
        """
        workspace = self._workspace
        if workspace._unusable:
            workspace._require_open("a launch")
        if self._record.valid:
            workspace.check()
        if stream != workspace._stream:
            workspace._use_stream(stream)
        self._enqueue(stream)


class Workspace:
    """Memory that the ranks of a group share, and the kernels that use it.

    Building one is collective over the group; so are `prepare` and `close`. Operations take it as
    an argument and communicate on the device only. One workspace serves every operation, protocol,
    dtype, shape and layer as long as a call's bytes fit, one call after the other, in the same
    order on every rank. It is a context manager:

        with Workspace(comm, max_token_num=128, hidden_dim=7168, dtype="bfloat16") as workspace:
            ...

    Launches must not overlap, so the workspace is bound to the first stream that launches on it;
    another raises until `rebind_stream`. Capturing on any stream is allowed and binds nothing: a
    graph's launches count when and where it is replayed, which nobody can check. Replay it on the
    bound stream, or order the replay after the launches before it and the later ones after it.

    Attributes:
        rank: Own rank in the group.
        world_size: Number of ranks.
        backend: "cuda" or "cpu".
        device: CUDA ordinal, or -1.
        dtype: Default activation dtype.
        comm_dtype: Default wire dtype.
        max_token_num: As given.
        max_oneshot_token_num: Most tokens that one-shot serves, of `hidden_dim` and the wire dtype.
        hidden_dim: As given.
        nbytes: Bytes of the slab that this rank shares.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        max_token_num: int,
        hidden_dim: int,
        dtype: DType | str = DType.BFLOAT16,
        comm_dtype: DType | str | None = None,
        max_oneshot_token_num: int | None = None,
        operations: Iterable[str] | None = None,
        quant: str | Iterable[str] | None = None,
        device: int | None = None,
        backend: str | None = None,
        timeout_s: float | None = 600.0,
        sm_margin: int = 0,
    ) -> None:
        """Build a workspace; collective, and on failure the same error on every rank.

        Compiles (once a node, cached on disk), loads and warms up the operations for `dtype`.

        Args:
            comm: An mpi4py communicator or any object with `Get_rank, Get_size, allgather, bcast,
                barrier`; None is MPI's world. 1 to 16 ranks of one host.
            max_token_num: Most tokens of a call, with `hidden_dim` and the wire dtype. Calls with
                other shapes are legal as long as their bytes fit (`fits`).
            hidden_dim: Elements of a row.
            dtype: bfloat16, float16 or float32: the activations.
            comm_dtype: What travels: None (the activation dtype) or float32.
            max_oneshot_token_num: Most tokens of a call that one-shot serves; it takes memory for
                `world_size` times as many, two-shot for twice as many as it has. None is what
                one-shot serves unasked (`plan.crossover_bytes`), or more where that costs no more
                memory; 0 is none.
            operations: Names of the operations to prepare: `moe_finalize`, `moe_reduction`,
                `allreduce`, `moe_finalize_reduce_scatter`, `reduce_scatter`, `allgather`; None is
                all of them. `prepare` adds others.
            quant: Names of formats of quantised outputs to prepare them for, besides none.
            device: CUDA ordinal; None takes the thread's current device or, where the thread has
                none yet, the local rank modulo the number of visible devices.
            backend: "cuda", "cpu", or "auto": "cuda" where every rank sees a device, else "cpu".
                None is `MOE_AR_BACKEND`, else "auto".
            timeout_s: Seconds after which a rank gives up waiting for a peer; None waits for ever.
                `MOE_AR_TIMEOUT_S` overrides it.
            sm_margin: Streaming multiprocessors that launches leave free.

        Raises:
            ArgumentError: An argument is wrong or differs between ranks.
            UnsupportedError: The ranks cannot share memory, or a device or package is missing.
            CompileError: A compiler is missing or refused a kernel.
        """
        self._unusable = _CLOSED  # until built; why it cannot be used, "" if it can
        group = as_group(comm)
        self._group = group
        self.rank = group.Get_rank()
        self.world_size = group.Get_size()
        faults: list[str] = []
        try:
            self.dtype = DType.parse(dtype)
            if self.dtype not in ACTIVATIONS:
                raise ValueError(f"dtype must be bfloat16, float16 or float32; got {dtype!r}")
            self.comm_dtype = comm_dtype_of(self.dtype, comm_dtype)
            if not isinstance(hidden_dim, (int, np.integer)):
                raise ValueError(f"hidden_dim must be a positive integer; got {hidden_dim!r}")
            problem = row_problem(hidden_dim, self.dtype)
            if problem:
                faults.append(problem)
        except (TypeError, ValueError) as error:
            faults.append(str(error))
        if not isinstance(max_token_num, (int, np.integer)) or max_token_num < 1:
            faults.append(f"max_token_num must be a positive integer; got {max_token_num!r}")
        elif max_oneshot_token_num is not None and not (
            isinstance(max_oneshot_token_num, (int, np.integer))
            and 0 <= max_oneshot_token_num <= max_token_num
        ):
            faults.append(
                "max_oneshot_token_num must be None or an integer in 0..max_token_num; "
                f"got {max_oneshot_token_num!r}"
            )
        formats, format_fault = _formats(quant)
        if format_fault:
            faults.append(format_fault)
        if not 1 <= self.world_size <= abi.MAX_RANKS:
            faults.append(f"comm must have 1 to {abi.MAX_RANKS} ranks; got {self.world_size}")
        source = "MOE_AR_BACKEND" if backend is None else "backend"
        chosen = os.environ.get("MOE_AR_BACKEND") or None if backend is None else backend
        backend = None if chosen == "auto" else chosen
        if backend not in (None, "cuda", "cpu"):
            faults.append(f"{source} must be 'cuda', 'cpu' or 'auto'; got {backend!r}")
        timeout, timeout_fault = _timeout(timeout_s)
        if timeout_fault:
            faults.append(timeout_fault)
        same = (int(max_token_num) if not faults else max_token_num, hidden_dim, str(dtype),
                str(comm_dtype), max_oneshot_token_num, formats, backend, timeout_s, sm_margin,
                _source_digest())  # fmt: skip
        _agree(group, "Workspace", faults, same)
        self._same = same

        self.max_token_num = int(max_token_num)
        self.hidden_dim = int(hidden_dim)
        row_bytes = self.hidden_dim * self.comm_dtype.itemsize
        payload = self.max_token_num * row_bytes
        oneshot = _oneshot_bytes(self.world_size, row_bytes, payload, max_oneshot_token_num)
        self.max_oneshot_token_num = oneshot // row_bytes
        epoch = abi.epoch_bytes(self.world_size, oneshot, payload)
        self.nbytes = abi.slab_bytes(epoch)
        self._home_hosts = group.allgather(host_identity())
        self._backend = self._make_backend(backend, device, sm_margin)
        self.backend = self._backend.name
        self.device = self._backend.device
        self._count_ranks_on_device()
        self._home = Home(
            self.device,
            self.dtype,
            self.comm_dtype if comm_dtype is not None else None,
            self.rank,
            self.world_size,
            payload,
            oneshot,
        )
        self._limits: dict[Variant, KernelLimits] = {}
        self.launches: dict[Hashable, Launch] = {}
        self._stream: int | None = None  # handle of the one that launches
        self._checked = os.environ.get("MOE_AR_CHECK", "0") not in ("", "0")
        self._timeout_s = timeout
        try:
            self._memory, control = self._backend.allocate(group, self.nbytes)
        except BaseException:
            self._backend.close()
            raise
        self._params = abi.Params(
            control=control, rank=self.rank, epoch_bytes=epoch, timeout_ns=int(timeout * 1e9)
        )
        self._unusable = ""
        try:
            names = None if operations is None else tuple(operations)
            self.prepare(operations=names)
            if formats:
                self.prepare(operations=names, quant=formats)
        except BaseException:
            self.close()
            raise
        _log.info(
            "rank %d of %d: %s, %s; %d bytes shared by this rank",
            self.rank,
            self.world_size,
            self.backend,
            self._backend.description,
            self.nbytes,
        )

    # ---- what fits -----------------------------------------------------------------------------

    @staticmethod
    def bytes_required(
        *,
        world_size: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: DType | str = DType.BFLOAT16,
        comm_dtype: DType | str | None = None,
        max_oneshot_token_num: int | None = None,
    ) -> int:
        """Return the bytes that each rank shares in such a workspace; needs no GPU and no group.

        Two epochs, each of the larger of what one-shot needs for `max_oneshot_token_num` (a slot
        for each rank and token) and two-shot for `max_token_num` (two slots for each token), a
        header, and rounding to 2 MiB. Exact integer arithmetic: nothing is clamped.

        Example:
            >>> Workspace.bytes_required(world_size=8, max_token_num=128, hidden_dim=7168) >> 20
            10
        """
        row_bytes = hidden_dim * comm_dtype_of(DType.parse(dtype), comm_dtype).itemsize
        payload = max_token_num * row_bytes
        oneshot = _oneshot_bytes(world_size, row_bytes, payload, max_oneshot_token_num)
        return abi.slab_bytes(abi.epoch_bytes(world_size, oneshot, payload))

    def fits(
        self,
        token_num: int,
        hidden_dim: int,
        dtype: DType | str | None = None,
        *,
        comm_dtype: DType | str | None = None,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether a call with these sizes is within capacity; the same on every rank.

        Args:
            token_num: Tokens of the call.
            hidden_dim: Elements of a row.
            dtype: Activation dtype; None is the workspace's.
            comm_dtype: Wire dtype; None is the workspace's, or else `dtype`.
            use_oneshot: True: by one-shot; None or False: at all.

        Raises:
            ValueError: A dtype is none that the package knows.
        """
        activation = self.dtype if dtype is None else DType.parse(dtype)
        wire = self._wire(activation, comm_dtype)
        if row_problem(hidden_dim, activation) or token_num < 0:
            return False
        home = self._home
        capacity = home.oneshot_bytes if use_oneshot else home.payload_bytes
        return token_num * hidden_dim * wire.itemsize <= capacity

    def _wire(self, dtype: DType, comm_dtype: DType | str | None) -> DType:
        # As `checks.Checker` settles a call's.
        if comm_dtype is None and dtype is self.dtype:
            return self.comm_dtype
        return comm_dtype_of(dtype, comm_dtype)

    def share(self, token_num: int) -> slice:
        """Return the tokens that this rank owns of `token_num`: a run, maybe an empty one.

        It is what the reduce-scatters write and `allgather_residual_rmsnorm` takes.
        """
        tokens = share_of(self.rank, self.world_size, token_num)
        return slice(tokens.start, tokens.stop)

    @classmethod
    def is_supported(
        cls, comm: Any = None, *, backend: str | None = None, device: int | None = None
    ) -> tuple[bool, str]:
        """Whether a workspace can be built over these ranks; collective, never raises.

        Builds a small one and closes it.

        Returns:
            True and a description, or False and the reason; the same on every rank.
        """
        try:
            group = as_group(comm)
        except Exception as error:
            return False, str(error)
        try:
            with cls(
                group,
                max_token_num=1,
                hidden_dim=64,
                operations=["moe_finalize"],
                backend=backend,
                device=device,
            ) as workspace:
                words = f"{workspace.backend}, {workspace.world_size} ranks"
            return True, words
        except Exception as error:
            return False, str(error)

    @classmethod
    def init_all(
        cls, world_size: int, *, devices: Sequence[int] | None = None, **options: Any
    ) -> list[Workspace]:
        """Build several ranks in this process and return their workspaces in rank order.

        Launch the ranks from one thread each, or on streams of their own without waiting for one in
        between: every rank waits for the others on the device. On the CPU backend, where calls
        block, a thread each is the only way (`testing.run_ranks`).

        Args:
            world_size: Number of ranks.
            devices: CUDA ordinal of each rank; None deals out the visible ones in turn.
            options: As the constructor's.

        Example:
            >>> ranks = Workspace.init_all(2, max_token_num=4, hidden_dim=8, backend="cpu")
            >>> [(workspace.rank, workspace.world_size) for workspace in ranks]
            [(0, 2), (1, 2)]
            >>> from cupy_moe_ar.testing import run_ranks
            >>> run_ranks(2, lambda group: ranks[group.Get_rank()].close())  # collective
            [None, None]
        """
        if devices is not None and len(devices) != world_size:
            raise ArgumentError(
                "Workspace.init_all",
                [f"devices must name {world_size} devices; got {list(devices)}"],
            )
        return run_threads(
            world_size,
            lambda group: cls(
                group, device=None if devices is None else devices[group.Get_rank()], **options
            ),
        )

    # ---- life ----------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        dtype: DType | str | None = None,
        comm_dtype: DType | str | None = None,
        operations: Iterable[str] | None = None,
        quant: str | Iterable[str] | None = None,
    ) -> None:
        """Compile, load and warm up operations for a dtype, for every shape; collective.

        The constructor has done so for the workspace's own dtype. What is not prepared raises when
        it is called, since compiling or loading while a peer's kernel waits can deadlock.

        Args:
            dtype: Activation dtype; None is the workspace's.
            comm_dtype: Wire dtype; None is the workspace's, or else `dtype`.
            operations: Names of operations, as the constructor's.
            quant: Names of formats of quantised outputs, for those of the operations that have a
                norm; None is for calls without.

        Raises:
            ArgumentError: An argument is wrong.
            CompileError: A kernel cannot be compiled; on every rank.
        """
        self._require_open("prepare")
        faults: list[str] = []
        variants: tuple[Variant, ...] = ()
        try:
            activation = self.dtype if dtype is None else DType.parse(dtype)
            if activation not in ACTIVATIONS:
                raise ValueError(f"dtype must be bfloat16, float16 or float32; got {dtype!r}")
            wire = self._wire(activation, comm_dtype)
            names = tuple(OPERATIONS) if operations is None else tuple(operations)
            unknown = [name for name in names if name not in OPERATIONS]
            if unknown:
                raise ValueError(f"operations must be among {tuple(OPERATIONS)}; got {unknown}")
            formats, format_fault = _formats(quant)
            if format_fault:
                raise ValueError(format_fault)
            variants = tuple(
                Variant(name, protocol, activation, travels_as(protocol, activation, wire),
                        self.world_size, fmt)
                for fmt in (formats or (None,))
                for name in names if fmt is None or name in QUANTISING
                for protocol in OPERATIONS[name]
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            faults.append(str(error))
        _agree(self._group, "Workspace.prepare", faults, variants)
        new = [variant for variant in variants if variant not in self._limits]
        group, backend = self._group, self._backend
        first_on_host = self._home_hosts.index(self._home_hosts[self.rank]) == self.rank
        # One rank of a host compiles, the others then find it in the cache.
        staged(group, "compiling", lambda: backend.compile(new) if first_on_host else None)
        resident = staged(group, "loading the kernels", lambda: backend.load(new))
        everyone = group.allgather(resident)
        for variant in new:
            counts = [told[variant] for told in everyone]
            least = {
                shape: min(count[shape] for count in counts)
                for shape in counts[0]
                if all(shape in count for count in counts)
            }
            self._limits[variant] = backend.limits(least)
        staged(group, "warming up", lambda: self._warm_up(new))

    def _warm_up(self, variants: Iterable[Variant]) -> None:
        # The first launch of a kernel may wait for the device to drain, which never happens while
        # a peer's kernel waits for this one.
        params = abi.Params.from_buffer_copy(self._params)
        params.flags = abi.Flag.WARM_UP
        for variant in variants:
            shapes = self._limits[variant].resident_clusters
            for kernel in variant.kernels:
                shape = next(s for s in shapes if s.kernel == kernel)
                self._backend.bind(variant, RowPlan(shape, shape.cluster_blocks), params, False)(0)
        self._backend.synchronize()

    def check(self) -> None:
        """Raise if a launch gave up waiting for a peer; does not wait for the device.

        Raises:
            PeerTimeoutError: It did; the workspace is broken for good.
            WorkspaceError: The workspace is closed.
        """
        self._require_open("check")
        record = self._backend.record
        if record.valid:
            raise PeerTimeoutError(record.rank, record.missing_rank, record.token, record.launch)

    def close(self) -> None:
        """Wait for the device, unmap and free; collective, and nothing when called again.

        A rank that gave up waiting for a peer, or whose peers do not come here within a minute (or
        `timeout_s`, if that is shorter), unmaps what it has and keeps its own slab until the
        process ends: peers may still write there.
        """
        if self._unusable == _CLOSED:
            return
        shares, self._unusable = not self._unusable, _CLOSED
        self._backend.synchronize()
        if shares and self._backend.record.valid:
            self._memory.abandon()
        elif shares:
            self._memory.close(self._meet_s)
        self._backend.close()

    @property
    def _meet_s(self) -> float:
        """Seconds to wait on the host for peers who should be on their way."""
        return min(self._timeout_s or _CLOSE_S, _CLOSE_S)

    def checkpoint_prepare(self) -> None:
        """Release what ranks share, so that their processes can be checkpointed; collective.

        Waits for the device, then unmaps the peers' slabs and frees the own one. The kernels and
        the control block stay where they are, so planned calls and captured graphs are good again
        after `checkpoint_restore`. Until then calls raise; a graph must not be replayed, which
        nobody can check: it would end in an illegal address.

        Raises:
            WorkspaceError: The workspace is closed or already prepared, or a peer did not come
                within a minute (or `timeout_s`, if that is shorter): close it then.
            PeerTimeoutError: A launch gave up waiting for a peer. Only a whole workspace can be
                restored.
        """
        self._require_open("checkpoint_prepare")
        self._backend.synchronize()
        self.check()
        if not meet(self._group, self._meet_s):
            raise WorkspaceError(
                f"checkpoint_prepare: not all ranks came within {self._meet_s:.3g} s; close the "
                "workspace"
            )
        self._unusable = _CHECKPOINT
        self._backend.detach()
        self._memory.close(self._meet_s)

    def checkpoint_restore(self, comm: Any) -> None:
        """Share memory again after `checkpoint_prepare`; collective, the same error on every rank.

        All slots are empty then and launches are counted from 0, on every rank. On failure the
        workspace stays prepared: try again or close it.

        Args:
            comm: The ranks, numbered as before; as the constructor's.

        Raises:
            WorkspaceError: `checkpoint_prepare` was not called.
            ArgumentError: `comm` has other ranks, or their workspaces other options.
            UnsupportedError: The ranks cannot share memory.
        """
        if self._unusable != _CHECKPOINT:
            state = self._unusable or "is not prepared for a checkpoint"
            raise WorkspaceError(f"checkpoint_restore: the workspace {state}")
        group = as_group(comm)
        faults = []
        if group.Get_size() != self.world_size:
            faults.append(
                f"comm must have {self.world_size} ranks as before; got {group.Get_size()}"
            )
        elif group.Get_rank() != self.rank:
            faults.append(
                f"comm must number this rank {self.rank} as before; got {group.Get_rank()}"
            )
        same = (self.world_size, self._same)
        _agree(group, "Workspace.checkpoint_restore", faults, same)
        self._home_hosts = group.allgather(host_identity())
        self._backend.locate()
        self._memory, _ = self._backend.allocate(group, self.nbytes)
        self._group = group
        self._count_ranks_on_device()
        self._stream = None
        self._unusable = ""

    def __enter__(self) -> Workspace:
        """Return the workspace."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an exception without the peers, which may not come here."""
        if kind is None:
            self.close()
        elif self._unusable != _CLOSED:
            shares, self._unusable = not self._unusable, _CLOSED
            self._backend.give_up(self.rank)  # else a launch could wait for a peer that gave up
            if shares:
                self._memory.abandon()
            self._backend.close()

    def __del__(self) -> None:
        """Warn if it was not closed."""
        if getattr(self, "_unusable", _CLOSED) != _CLOSED:
            warnings.warn(
                f"workspace of rank {self.rank} was not closed", ResourceWarning, stacklevel=2
            )

    # ---- calls ---------------------------------------------------------------------------------

    def plan(
        self,
        function: str,
        call: Call,
        *,
        launch_with_pdl: bool = False,
        launch_shape: LaunchShape | None = None,
    ) -> Launch:
        """Prepare a checked call for launching any number of times; for the operations of `ops`.

        Args:
            function: The operation's name, for messages.
            call: What `call.describe_*` returned.
            launch_with_pdl: As the operation's.
            launch_shape: As the operation's.

        Raises:
            WorkspaceError: The call's dtypes were not prepared.
            ArgumentError: `launch_shape` does not fit.
        """
        if call.token_num == 0:
            return Launch(self, lambda stream: None)
        variant = Variant(
            call.operation,
            call.protocol,
            call.dtype,
            call.comm_dtype,
            self.world_size,
            call.quant,
        )
        if variant not in self._limits:
            wanted = f"dtype='{call.dtype.value}', comm_dtype='{call.comm_dtype.value}'"
            besides = ""
            if call.quant is not None:
                wanted += f", quant='{call.quant}'"
                besides = f" and quant {call.quant}"
            raise WorkspaceError(
                f"{call.operation} is not prepared for dtype {call.dtype.value} with comm_dtype "
                f"{call.comm_dtype.value}{besides}; call workspace.prepare({wanted}) on every rank "
                "first"
            )
        try:
            plan = self.plan_rows(variant, call.token_num, call.row_vectors, launch_shape)
        except ValueError as error:
            raise ArgumentError(function, [str(error)]) from error
        params = abi.Params.from_buffer_copy(self._params)
        call.fill(params)
        params.cluster_log2 = plan.shape.cluster_blocks.bit_length() - 1
        if self._backend.ranks_on_device > 1:
            params.flags &= ~(abi.Flag.TRIGGER_EARLY | abi.Flag.TRIGGER_HEARD)
        return Launch(self, self._backend.bind(variant, plan, params, launch_with_pdl))

    def plan_rows(
        self,
        variant: Variant,
        token_num: int,
        row_vectors: int,
        launch_shape: LaunchShape | None = None,
    ) -> RowPlan:
        """Return the launch that serves so many rows of so many 16-byte vectors here.

        Raises:
            ValueError: `launch_shape` does not fit.
        """
        return plan_rows(
            token_num,
            row_vectors,
            self._limits[variant],
            launch_shape,
            protocol=variant.protocol,
            world_size=variant.world_size,
            dense=variant.dense,
        )

    def home(self, function: str) -> Home:
        """Return what the call rules need; raises if the workspace is closed."""
        self._require_open(function)
        return self._home

    @property
    def checked(self) -> bool:
        """Whether `MOE_AR_CHECK` asks for agreement over the group at each call."""
        return self._checked

    def agree(
        self,
        function: str,
        faults: Sequence[str],
        call: Call | None,
        launch_shape: LaunchShape | None,
    ) -> None:
        """Compare a call with the peers' and validate its indices; collective, for debugging."""
        faults = list(faults)
        address = dict(call.addresses)["route_index"] if call else 0
        if call and address:
            data = self._backend.read(address, 4 * call.token_num * call.top_k)
            index = np.frombuffer(data, np.int32)
            wrong = index[(index < -1) | (index >= call.num_permuted_rows)]
            if wrong.size:
                faults.append(
                    "expanded_idx_to_permuted_idx must hold -1 (no route) or row numbers below "
                    f"num_permuted_rows = {call.num_permuted_rows}; got {wrong[0]}"
                )
        _agree(self._group, function, faults, (call and call.same, launch_shape))

    def rebind_stream(self) -> None:
        """Let the next launch choose the stream that the workspace is bound to.

        All launches on the present one must have ended: synchronise first.

        Raises:
            WorkspaceError: The workspace is closed.
        """
        self._require_open("rebind_stream")
        self._stream = None

    def _use_stream(self, stream: int) -> None:
        """Bind to a stream other than the bound one, or raise."""
        fault = self._backend.stream_fault(stream)
        if fault:
            raise ArgumentError("a launch", [fault])
        if self._backend.capturing(stream):
            return
        if self._stream is not None:
            raise WorkspaceError(
                f"launches of a workspace must not overlap: it is bound to stream "
                f"{self._stream:#x} and cannot launch on {stream:#x}. Use one stream, or "
                "synchronise and call workspace.rebind_stream(), or build a workspace for each"
            )
        self._stream = stream

    def _require_open(self, function: str) -> None:
        if self._unusable:
            raise WorkspaceError(f"{function}: the workspace {self._unusable}")

    # ---- building ------------------------------------------------------------------------------

    def _make_backend(
        self, backend: str | None, device: int | None, sm_margin: int
    ) -> CudaBackend | CpuBackend:
        group = self._group
        hosts = self._home_hosts
        local_rank = hosts[: self.rank].count(hosts[self.rank])
        if backend is None:
            backend = cuda_backend.backend_of(group)

        def make() -> CudaBackend | CpuBackend:
            if backend == "cpu":
                if device is not None:
                    raise UnsupportedError(f"device must be None on the CPU backend; got {device}")
                return CpuBackend()
            return CudaBackend(cuda_backend.choose_device(device, local_rank), sm_margin)

        return staged(group, f"choosing the {backend} backend's device", make)

    def _count_ranks_on_device(self) -> None:
        places = self._group.allgather(self._backend.place)
        if isinstance(self._backend, CudaBackend):
            uuids = [place.gpu_uuid for place in places]
            # The most crowded device decides, so that every rank plans alike.
            self._backend.ranks_on_device = max(map(uuids.count, uuids))
        slow = why_slow(self.rank, places)
        if slow:
            _log.warning(slow)


def _agree(group: Group, function: str, faults: Sequence[str], same: Any) -> None:
    """Raise every rank's faults on every rank, and a difference in what must be the same."""
    told = group.allgather((tuple(faults), same))
    found: list[str] = []
    for rank, (rank_faults, _) in enumerate(told):
        everywhere = all(other[0] == rank_faults for other in told)
        found += [fault if everywhere else f"rank {rank}: {fault}" for fault in rank_faults]
    if not found and any(other[1] != told[0][1] for other in told):
        rank = next(r for r, other in enumerate(told) if other[1] != told[0][1])
        found.append(
            f"arguments must be the same on every rank; rank 0 has {told[0][1]}, "
            f"rank {rank} has {told[rank][1]}"
        )
    if found:
        raise ArgumentError(function, list(dict.fromkeys(found)))


def _oneshot_bytes(
    world_size: int, row_bytes: int, payload_bytes: int, max_oneshot_token_num: int | None
) -> int:
    """Return the capacity of one-shot in bytes."""
    if max_oneshot_token_num is not None:
        return int(max_oneshot_token_num) * row_bytes
    no_more_memory = 2 * payload_bytes // world_size
    return min(payload_bytes, max(crossover_bytes(world_size), no_more_memory))


def travels_as(protocol: str, dtype: DType, comm_dtype: DType) -> DType:
    """Return the wire dtype of a protocol: a total that has been rounded needs no more."""
    return dtype if protocol == "allgather" else comm_dtype


def _formats(quant: str | Iterable[str] | None) -> tuple[tuple[str, ...], str | None]:
    """Return names of formats and what is wrong with them."""
    try:
        names = (quant,) if isinstance(quant, str) else tuple(quant or ())
        return tuple(dict.fromkeys(parse_quant(name).name for name in names)), None
    except (TypeError, ValueError) as error:
        return (), str(error)


def _timeout(timeout_s: float | None) -> tuple[float, str | None]:
    """Return the bound in seconds (0: none) and what is wrong with it."""
    name: str = "timeout_s"
    value: Any = timeout_s
    if os.environ.get("MOE_AR_TIMEOUT_S"):
        name, value = "MOE_AR_TIMEOUT_S", os.environ["MOE_AR_TIMEOUT_S"]
    if value is None or value == "none":
        return 0.0, None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < 1e9:
        return 0.0, f"{name} must be a positive number of seconds or None; got {value!r}"
    return seconds, None


def _source_digest() -> str:
    """Digest of the package and the kernels: ranks of different versions must not meet."""
    from .compile import sources

    digest = hashlib.sha256()
    for folder, pattern in ((Path(__file__).parent, "*.py"), (sources(), "**/*.cu*")):
        for path in sorted(folder.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
