"""Ranks, data and judgement shared by the tests of the operation and of its workspace.

What touches a device is a body that every rank runs: each in a thread of this process or, under
mpirun, each in its own. A body is a function under a decorator, which runs it at once:

    @each_world(2, 3)                          # with 2 and with 3 ranks; under mpirun with its own
    def test_something(ranks: Ranks) -> None:
        case = random_case(ranks.size, tokens, hidden_dim)

        @ranks.with_workspace(case)            # or @ranks.run
        def body(rank: Rank, workspace: Workspace) -> None:
            check(case, finalize(rank, workspace, case))
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_moe_ar import (
    DType,
    UnsupportedError,
    Workspace,
    abi,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_reduction_allreduce_fusion,
)
from cupy_moe_ar import reference as ref
from cupy_moe_ar.compile import Variant
from cupy_moe_ar.cuda_backend import device_count
from cupy_moe_ar.group import ThreadGroup
from cupy_moe_ar.plan import KernelLimits, LaunchShape, launch_shapes
from cupy_moe_ar.testing import run_ranks

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
OUTPUTS = ("allreduce_out", "residual_out", "norm_out")
TIMEOUT_S = 20.0  # whoever waits longer for a peer has found a bug
ROOT = Path(__file__).parent.parent
GUARD_BYTES = 4096
# As mpirun tells it (Open MPI, MPICH and Intel MPI, PMIx), so that MPI need not be imported; None
# outside mpirun.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
RANK = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)

Array = NDArray[Any]
_here = threading.local()


# ---- ranks ---------------------------------------------------------------------------------------


@functools.cache
def backend() -> str:
    """The backend under test; the same on every rank."""
    named = os.environ.get("MOE_AR_BACKEND", "")
    if named in ("cpu", "cuda"):
        return named
    try:
        return "cuda" if device_count() else "cpu"
    except UnsupportedError:
        return "cpu"


@functools.cache
def mpi_world() -> Any:
    """MPI's world under mpirun, else None."""
    if RANK is None:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def worlds(*sizes: int, mpi_up_to: int = 16) -> list[int]:
    """Numbers of ranks to test: `sizes`, or mpirun's if it is not less than all of them."""
    if mpi_world() is None:
        return list(sizes)
    size = mpi_world().Get_size()
    return [size] if min(sizes) <= size <= mpi_up_to else []


def each_world(*sizes: int, mpi_up_to: int = 16) -> pytest.MarkDecorator:
    """Run a test with several numbers of ranks."""
    counts = worlds(*sizes, mpi_up_to=mpi_up_to)
    return pytest.mark.parametrize("ranks", counts, indirect=True, ids="W{}".format)


each_protocol = pytest.mark.parametrize("oneshot", [True, False], ids=["oneshot", "twoshot"])


def current_rank() -> int:
    """Rank of the calling thread, for what a test plants into the package."""
    return _here.rank


def run(*command: object, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this checkout, which must fail if `status` is not 0."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done


def mpirun(ranks: int) -> list[str]:
    """The words that start ranks on the CPU, for tests of programs; demo.sh does it on GPUs."""
    if os.environ.get("MOE_AR_BACKEND") == "cuda" or shutil.which("nvidia-smi"):
        pytest.skip("on GPUs scripts/demo.sh covers it")
    pytest.importorskip("mpi4py")
    launcher = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    launcher = launcher or shutil.which("mpirun")
    if launcher is None:
        pytest.skip("there is no mpirun")
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    more = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in told.stdout else []
    return [launcher, *more, "-n", str(ranks)]


class Rank:
    """One rank: its group and its device. On CUDA a new stream is current."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = int(group.Get_rank()), int(group.Get_size())
        self.device: int | None = None
        self.stream: Any = None
        _here.rank = self.rank

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        if backend() == "cpu":
            yield
            return
        import cupy

        self.device = self.rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.device).use()
        with cupy.cuda.Stream(non_blocking=True) as self.stream:
            yield
            self.stream.synchronize()

    def workspace(self, case: Case | None = None, **options: Any) -> Workspace:
        defaults: dict[str, Any] = {"comm": self.group, "backend": backend(), "device": self.device}
        defaults["operations"] = [case.operation if case else "moe_finalize"]
        sizes = case.capacity if case else {"max_token_num": 8, "hidden_dim": 64}
        settled = {**defaults, "timeout_s": TIMEOUT_S, **sizes, **options}
        settled.setdefault("max_oneshot_token_num", settled["max_token_num"])
        return Workspace(**settled)

    def put(self, host: Array) -> Buffer:
        return Buffer(self, host)

    def wait(self) -> None:
        """Wait for the own launches."""
        if self.stream is not None:
            self.stream.synchronize()

    def meet(self) -> None:
        """Wait for the own launches, then for the peers.

        While one rank launches, none may allocate, free or copy.
        """
        self.wait()
        self.group.barrier()

    def same(self, thing: Any) -> None:
        """Check that every rank has the same."""
        told = self.group.allgather(thing)
        assert all(other == told[0] for other in told), told

    def split(self, color: int) -> Rank:
        """This rank in the group of all ranks that name the same color."""
        if mpi_world() is not None:
            group = self.group.Split(color)
        else:
            colors = self.group.allgather(color)
            mine = [rank for rank, other in enumerate(colors) if other == color]
            members = self.group.allgather(ThreadGroup.create(len(mine)))[mine[0]]
            group = members[mine.index(self.rank)]
        other = Rank(group)
        other.device, other.stream, _here.rank = self.device, self.stream, self.rank
        return other


class Ranks:
    """The fixture `ranks`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, body: Callable[[Rank], None]) -> None:
        """Run a body on every rank."""

        def on_rank(group: Any) -> None:
            rank = Rank(group)
            with rank.on_device():
                body(rank)

        if mpi_world() is None:
            run_ranks(self.size, on_rank)
        else:
            on_rank(mpi_world())

    def with_workspace(self, case: Case | None = None, **options: Any) -> Callable[..., None]:
        """Run a body on every rank in a workspace that is as large as a case."""

        def decorate(body: Callable[[Rank, Workspace], None]) -> None:
            def on_rank(rank: Rank) -> None:
                with rank.workspace(case, **options) as workspace:
                    body(rank, workspace)

            self.run(on_rank)

        return decorate


class Buffer:
    """An array on a rank's device, between guards whose bits are NaNs."""

    def __init__(self, rank: Rank, host: Array) -> None:
        self.host = host
        self.memory: Any = np.full(host.nbytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
        inner = np.frombuffer(host.tobytes(), np.uint8)
        self.memory[GUARD_BYTES : GUARD_BYTES + host.nbytes] = inner
        if rank.stream is not None:
            import cupy

            on_host, self.memory = self.memory, cupy.empty(self.memory.shape, np.uint8)
            self.memory.set(on_host)
            rank.wait()
        self.array = self.at(0, host.shape)

    def at(self, offset: int, shape: tuple[int, ...]) -> Any:
        """The array that starts `offset` bytes behind the first element."""
        begin = GUARD_BYTES + offset
        if isinstance(self.memory, np.ndarray):
            return np.ndarray(shape, self.host.dtype, self.memory.data, begin)
        import cupy

        return cupy.ndarray(shape, self.host.dtype, memptr=self.memory.data + begin)

    def read(self) -> Array:
        """Check the guards and copy the array to the host."""
        raw = self.memory if isinstance(self.memory, np.ndarray) else self.memory.get()
        before, inner, after = np.split(raw, [GUARD_BYTES, GUARD_BYTES + self.host.nbytes])
        assert (before == 0xFF).all(), "written before the array"
        assert (after == 0xFF).all(), "written past the array"
        return np.frombuffer(inner.tobytes(), self.host.dtype).reshape(self.host.shape)


def edit_source(path: Path, old: str, new: str, times: int = 1) -> None:
    """Plant a fault: replace what stands there so many times."""
    text = path.read_text()
    assert text.count(old) == times, f"{path.name} has {old!r} no longer: adapt this test"
    path.write_text(text.replace(old, new))


# ---- data ----------------------------------------------------------------------------------------


def bits(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def filled(value: Any, dtype: DType, *shape: int) -> Array:
    """Array of values that are broadcast to a shape."""
    return np.broadcast_to(np.asarray(value, np.float64), shape).astype(ref.numpy_dtype(dtype))


@dataclass(frozen=True)
class Case:
    """What the ranks pass to a finalize, and what is right. Lists have an entry for each rank."""

    operation: ClassVar[str] = "moe_finalize"
    function: ClassVar[Callable[..., None]] = staticmethod(moe_finalize_allreduce_fusion)
    total_out: ClassVar[str] = "allreduce_out"  # the function's name for it

    dtype: DType
    rows: list[Array]
    index: list[Array]
    scale: Sequence[Array | None] = ()
    shared: Sequence[Array | None] = ()
    residual: Array | None = None
    gamma: Array | None = None
    comm_dtype: DType | None = None
    factor: float = 1.0
    eps: float = 1e-6
    bias: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.index[0].shape[0], self.rows[0].shape[1]

    @property
    def capacity(self) -> dict[str, Any]:
        """Options of a workspace that is large enough."""
        tokens, hidden_dim = self.shape
        sizes = {"max_token_num": max(tokens, 1), "hidden_dim": hidden_dim}
        return {**sizes, "dtype": self.dtype, "comm_dtype": self.comm_dtype}

    def first(self, tokens: int) -> Case:
        """The same with the first tokens only."""
        return self._cut(tokens, "index", "scale", "shared")

    def _cut(self, tokens: int, *names: str) -> Any:
        cut: dict[str, Any] = {
            name: [None if x is None else x[:tokens] for x in getattr(self, name)] for name in names
        }
        residual = None if self.residual is None else self.residual[:tokens]
        return replace(self, **cut, residual=residual)

    def arrays(self, rank: int) -> dict[str, Array]:
        """The array arguments of a rank."""
        arguments = {
            "allreduce_in": self.rows[rank],
            "expanded_idx_to_permuted_idx": self.index[rank],
            "expert_scale_factor": self.scale[rank] if self.scale else None,
            "shared_expert_output": self.shared[rank] if self.shared else None,
            "residual_in": self.residual,
            "rms_gamma": self.gamma,
        }
        return {name: x for name, x in arguments.items() if x is not None}

    @property
    def numbers(self) -> dict[str, Any]:
        """The other arguments."""
        return {**self.norm_numbers, "routed_scaling_factor": self.factor}

    @property
    def norm_numbers(self) -> dict[str, Any]:
        """Those of every all-reduce."""
        options = {"dtype": self.dtype, "comm_dtype": self.comm_dtype}
        return {**options, "weight_bias": self.bias, "rms_eps": self.eps}

    @functools.cached_property
    def partials(self) -> list[Array]:
        sides = [(x.get("expert_scale_factor"), x.get("shared_expert_output"))
                 for x in map(self.arrays, range(len(self.rows)))]  # fmt: skip
        return [
            ref.moe_finalize(rows, index, *side, self.factor)
            for rows, index, side in zip(self.rows, self.index, sides, strict=True)
        ]

    def _finish(self, partials: list[Array], residual: Array | None, **options: Any) -> ref.Result:
        norm = {"rms_gamma": self.gamma, "rms_eps": self.eps, "weight_bias": self.bias}
        return ref.finish(partials, dtype=self.dtype, residual_in=residual, **norm, **options)

    @functools.cached_property
    def expected(self) -> ref.Result:
        """float64 with the contract's rounding points."""
        return self._finish(self.partials, self.residual, comm_dtype=self.comm_dtype)

    @functools.cached_property
    def exact(self) -> ref.Result:
        return self._finish(self.partials, self.residual, exact=True)

    def norm_of(self, residual: Array) -> Array | None:
        """The contract's norm of a residual as stored."""
        return self._finish([residual.astype(np.float64)], None).norm_out

    @functools.cached_property
    @np.errstate(invalid="ignore")
    def float32(self) -> ref.Result:
        """allreduce_out and residual_out by FP32 in the contract's order: every bit counts."""
        wire = self.comm_dtype or self.dtype
        total = np.zeros(self.shape, np.float32)
        for r in range(len(self.rows)):
            partial = ref.round_to(self.float32_partial(r), wire, drop_negative_zero=True)
            total = total + partial.astype(np.float32)
        allreduce = ref.round_to(total, self.dtype)
        if wire is self.dtype:
            total = allreduce.astype(np.float32)
        if self.residual is not None:
            total = total + self.residual.astype(np.float32)
        return ref.Result(allreduce, ref.round_to(total, self.dtype))

    @np.errstate(invalid="ignore")
    def float32_partial(self, r: int) -> Array:
        """A rank's partial in FP32, before it is rounded to the wire."""
        arrays = self.arrays(r)
        index = self.index[r]
        taken = (index >= 0) & (index < len(self.rows[r]))
        scale = arrays.get("expert_scale_factor", np.ones(index.shape, np.float32))
        weight = np.where(taken, scale.astype(np.float32), np.float32(0))
        routes = np.zeros((index.shape[1], *self.shape), np.float32)
        for k, row in enumerate(routes):
            row[taken[:, k]] = self.rows[r][index[taken[:, k], k]]
        shared = arrays.get("shared_expert_output", np.zeros(self.shape, np.float32))
        return fma32(np.float32(self.factor), tree_sum(weight.T, routes), shared.astype(np.float32))


@dataclass(frozen=True)
class DenseCase(Case):
    """Of an all-reduce: `rows` are the parts."""

    operation: ClassVar[str] = "allreduce"
    function: ClassVar[Callable[..., None]] = staticmethod(allreduce_fusion)

    index: list[Array] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[0].shape  # type: ignore[return-value]

    def first(self, tokens: int) -> DenseCase:
        cut: DenseCase = self._cut(tokens, "rows")
        return cut

    def arrays(self, rank: int) -> dict[str, Array]:
        rest = {"residual_in": self.residual, "rms_gamma": self.gamma}
        given = {"allreduce_in": self.rows[rank], **rest}
        return {name: x for name, x in given.items() if x is not None}

    @property
    def numbers(self) -> dict[str, Any]:
        return self.norm_numbers

    @functools.cached_property
    def partials(self) -> list[Array]:
        return [rows.astype(np.float64) for rows in self.rows]

    def float32_partial(self, r: int) -> Array:
        return self.rows[r].astype(np.float32)


@dataclass(frozen=True)
class ReductionCase(DenseCase):
    """Of a sum over experts: `rows` are theirs, `shared` the token input."""

    operation: ClassVar[str] = "moe_reduction"
    function: ClassVar[Callable[..., None]] = staticmethod(moe_reduction_allreduce_fusion)
    total_out: ClassVar[str] = "moe_allreduce_out"

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[0].shape[1:]  # type: ignore[return-value]

    def first(self, tokens: int) -> ReductionCase:
        cut: ReductionCase = self._cut(tokens, "shared")
        rows = [np.ascontiguousarray(x[:, :tokens]) for x in self.rows]
        scale = [np.ascontiguousarray(x[:, :tokens]) for x in self.scale if x is not None]
        return replace(cut, rows=rows, scale=scale)

    def arrays(self, rank: int) -> dict[str, Array]:
        arguments = {
            "moe_reduction_active_experts_token_input": self.rows[rank],
            "moe_reduction_scale_input": self.scale[rank],
            "moe_reduction_token_input": self.shared[rank] if self.shared else None,
            "residual_in": self.residual,
            "rms_gamma": self.gamma,
        }
        return {name: x for name, x in arguments.items() if x is not None}

    @functools.cached_property
    def partials(self) -> list[Array]:
        sides = zip(self.rows, self.scale, self.shared or [None] * len(self.rows), strict=True)
        return [ref.moe_reduction(rows, scale, shared) for rows, scale, shared in sides]

    @np.errstate(invalid="ignore")
    def float32_partial(self, r: int) -> Array:
        shared = self.shared[r] if self.shared else None
        added = tree_sum(self.scale[r], self.rows[r].astype(np.float32))
        return added + (np.float32(0) if shared is None else shared.astype(np.float32))


def fma32(a: Any, b: Array, c: Array) -> Array:
    """FP32 a * b + c, rounded once."""
    return (np.asarray(a, np.float64) * b.astype(np.float64) + c).astype(np.float32)


def tree_sum(weight: Array, rows: Array) -> Array:
    """Sum of weight [n, tokens] * rows [n, tokens, hidden] in FP32, as the kernels do it."""
    total = np.zeros(rows.shape[1:], np.float32)
    more = -len(rows) % 8
    weight = np.pad(weight, [(0, more), (0, 0)])[:, :, None]
    rows = np.pad(rows, [(0, more), (0, 0), (0, 0)])
    for begin in range(0, len(rows), 8):
        pairs = [fma32(weight[k + 1], rows[k + 1], weight[k] * rows[k])
                 for k in range(begin, begin + 8, 2)]  # fmt: skip
        total = total + ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3]))
    return total


def random_case(
    size: int,
    tokens: int,
    hidden_dim: int,
    top_k: int = 8,
    dtype: DType = BF16,
    comm_dtype: DType | None = None,
    *,
    scale: DType | None = F32,
    gamma: DType | None = None,
    shared_on: Callable[[int], bool] = lambda rank: True,
    residual: bool = True,
    seed: int = 0,
    **numbers: float,
) -> Case:
    """Real routing, different on every rank; a quarter of the routes is on no rank.

    Rows that no route names, and the scales of absent routes, are NaN.
    """

    normal = functools.partial(draw, dtype)
    lists: dict[str, list[Any]] = {"rows": [], "index": [], "scale": [], "shared": []}
    for r in range(size):
        rng = np.random.default_rng([seed, r])
        row_num = tokens * top_k + tokens * top_k // 4 + 3
        index = rng.permutation(row_num)[: tokens * top_k].reshape(tokens, top_k).astype(np.int32)
        index[rng.random(index.shape) < 0.25] = -1
        rows = normal(rng, 0.5, row_num, hidden_dim)
        rows[np.setdiff1d(np.arange(row_num), index)] = np.nan
        weights = None
        if scale is not None:
            logits = np.exp(rng.standard_normal(index.shape))
            weights = ref.round_to(logits / logits.sum(axis=1, keepdims=True), scale)
            weights[index < 0] = np.nan
        shared = normal(rng, 0.5, tokens, hidden_dim) if shared_on(r) else None
        for name, x in zip(lists, (rows, index, weights, shared), strict=True):
            lists[name].append(x)
    common = _common(tokens, hidden_dim, dtype, gamma, residual, seed)
    return Case(dtype, **lists, **common, comm_dtype=comm_dtype, **numbers)


def draw(dtype: DType, rng: np.random.Generator, factor: float, *shape: int) -> Array:
    """Normally distributed values."""
    return ref.round_to(rng.standard_normal(shape, np.float32) * np.float32(factor), dtype)


def _common(
    tokens: int, hidden_dim: int, dtype: DType, gamma: DType | None, residual: bool, seed: int
) -> dict[str, Any]:
    """What is the same on every rank."""
    rng = np.random.default_rng([seed, 99])
    weight = ref.round_to(1 + 0.1 * rng.standard_normal(hidden_dim), gamma or dtype)
    addend = draw(dtype, rng, 4, tokens, hidden_dim) if residual else None
    return {"residual": addend, "gamma": weight}


def dense_case(
    size: int,
    tokens: int,
    hidden_dim: int,
    dtype: DType = BF16,
    comm_dtype: DType | None = None,
    *,
    gamma: DType | None = None,
    residual: bool = True,
    seed: int = 0,
    **numbers: float,
) -> DenseCase:
    rows = [draw(dtype, np.random.default_rng([seed, r]), 1, tokens, hidden_dim)
            for r in range(size)]  # fmt: skip
    common = _common(tokens, hidden_dim, dtype, gamma, residual, seed)
    return DenseCase(dtype, rows, **common, comm_dtype=comm_dtype, **numbers)


def reduction_case(
    size: int,
    tokens: int,
    hidden_dim: int,
    experts: Sequence[int],
    dtype: DType = BF16,
    comm_dtype: DType | None = None,
    *,
    gamma: DType | None = None,
    shared_on: Callable[[int], bool] = lambda rank: True,
    residual: bool = True,
    seed: int = 0,
    **numbers: float,
) -> ReductionCase:
    """Rank r has `experts[r % len(experts)]` experts; a token is routed to half of them."""
    lists: dict[str, list[Any]] = {"rows": [], "scale": [], "shared": []}
    for r in range(size):
        rng = np.random.default_rng([seed, r])
        count = experts[r % len(experts)]
        weight = rng.random((count, tokens), np.float32) * (rng.random((count, tokens)) < 0.5)
        lists["rows"].append(draw(dtype, rng, 0.5, count, tokens, hidden_dim))
        lists["scale"].append(weight)
        lists["shared"].append(draw(dtype, rng, 0.5, tokens, hidden_dim) if shared_on(r) else None)
    common = _common(tokens, hidden_dim, dtype, gamma, residual, seed)
    return ReductionCase(dtype, **lists, **common, comm_dtype=comm_dtype, **numbers)


# ---- calls ---------------------------------------------------------------------------------------


def finalize(
    rank: Rank,
    workspace: Workspace,
    case: Case,
    outputs: Sequence[str] = OUTPUTS,
    in_place: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Call the case's operation once, as `launch` does; all ranks get the same bits.

    Args:
        in_place: For an output the input whose array it shares.
        options: More arguments of the operation.
    """
    own = {name: case.total_out if name == "allreduce_out" else name for name in outputs}
    shares = {own[name]: other for name, other in (in_place or {}).items()}
    results = launch(
        rank,
        workspace,
        case.function,
        case.arrays(rank.rank),
        {name: shares.get(name, case.shape) for name in own.values()},
        launches=case.shape[0] > 0,
        **{**case.numbers, **options},
    )
    rank.same(hashlib.sha256(b"".join(x.tobytes() for x in results.values())).hexdigest())
    return {name: results[own[name]] for name in outputs}


def launch(
    rank: Rank,
    workspace: Workspace,
    function: Callable[..., None],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, tuple[int, ...] | str],
    *,
    dtype: DType,
    dtypes: Mapping[str, Any] | None = None,
    launches: bool = True,
    **options: Any,
) -> dict[str, Array]:
    """Call an operation once on poisoned outputs; return them.

    Checks that nothing else was written, that every slot is empty again and that the state has
    advanced by one launch.

    Args:
        outputs: By name the shape, or the input whose array it shares.
        dtype: Of the outputs.
        dtypes: NumPy's, of those that are of another one.
        launches: False where there is nothing to do.
        options: More arguments of the operation.
    """
    buffers = {name: rank.put(host) for name, host in inputs.items()}
    written = {}
    for name, place in outputs.items():
        if isinstance(place, str):
            written[name] = buffers[place]
            continue
        poison = np.empty(place, (dtypes or {}).get(name, ref.numpy_dtype(dtype)))
        bits(poison)[...] = -1 % 2 ** (8 * poison.itemsize)  # a NaN that no kernel writes
        written[name] = rank.put(poison)
    before = control(workspace).launches
    rank.meet()
    function(
        workspace=workspace,
        **{name: buffer.array for name, buffer in (buffers | written).items()},
        dtype=dtype,
        **options,
    )
    rank.meet()
    results = {name: buffer.read() for name, buffer in written.items()}
    for name, buffer in buffers.items():
        unchanged = name in outputs.values() or buffer.read().tobytes() == buffer.host.tobytes()
        assert unchanged, f"{name} was written"
    slots = workspace._memory.slab.pointer + abi.SLAB_HEADER_BYTES
    words = np.frombuffer(
        read(workspace, slots, workspace.nbytes - abi.SLAB_HEADER_BYTES), np.uint32
    )
    assert (words == abi.SENTINEL).all(), f"word {np.argmax(words != abi.SENTINEL)} is not empty"
    state = control(workspace)
    assert state.launches == before + launches
    assert set(state.epoch) == {state.launches % 2}
    assert state.broken == 0
    return results


def see_saw(
    rank: Rank, workspace: Workspace, case: Case, counts: Sequence[int] = (), **options: Any
) -> dict[str, Array]:
    """Call it with all tokens, then with changing counts; a token's bits stay the same."""
    most = case.shape[0]
    results = finalize(rank, workspace, case, **options)
    for count in counts or (1, min(3, most), min(7, most), most, 1):
        again = finalize(rank, workspace, case.first(count), **options)
        for name, output in again.items():
            check_bits(output, results[name][:count], f"{name} of {count} tokens")
    return results


def usable_shapes(
    workspace: Workspace, case: Case, protocol: str = "oneshot", quant: str | None = None
) -> list[LaunchShape]:
    """Every launch shape that serves the case here."""
    wire = case.comm_dtype or case.dtype
    variant = Variant(case.operation, protocol, case.dtype, wire, workspace.world_size, quant)
    tokens, hidden_dim = case.shape
    vectors = hidden_dim * case.dtype.itemsize // 16
    shapes = []
    for shape in launch_shapes(vectors):
        with contextlib.suppress(ValueError):
            workspace.plan_rows(variant, tokens, vectors, shape)
            shapes.append(shape)
    assert len({shape.kernel for shape in shapes}) > 1
    return shapes


@contextlib.contextmanager
def crowded(workspace: Workspace, clusters: int) -> Iterator[None]:
    """Leave room for a few clusters only, as on a small or shared device."""
    limits = dict(workspace._limits)
    for variant, roomy in limits.items():
        few = {shape: min(count, clusters) for shape, count in roomy.resident_clusters.items()}
        workspace._limits[variant] = KernelLimits(few, roomy.sm_count)
    workspace.launches.clear()
    try:
        yield
    finally:
        workspace._limits.update(limits)
        workspace.launches.clear()


def read(workspace: Workspace, address: int, nbytes: int) -> bytes:
    return workspace._backend.read(address, nbytes)


def control(workspace: Workspace) -> abi.ControlBlock:
    """Copy of the state that a rank's launches share."""
    size = ctypes.sizeof(abi.ControlBlock)
    return abi.ControlBlock.from_buffer_copy(read(workspace, workspace._params.control, size))


# ---- judgement -----------------------------------------------------------------------------------


def check(case: Case, results: Mapping[str, Array]) -> None:
    """Judge outputs: every bit of the sums, in ulps and in the mean against the reference."""
    dtype = case.dtype
    for name, output in results.items():
        if name == "norm_out":
            residual = results.get("residual_out", case.float32.residual_out)
            far = ref.ulp_distance(output, case.norm_of(residual), dtype)
            assert far.max() <= (8 if dtype is F32 else 1), (name, far.max())
            continue
        check_bits(output, getattr(case.float32, name), name)
        # A part that FP32 rounds to its other neighbour shows in the sum, in ulps of the largest
        # term, and there twice where both sums are ties.
        terms = [*case.partials, case.expected.allreduce_out, case.expected.residual_out]
        largest = np.max([np.abs(term.astype(np.float64)) for term in terms], axis=0)
        difference = output.astype(np.float64) - getattr(case.expected, name).astype(np.float64)
        far = np.abs(difference) / ref.ulp(largest, dtype)
        assert far.max() <= (16 if dtype is F32 else 2), (name, far.max())
        assert dtype is F32 or (far > 1).mean() < 1e-4, (name, (far > 1).sum())
    if dtype is not F32 and np.prod(case.shape) > 4096:
        own = ref.errors(case.expected, case.exact)
        for name, (mean, _) in ref.errors(results, case.exact).items():
            assert mean <= 1.01 * own[name][0], (name, mean, own[name][0])


def check_bits(output: Array, expected: Array, name: str = "output") -> None:
    """Check for equal bits; all NaNs are equal."""
    assert (output.dtype, output.shape) == (expected.dtype, expected.shape)
    wrong = (bits(output) != bits(expected)) & ~(np.isnan(output) & np.isnan(expected))
    assert not wrong.any(), (name, np.argwhere(wrong)[:4], output[wrong][:4], expected[wrong][:4])
