"""Random launches without end, each checked on every rank; or a rank is killed among them.

    python scripts/stress.py --ranks 3 --seconds 60
    python scripts/stress.py --ranks 3 --kill 1
    mpirun -n 4 python scripts/stress.py --launches 2000
    python scripts/stress.py --ranks 2 --record skew.json      adds how late ranks were to the file
    python scripts/stress.py --plot skew.json skew.png         draws that, and runs nothing

Shapes, operations, dtypes, options and launch shapes are random, and ranks come late at random.
Payloads are small integers that depend on the launch's number, so that sums are exact and a stale
word is seen; many are -0.0. Launches are queued in bunches. On the CPU backend threads run in
random order, and programmatic launches overlap. On GPUs CUDA graphs of 20 launches and of 1 are
replayed 50 and 5,000 times, and `--repeats` launches (100,000) are drawn from a pool of 64 with
different payloads and compared on the device with the bits that were found right before, so that
the queue never runs dry. With `--delays` the kernels are a test build that waits, on random ranks,
before a push, between push and poll, before a restore, before the epoch advances and before its
end.

With `--kill` that rank kills itself at a random moment. Every other rank must raise in time, name
it, close, and get right results in a new workspace of those that are left.

The last line is `N passed, N failed`. Exit status 0: none failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from _ranks import Rank, choose_backend, parse, positive, start
from numpy.typing import NDArray

from cupy_moe_ar import (
    ArgumentError,
    DType,
    LaunchShape,
    PeerTimeoutError,
    Workspace,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_reduction_allreduce_fusion,
    reference,
)
from cupy_moe_ar import compile as compiling
from cupy_moe_ar.cpu_backend import CpuBackend
from cupy_moe_ar.plan import launch_shapes
from cupy_moe_ar.selfcheck import DTYPES, NORM_ULPS
from cupy_moe_ar.testing import spawn_ranks

Array = NDArray[Any]

FUNCTIONS: dict[str, Callable[..., None]] = {
    "moe_finalize": moe_finalize_allreduce_fusion,
    "moe_reduction": moe_reduction_allreduce_fusion,
    "allreduce": allreduce_fusion,
}
OUTPUTS = ("allreduce_out", "residual_out", "norm_out")
GRAPHS = ((20, 50), (1, 5000))  # launches of a graph, replays
SMALL = (16, 256)  # most tokens and elements of a row where replays are many: the host makes data
POOL = 64  # launches that are repeated in random order
QUEUED = 256  # of them between two waits for the device
BLOCK = 32  # launches between two looks at the clock, which ranks must agree on
SLACK_S = 2.0  # that raising may take beyond the bound


@dataclass(frozen=True)
class Options:
    """What to run; the same on every rank.

    Attributes:
        seed: Of everything random.
        launches: Number of them; None is any.
        seconds: When to stop, unless something failed before; None is never. With `kill` the rank
            dies before.
        kill: Rank that dies; None is none.
        operations: Names of `FUNCTIONS`.
        dtypes: Names of `DTYPES`.
        timeout_s: The workspace's.
        repeats: On GPUs, launches that are compared on the device.
        programmatic: Every launch is programmatic and triggers early.
    """

    seed: int
    launches: int | None = None
    seconds: float | None = None
    kill: int | None = None
    operations: tuple[str, ...] = tuple(FUNCTIONS)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    timeout_s: float = 30.0
    repeats: int = 100_000
    programmatic: bool = False

    def generator(self, *key: int) -> np.random.Generator:
        """Return random numbers for a key."""
        return np.random.default_rng([self.seed, *key])


@dataclass
class Result:
    """What one rank found.

    Attributes:
        launches: Number that it made.
        failures: What was wrong, by number of the launch; -1 is for what is no launch.
        late_s: Seconds that it came late to each launch, or to the first of those queued with it.
        backend: Where it ran.
    """

    launches: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)
    backend: str = ""


# ---- one launch ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """Shapes and options of a launch, the same on every rank."""

    operation: str
    tokens: int
    hidden: int
    dtype: DType
    comm_dtype: DType
    top_k: int
    scale: DType | None
    gamma: DType
    residual: bool
    in_place: bool
    outputs: tuple[str, ...]
    numbers: dict[str, float]
    launch: dict[str, Any]
    launch_shape: LaunchShape | None

    @classmethod
    def draw(cls, options: Options, sizes: tuple[int, int], *key: int) -> Spec:
        """Draw one; `sizes` are the most tokens, and elements of a row of float32."""
        rng = options.generator(0, *key)
        operation = str(rng.choice(options.operations))
        dtype, comm_dtype = DTYPES[str(rng.choice(options.dtypes))]
        lanes = 16 // dtype.itemsize
        vectors = int(rng.integers(1, 1 + int(rng.choice([8, 40, sizes[1] // 4]))))
        outputs = tuple(name for name in OUTPUTS if rng.random() < 0.6) or ("residual_out",)
        residual = bool(rng.random() < 0.8)
        twoshot = "twoshot" in compiling.OPERATIONS[operation]
        shapes = launch_shapes(vectors)
        return cls(
            operation,
            tokens=int(rng.integers(1, 1 + int(rng.choice([1, 4, sizes[0]])))),
            hidden=vectors * lanes,
            dtype=dtype,
            comm_dtype=comm_dtype,
            top_k=int(rng.integers(1, 11)),
            scale=(None, DType.FLOAT32, dtype)[rng.integers(3)],
            gamma=(DType.FLOAT32, dtype)[rng.integers(2)],
            residual=residual,
            in_place=residual and "residual_out" in outputs and bool(rng.random() < 0.3),
            outputs=outputs,
            numbers={"weight_bias": float(rng.integers(2)), "rms_eps": 1e-5}
            | ({"routed_scaling_factor": float(rng.choice([1, 2, 0.5]))}
               if operation == "moe_finalize" else {}),
            launch={
                "use_oneshot": (None, True, False)[rng.integers(3)] if twoshot else True,
                "launch_with_pdl": bool(rng.random() < 0.5) or options.programmatic,
                "trigger_completion_at_end": False
                if options.programmatic
                else (None, None, True, False)[rng.integers(4)],
            },
            launch_shape=shapes[rng.integers(len(shapes))] if rng.random() < 0.6 else None,
        )  # fmt: skip

    def rows(self, rng: np.random.Generator, limit: int, *shape: int) -> Array:
        """Draw integers, a zero as often +0.0 as -0.0; sometimes most are zeros."""
        drawn = rng.integers(-limit, limit + 1, shape).astype(np.float32)
        if rng.random() < 0.3:
            drawn *= rng.random(shape) < 0.2
        drawn[(drawn == 0) & (rng.random(shape) < 0.5)] = -0.0
        return reference.round_to(drawn, self.dtype)

    def common(self, options: Options, number: int) -> dict[str, Array]:
        """Make the arguments that are the same on every rank."""
        rng = options.generator(1, number)
        weight = reference.round_to(rng.integers(1, 4, self.hidden).astype(np.float32), self.gamma)
        common = {"rms_gamma": weight} if "norm_out" in self.outputs else {}
        if self.residual:
            common["residual_in"] = self.rows(rng, 20, self.tokens, self.hidden)
        return common

    def own(self, options: Options, number: int, rank: int) -> dict[str, Array]:
        """Make the arguments of a rank; arrays keep their shapes from number to number."""
        rng = options.generator(2, number, rank)
        row = (self.tokens, self.hidden)
        if self.operation == "allreduce":
            return {"allreduce_in": self.rows(rng, 100, *row)}
        if self.operation == "moe_reduction":
            experts = (self.top_k + rank) % 4
            return {
                "moe_reduction_active_experts_token_input": self.rows(rng, 3, experts, *row),
                "moe_reduction_scale_input": rng.integers(-1, 3, (experts, self.tokens)).astype(
                    np.float32
                ),
            } | ({"moe_reduction_token_input": self.rows(rng, 5, *row)} if rank % 2 else {})
        routes = self.tokens * self.top_k
        index = rng.permutation(routes + 3)[:routes].astype(np.int32)
        index[rng.random(routes) < 0.25] = rng.choice([-1, routes + 3])
        rows = self.rows(rng, 3, routes + 3, self.hidden)
        rows[np.setdiff1d(np.arange(routes + 3), index)] = np.nan  # never read
        arrays = {
            "allreduce_in": rows,
            "expanded_idx_to_permuted_idx": index.reshape(self.tokens, self.top_k),
        }
        if self.scale:
            scale = rng.choice([-1.0, 1.0, 2.0], (self.tokens, self.top_k))
            arrays["expert_scale_factor"] = reference.round_to(scale, self.scale)
        if (rank + self.top_k) % 2:
            arrays["shared_expert_output"] = self.rows(rng, 5, *row)
        return arrays

    def partial(self, arrays: dict[str, Array]) -> Array:
        """Return what a rank contributes, exactly."""
        given = list(arrays.values())
        if self.operation == "allreduce":
            return given[0].astype(np.float64)
        if self.operation == "moe_reduction":
            return reference.moe_reduction(
                given[0], given[1], arrays.get("moe_reduction_token_input")
            )
        return reference.moe_finalize(
            given[0],
            given[1],
            arrays.get("expert_scale_factor"),
            arrays.get("shared_expert_output"),
            self.numbers["routed_scaling_factor"],
        )

    def expected(self, options: Options, number: int, world_size: int) -> reference.Result:
        """Return the right outputs; sums of such integers are exact in FP32."""
        common = self.common(options, number)
        return reference.finish(
            [self.partial(self.own(options, number, rank)) for rank in range(world_size)],
            dtype=self.dtype,
            comm_dtype=self.comm_dtype,
            residual_in=common.get("residual_in"),
            rms_gamma=common.get("rms_gamma"),
            rms_eps=self.numbers["rms_eps"],
            weight_bias=self.numbers["weight_bias"],
        )


class Trial:
    """A launch on one rank: its arrays, what is put into them, what comes out."""

    def __init__(self, rank: Rank, workspace: Workspace, options: Options, spec: Spec) -> None:
        """Allocate."""
        self.rank, self.workspace, self.options, self.spec = rank, workspace, options, spec
        self.number = -1
        poison = np.full((spec.tokens, spec.hidden), np.nan, reference.numpy_dtype(spec.dtype))
        self.inputs = {name: rank.put(x) for name, x in self._inputs(0).items()}
        self.outputs = {name: rank.put(poison) for name in spec.outputs}
        self._poison = poison
        if spec.in_place:
            self.outputs["residual_out"] = self.inputs["residual_in"]
        self._shape = spec.launch_shape

    def _inputs(self, number: int) -> dict[str, Array]:
        own = self.spec.own(self.options, number, self.rank.index)
        return own | self.spec.common(self.options, number)

    def load(self, number: int) -> None:
        """Fill the arrays with the data of launch `number`, outputs with NaN."""
        self.number = number
        for array in self.outputs.values():
            self._copy(array, self._poison)
        for name, host in self._inputs(number).items():  # after the outputs: one may be in place
            self._copy(self.inputs[name], host)

    def _copy(self, array: Any, host: Array) -> None:
        if self.rank.on_gpu:
            array.set(np.ascontiguousarray(host).view(array.dtype), self.rank.stream)
        else:
            array[...] = host

    def launch(self) -> None:
        """Call the operation."""
        try:
            self._call(self._shape)
        except ArgumentError as error:  # on every rank alike: this shape does not fit these rows
            if self._shape is None or "launch_shape" not in str(error):
                raise
            self._shape = None
            self._call(None)

    def _call(self, shape: LaunchShape | None) -> None:
        spec = self.spec
        total = "moe_allreduce_out" if spec.operation == "moe_reduction" else "allreduce_out"
        FUNCTIONS[spec.operation](
            workspace=self.workspace,
            **self.inputs,
            **{total if name == "allreduce_out" else name: x for name, x in self.outputs.items()},
            dtype=spec.dtype,
            comm_dtype=spec.comm_dtype,
            **spec.numbers,
            **spec.launch,
            launch_shape=shape,
            stream=self.rank.stream,
        )

    def fault(self) -> str | None:
        """Compare the outputs with what is right; return what is wrong."""
        spec = self.spec
        right = spec.expected(self.options, self.number, self.rank.size)
        dtype = reference.numpy_dtype(spec.dtype)
        for name in spec.outputs:
            found = self.rank.get(self.outputs[name], dtype)
            far = reference.ulp_distance(found, getattr(right, name), spec.dtype)
            wrong = far > (NORM_ULPS[spec.dtype] if name == "norm_out" else 0)
            if wrong.any():
                token, column = np.argwhere(wrong)[0]
                return (
                    f"{name}[{token}, {column}] is {found[token, column]}, not "
                    f"{getattr(right, name)[token, column]}, and {wrong.sum()} are wrong; {spec}"
                )
        return None


class Comparison:
    """Compares what trials write, launch by launch, without waiting for a GPU."""

    def __init__(self, rank: Rank, trials: Sequence[Trial], launches: int) -> None:
        """Take what the trials hold now as right."""
        self._rank = rank
        self._right: dict[Trial, list[tuple[Any, Any]]] = {}
        for trial in trials:
            bits = [x.reshape(-1).view(f"u{x.itemsize}") for x in trial.outputs.values()]
            self._right[trial] = [(out, out.copy()) for out in bits]
        if rank.on_gpu:
            import cupy

            self._count = cupy.zeros(launches, cupy.uint32)
            self._kernel = cupy.ElementwiseKernel(
                "raw T right, T poison, int64 launch",
                "raw T out, raw uint32 count",
                "if (out[i] != right[i]) atomicAdd(&count[launch], 1u); out[i] = poison;",
                "stress_compare",
            )
        else:
            self._count = np.zeros(launches, np.uint32)

    def check(self, launch: int, trial: Trial) -> None:
        """Count wrong elements of a launch, and fill the outputs with NaN for the next."""
        for out, right in self._right[trial]:
            poison = out.dtype.type(np.iinfo(out.dtype).max)
            if self._rank.on_gpu:
                self._kernel(right, poison, launch, out, self._count, size=out.size)
            else:
                trial.workspace._backend.synchronize()
                self._count[launch] += np.count_nonzero(out != right)
                out[...] = poison

    def wrong(self) -> list[int]:
        """Return the launches with wrong elements."""
        count = self._count.get() if self._rank.on_gpu else self._count
        return [int(launch) for launch in np.flatnonzero(count)]


# ---- one rank ------------------------------------------------------------------------------------


class Stress:
    """The launches of one rank."""

    def __init__(self, group: Any, options: Options) -> None:
        """Take a group and what to do."""
        self.group = group
        self.options = options
        self.result = Result()
        self.number = 0
        self.begin = time.monotonic()
        self.timed_out: str | None = None

    def run(self) -> Result:
        """Run one rank."""
        options = self.options
        with self._workspace() as workspace:
            rank = Rank(self.group, workspace)
            self.result.backend = workspace.backend
            self.begin = time.monotonic()
            if options.kill is not None:
                self._until_killed(rank, workspace)
                workspace.close()
                self.group = self.group.without(options.kill)
                self._go_on()
                return self.result
            while True:
                go_on = self._block(rank, workspace, BLOCK) and self._time_left()
                go_on = go_on and not self.result.failures
                if not all(self.group.allgather(go_on)):
                    break
            self._say("calls")
            if rank.on_gpu and all(self.group.allgather(not self.result.failures)):
                self._on_gpu(rank, workspace)
            self.group.barrier()
        if self.timed_out:
            self.result.failures[self.number] = self.timed_out
        return self.result

    def _on_gpu(self, rank: Rank, workspace: Workspace) -> None:
        for launches, replays in GRAPHS:
            graph, trials = self._capture(rank, workspace, launches)
            for _ in range(replays):
                if not self._replay(rank, workspace, graph, trials):
                    return
            self._say(f"{replays} replays of a graph of {launches}")
        if self.options.repeats and all(self.group.allgather(not self.result.failures)):
            self._repeat(rank, workspace)
            self._say("queued")

    def _say(self, what: str) -> None:
        if self.group.Get_rank() == 0:
            seconds = time.monotonic() - self.begin
            print(f"{what}: {self.number} launches after {seconds:.0f} s", flush=True)

    def _workspace(self) -> Workspace:
        options = self.options
        backend = choose_backend(self.group)
        self.sizes = (256, 2048) if backend == "cuda" else (12, 512)
        row = 2 * self.sizes[1] * 4  # of 16-bit elements that travel as float32
        workspace = Workspace(
            self.group,
            max_token_num=self.sizes[0],
            hidden_dim=row // 4,
            dtype=DType.FLOAT32,
            max_oneshot_token_num=self.sizes[0],
            operations=[],
            backend=backend,
            timeout_s=options.timeout_s,
        )
        try:
            for dtype, comm_dtype in (DTYPES[name] for name in options.dtypes):
                workspace.prepare(dtype=dtype, comm_dtype=comm_dtype, operations=options.operations)
        except BaseException:
            workspace.close()
            raise
        return workspace

    def _time_left(self) -> bool:
        options = self.options
        late = options.seconds is not None and time.monotonic() > self.begin + options.seconds
        return not late and (options.launches is None or self.number < options.launches)

    def _block(self, rank: Rank, workspace: Workspace, count: int) -> bool:
        """Make launches and check them; return whether the workspace is whole."""
        options = self.options
        if options.launches is not None:
            count = min(count, options.launches - self.number)
        while count > 0:
            bunch = min(count, 1 + self.number % 8)
            numbers = range(self.number, self.number + bunch)
            trials = [
                Trial(rank, workspace, options, Spec.draw(options, self.sizes, number))
                for number in numbers
            ]
            for trial, number in zip(trials, numbers, strict=True):
                trial.load(number)
            rank.synchronize()
            try:
                for trial in trials:
                    self.result.late_s.append(self._delay(rank, workspace, trial.number))
                    trial.launch()
                workspace._backend.synchronize()
                workspace.check()
            except PeerTimeoutError as error:
                workspace._backend.synchronize()  # launches before it may still write to arrays
                self.timed_out = str(error)
                return False
            self._judge(trials)
            count -= bunch
        return True

    def _judge(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            fault = trial.fault()
            if fault:
                self.result.failures[trial.number] = fault
        self.number += len(trials)
        self.result.launches = self.number

    def _delay(self, rank: Rank, workspace: Workspace, number: int) -> float:
        """Come late at times, by the returned seconds; on the CPU backend, reorder threads."""
        rng = self.options.generator(3, number, rank.index)
        begin = time.monotonic()
        if rng.random() < 0.1:
            time.sleep(rng.random() * float(rng.choice([1e-3, 1e-3, 20e-3])))
        late = time.monotonic() - begin
        backend = workspace._backend
        if isinstance(backend, CpuBackend):
            backend.seed = int(rng.integers(1, 2**31))
            backend.resident_clusters = int(rng.choice([1, 1, 2]))
            backend.overlap = bool(rng.random() < 0.7) or self.options.programmatic
        if rng.random() < 0.5:  # points and microseconds; heeded by a test build only
            workspace._params.delays = int(rng.integers(32)) | int(rng.choice([5, 20, 200])) << 8
        else:
            workspace._params.delays = 0
        return late

    def _capture(
        self, rank: Rank, workspace: Workspace, launches: int
    ) -> tuple[Any, Sequence[Trial]]:
        """Capture launches in a CUDA graph."""
        trials = [
            Trial(rank, workspace, self.options, Spec.draw(self.options, SMALL, 0, index))
            for index in range(launches)
        ]
        for index, trial in enumerate(trials):
            # Once before the capture, which also settles the launch shape, and delays.
            self._delay(rank, workspace, index)
            trial.load(0)
            trial.launch()
        rank.meet()
        rank.stream.begin_capture()
        for trial in trials:
            trial.launch()
        graph = rank.stream.end_capture()
        graph.upload(rank.stream)
        rank.meet()
        return graph, trials

    def _replay(
        self, rank: Rank, workspace: Workspace, graph: Any, trials: Sequence[Trial]
    ) -> bool:
        """Replay with new data and check them; return whether the workspace is whole."""
        for number, trial in enumerate(trials, self.number):
            trial.load(number)
        late = self._delay(rank, workspace, self.number)
        self.result.late_s += [late] * len(trials)
        graph.launch(rank.stream)
        workspace._backend.synchronize()
        try:
            workspace.check()
        except PeerTimeoutError as error:
            self.timed_out = str(error)
            return False
        self._judge(trials)
        return True

    def _repeat(self, rank: Rank, workspace: Workspace) -> None:
        """Launch at random from a pool, comparing bits on the device."""
        options = self.options
        trials: list[Trial] = []
        key = 0
        while len(trials) < POOL:
            key += 1
            spec = Spec.draw(options, self.sizes, 1, key)
            if not spec.in_place:  # its input is gone after a launch
                trials.append(Trial(rank, workspace, options, spec))
        for number, trial in enumerate(trials, self.number):
            trial.load(number)
        for trial in trials:
            rank.meet()
            trial.launch()
        rank.meet()
        self.result.late_s += [0.0] * len(trials)
        self._judge(trials)
        if not all(self.group.allgather(not self.result.failures)):
            return
        comparison = Comparison(rank, trials, options.repeats + 1)
        for trial in trials:  # compiles, which nobody may do while a peer waits
            comparison.check(options.repeats, trial)
        rank.meet()
        order = options.generator(5).integers(POOL, size=options.repeats).tolist()
        for launch, index in enumerate(order):
            if launch % QUEUED == 0:
                rank.synchronize()
                late = self._delay(rank, workspace, self.number + launch)
                if workspace._backend.record.valid:
                    break
            self.result.late_s.append(late)
            trials[index].launch()
            comparison.check(launch, trials[index])
        rank.synchronize()
        try:
            workspace.check()
        except PeerTimeoutError as error:
            self.timed_out = str(error)
            return
        for launch in comparison.wrong():
            which = trials[order[launch]].spec if launch < options.repeats else "one of the pool"
            self.result.failures[self.number + launch] = f"bits changed; {which}"
        self.number += options.repeats
        self.result.launches = self.number

    # ---- a killed rank ---------------------------------------------------------------------------

    def _until_killed(self, rank: Rank, workspace: Workspace) -> None:
        """Launch until a peer is missed; the rank to be killed does not return from here."""
        options = self.options
        rng = options.generator(4)
        within = rng.uniform(0.1, 0.9) * (options.seconds or 5.0)
        step: Callable[[], bool] = lambda: self._block(rank, workspace, 1)  # noqa: E731
        if rank.on_gpu and rng.random() < 0.5:
            graph, trials = self._capture(rank, workspace, GRAPHS[0][0])
            step = lambda: self._replay(rank, workspace, graph, trials)  # noqa: E731
        self.group.barrier()
        if rank.index == options.kill:
            threading.Timer(within, os.kill, (os.getpid(), signal.SIGKILL)).start()
        deadline = time.monotonic() + within + options.timeout_s + 10 * SLACK_S
        while time.monotonic() < deadline:
            # Together, lest a rank that is slow by itself be missed before the one that is dead.
            with contextlib.suppress(ConnectionError):
                self.group.barrier()
            begin = time.monotonic()
            if step():
                continue
            seconds = time.monotonic() - begin
            told, self.timed_out = str(self.timed_out), None
            if f"in vain for rank {options.kill} " not in told:
                self.result.failures[-1] = f"blames the wrong rank: {told}"
            elif seconds > options.timeout_s + SLACK_S:
                self.result.failures[-1] = f"raised after {seconds:.1f} s"
            return
        self.result.failures[-1] = f"did not notice that rank {options.kill} was killed"

    def _go_on(self) -> None:
        """Use a new workspace with the ranks that are left."""
        with self._workspace() as workspace:
            self._block(Rank(self.group, workspace), workspace, 2 * BLOCK)
            self.group.barrier()


def stress(group: Any, options: Options) -> Result:
    """Run one rank."""
    return Stress(group, options).run()


# ---- how late ranks were -------------------------------------------------------------------------

EDGES_S = (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def record(results: Sequence[Result], file: Path) -> None:
    """Add to a file how many launches ranks entered how far apart."""
    rows = json.loads(file.read_text()) if file.exists() else []
    late = np.array([result.late_s for result in results])
    apart = np.clip(late.max(axis=0) - late.min(axis=0), 0, EDGES_S[-1])
    counts, _ = np.histogram(apart, EDGES_S)
    wrong = len({number for result in results for number in result.failures})
    row = {"world": len(results), "backend": results[0].backend, "wrong": wrong}
    row |= {"apart_s": EDGES_S, "launches": counts.tolist()}
    file.write_text("[\n" + ",\n".join(map(json.dumps, [*rows, row])) + "\n]\n")


def plot(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw launches over how far apart ranks entered them."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        where = np.arange(len(row["launches"])) + (index - (len(rows) - 1) / 2) * width
        told = f"{row['world']} ranks, {row['backend']}: {sum(row['launches']):,} launches"
        axis.bar(where, row["launches"], width, label=f"{told}, {row['wrong']} wrong")
    edges = [f"{1e3 * x:g}" for x in rows[0]["apart_s"]]
    axis.set_xticks(range(len(edges) - 1), map("{} to {}".format, edges, edges[1:]))
    axis.set_yscale("log")
    axis.set_xlabel("ms between the first and the last rank's coming")
    axis.set_ylabel("launches")
    axis.grid(True, axis="y", alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    axis.set_title("Launches under skew", fontsize=10)
    figure.savefig(png, dpi=130)
    pyplot.close(figure)


# ---- all ranks -----------------------------------------------------------------------------------


def judge(results: Sequence[Result | str]) -> int:
    """Print what was found; return the exit status.

    Args:
        results: Of each rank; or how it ended, where it should not have.
    """
    failures: dict[Any, str] = {}
    launches = 0
    for rank, result in enumerate(results):
        if isinstance(result, str):
            failures[f"rank {rank}"] = f"rank {rank}: {result}"
            continue
        launches = max(launches, result.launches)
        for number, words in result.failures.items():
            key = number if number >= 0 else f"rank {rank}"
            failures.setdefault(key, f"launch {number}, rank {rank}: {words}")
    for words in list(failures.values())[:5]:
        print(words)
    failed_launches = sum(isinstance(key, int) for key in failures)
    print(f"{launches - failed_launches} passed, {len(failures)} failed", flush=True)
    return 1 if failures or not launches else 0


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, help="ranks to start; default: mpirun's")
    parser.add_argument("--launches", type=positive, help="default: as many as the time allows")
    parser.add_argument("--seconds", type=float, help="default: 10 without --launches")
    parser.add_argument("--seed", type=int, help="default: a new one; it is printed")
    parser.add_argument("--kill", type=int, metavar="RANK", help="only with --ranks")
    parser.add_argument("--repeats", type=int, default=100_000, help="on GPUs; default: 100,000")
    parser.add_argument("--delays", action="store_true", help="also inside the kernels")
    parser.add_argument("--operations", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--record", type=Path, metavar="JSON", help="only with --ranks")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    return parser


def main() -> None:
    """Run the script."""
    parser = arguments()
    given = parse(parser)
    if given.plot:
        plot(json.loads(given.plot[0].read_text()), given.plot[1])
        return
    if given.record and not given.ranks:
        parser.error("--record takes --ranks")
    if given.kill is not None and not 0 <= given.kill < (given.ranks or 0):
        parser.error("--kill must name one of the ranks that --ranks starts")
    if given.delays:
        os.environ["MOE_AR_DELAYS"] = "1"  # before anything is compiled, and for spawned ranks
    seconds = given.seconds
    if seconds is None and given.launches is None:
        seconds = 10.0
    options = Options(
        seed=secrets.randbits(31) if given.seed is None else given.seed,
        launches=None if given.kill is not None else given.launches,
        seconds=seconds,
        kill=given.kill,
        operations=tuple(given.operations),
        dtypes=tuple(given.dtypes),
        timeout_s=30.0 if given.kill is None else 2.0,
        repeats=given.repeats,
    )
    if given.ranks is None:
        start(lambda group: _on_mpi(group, options), None)
    print(f"seed {options.seed}, {given.ranks} ranks", flush=True)
    outcomes = spawn_ranks(given.ranks, stress, options, timeout_s=(seconds or 3600.0) + 600.0)
    results: list[Result | str] = []
    for rank, outcome in enumerate(outcomes):
        if rank != options.kill:
            results.append(outcome.value if outcome.error is None else outcome.error)
        elif outcome.exitcode != -signal.SIGKILL:
            results.append(f"was to be killed, but: {outcome.error}, {outcome.exitcode}")
        else:
            results.append(Result())
    status = judge(results)
    whole = [result for result in results if isinstance(result, Result)]
    lengths = {len(result.late_s) for result in whole}
    if given.record and given.kill is None and len(whole) == given.ranks and len(lengths) == 1:
        record(whole, given.record)
    sys.exit(status)


def _on_mpi(group: Any, options: Options) -> int:
    options = group.bcast(options)  # the seed is rank 0's
    if group.Get_rank() == 0:
        print(f"seed {options.seed}, {group.Get_size()} ranks", flush=True)
    results = group.allgather(stress(group, options))
    return judge(results) if group.Get_rank() == 0 else 0


if __name__ == "__main__":
    main()
