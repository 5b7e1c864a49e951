"""Random calls on the CPU backend, right ones and wrong ones, drawn by hypothesis.

    python scripts/fuzz.py --calls 2000 [--ranks R] [--seed X]

A right call may have any shape, dtype, alignment, aliasing, options and indices that the contract
allows: its outputs must be right, and nothing else may be written. A wrong one has one or two
faults, on every rank or, with `MOE_AR_CHECK`, on one: every rank must raise an `ArgumentError` that
names the argument, and write nothing. After each the workspace must be as it was, and a small call
must be right.

Every array ends where its memory does, so that AddressSanitizer sees an access beyond it;
tests/test_fuzz.py runs this so.

The last line is `N calls tried: N right, N rejected, N failed`. Exit status 0: none failed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import secrets
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import _checkout  # noqa: F401
import hypothesis
import ml_dtypes
import numpy as np
from _calls import CALLED, make
from _ranks import parse, positive
from hypothesis import strategies as st
from numpy.typing import NDArray
from stress import OUTPUTS, Options, Spec

from cupy_moe_ar import (
    ArgumentError,
    DType,
    LaunchShape,
    PeerTimeoutError,
    Workspace,
    WorkspaceError,
    abi,
    reference,
)
from cupy_moe_ar.compile import OPERATIONS
from cupy_moe_ar.group import Group
from cupy_moe_ar.plan import launch_shapes
from cupy_moe_ar.selfcheck import DTYPES, NORM_ULPS
from cupy_moe_ar.testing import run_ranks

__all__ = ["Call", "Fuzz", "calls"]

Array = NDArray[Any]

PREPARED = {  # what the workspaces can do; all else is a WorkspaceError
    "bfloat16": tuple(OPERATIONS),
    "float16/float32": ("allreduce",),
    "float32": ("moe_finalize",),
}
TOKENS, HIDDEN = 6, 264  # of bfloat16: the capacity
SIZED_BY = {  # arrays that other shapes are compared with
    "allreduce_in",
    "allgather_in",
    "allgather_out",
    "expanded_idx_to_permuted_idx",
    "moe_reduction_active_experts_token_input",
}
IN_PLACE = {  # inputs that an output may be
    "moe_finalize": ("residual_in", "shared_expert_output"),
    "moe_reduction": ("residual_in", "moe_reduction_token_input"),
    "allreduce": ("residual_in", "allreduce_in"),
    "allgather": ("residual_in",),
}
OPTIONAL = {"residual_in", "shared_expert_output", "expert_scale_factor", "rms_gamma",
            "moe_reduction_token_input"}  # fmt: skip
WILD = np.array([-(2**31), -7, -1, 2**31 - 1, 2**31 - 8], np.int32)  # rows that are nobody's
CANARY = Spec("allreduce", 2, 64, DType.BFLOAT16, DType.BFLOAT16, 1, None, DType.BFLOAT16, True,
              False, OUTPUTS, {"weight_bias": 0.0, "rms_eps": 1e-5}, {}, None)  # fmt: skip


# ---- wrong arguments -----------------------------------------------------------------------------
# A fault changes the arguments of a rank and returns words one of which the error must have; None
# where it cannot be planted here. `rng` draws the same for every rank.

Arguments = dict[str, Any]
Fault = Callable[[Arguments, str, "Call", np.random.Generator], tuple[str, ...] | None]


def wrong_dtype(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """Elements of a type that no argument of the call has."""
    other = np.float16 if call.spec.dtype is not DType.FLOAT16 else ml_dtypes.bfloat16
    kinds = (np.float64, np.int64, np.uint64, np.complex64, np.bool_, np.int8, other)
    args[name] = np.zeros(args[name].shape, kinds[rng.integers(len(kinds))])
    return (name,)


def wrong_length(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """A dimension that is longer or shorter than those it is compared with."""
    if name in SIZED_BY or (call.spec.operation == "allgather" and name in OUTPUTS):
        return None
    shape = list(args[name].shape)
    axis = int(rng.integers(len(shape)))
    shape[axis] += 1 if shape[axis] == 0 or rng.random() < 0.5 else -1
    args[name] = np.zeros(shape, args[name].dtype)
    return (name,)


def wrong_rank(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """A dimension too many or too few."""
    flat = rng.random() < 0.5 and args[name].ndim > 1
    args[name] = args[name].reshape(-1) if flat else args[name][None]
    return (name,)


def gaps(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """Elements that do not lie in C order without gaps."""
    array = args[name]
    axis = int(rng.integers(array.ndim))
    if array.size == 0 or array.shape[axis] < 2:
        return None
    wide = np.repeat(array, 2, axis)
    step = [slice(None)] * array.ndim
    step[axis] = slice(None, None, 2)
    views = [
        wide[tuple(step)],
        np.flip(array, axis),
        np.broadcast_to(np.take(array, [0], axis), array.shape),
    ]
    args[name] = views[rng.integers(3)]
    return (name,)


def misaligned(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """A first element off the boundary that the kernels need."""
    array = args[name]
    needed = array.itemsize if name in ("expanded_idx_to_permuted_idx", "expert_scale_factor",
                                        "moe_reduction_scale_input") else 16  # fmt: skip
    if array.size == 0 or call.spec.tokens == 0:
        return None
    args[name] = placed(array, int(rng.integers(1, needed)) + needed * int(rng.integers(2)))
    return (name,)


def overlapping(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """An output that begins inside another argument."""
    out = call.outputs[rng.integers(len(call.outputs))]
    other, array = args[name], args[out]
    if out == name or 0 in (other.size, array.size) or other.nbytes <= 16:
        return None
    shift = 16 * int(rng.integers(1, -(-other.nbytes // 16)))
    memory = np.zeros(shift + max(other.nbytes, array.nbytes), np.uint8)
    args[name] = np.ndarray(other.shape, other.dtype, memory.data)
    args[out] = np.ndarray(array.shape, array.dtype, memory.data, shift)
    return (f"{out} must", f"{name} and {out} must", f"{name} must")


def read_only(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """An output that may not be written."""
    out = call.outputs[rng.integers(len(call.outputs))]
    if args[out].size == 0 or call.spec.tokens == 0:
        return None
    args[out] = args[out].view()
    args[out].flags.writeable = False
    return (f"{out} must be writable",)


def elsewhere(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """An array on a GPU."""
    kind = {2: "<u2", 4: "<f4"}[args[name].itemsize]
    kind = "<i4" if args[name].dtype == np.int32 else kind
    place = {"shape": args[name].shape, "typestr": kind, "version": 3, "data": (1 << 20, False)}
    args[name] = SimpleNamespace(__cuda_array_interface__=place)
    return (name,)


def no_array(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """Something that is no array."""
    things = [[[1.0]], "x", b"", 3, 0.5, object(), {}, np.float32(1), SimpleNamespace(shape=(1,))]
    if name not in OPTIONAL and name not in call.outputs:
        things.append(None)
    args[name] = things[rng.integers(len(things))]
    return (name,)


def no_number(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """A number that is none, or not finite as float32, or negative where it must not be."""
    names = [n for n in ("rms_eps", "routed_scaling_factor", "weight_bias") if n in args]
    if not names:
        return None
    name = names[rng.integers(len(names))]
    things = [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "two", None, [1.0], 1j,
              object(), np.ones(2)]  # fmt: skip
    args[name] = -1e-6 if name == "rms_eps" and rng.random() < 0.3 else things[rng.integers(11)]
    return (name,)


def no_option(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """An option that does not exist."""
    other = "float16" if call.spec.dtype is not DType.FLOAT16 else "bfloat16"
    things: dict[str, list[Any]] = {
        "dtype": ["int32", "float8", "", 7, object(), ["bfloat16"], np.float64],
        "comm_dtype": [other, "int32", "float64", 7, []],
        "use_oneshot": ["no", 2, [], object(), np.ones(2)],
        "launch_shape": ["row", 5, [], LaunchShape(16, 32, "rows"), LaunchShape(1, 33, "row")],
        "stream": ["fast", object(), 7, -1],
    }
    name = list(things)[rng.integers(len(things))]
    if name not in args and name not in ("launch_shape", "stream"):
        return None
    if name in ("launch_shape", "stream"):  # looked at after all else, and after the ranks agreed
        if call.faulty_rank is not None or not call.prepared:
            return None
        if name == "launch_shape" and call.spec.tokens == 0:
            return None
    args[name] = things[name][rng.integers(len(things[name]))]
    return ("dtype",) if name.endswith("dtype") else (name,)


def missing(args: Arguments, name: str, call: Call, rng: np.random.Generator) -> Any:
    """No output, or no gamma for the norm."""
    if {"norm_out", "rms_gamma"} <= args.keys() and rng.random() < 0.5:
        del args["rms_gamma"]
        return ("norm_out needs rms_gamma",)
    for out in call.outputs:
        args[out] = None
    return (call.outputs[0], "at least one of")


FAULTS: dict[str, Fault] = {
    function.__name__: function
    for function in (wrong_dtype, wrong_length, wrong_rank, gaps, misaligned, overlapping,
                     read_only, elsewhere, no_array, no_number, no_option, missing)
}  # fmt: skip


# ---- calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What hypothesis has drawn.

    Attributes:
        spec: Operation, shapes, dtypes and options.
        number: Of the payload.
        faults: Seeds, each of a fault.
        faulty_rank: None: all ranks. Else the peers learn of the faults by `MOE_AR_CHECK`.
        checked: Whether the call is made with `MOE_AR_CHECK`.
        offsets: Of the arrays in turn, in 16 bytes.
        aliases: For outputs in turn whether each shares the memory of an input.
        twice: Whether to call again with the same arrays.
    """

    spec: Spec
    number: int
    faults: tuple[int, ...]
    faulty_rank: int | None
    checked: bool
    offsets: tuple[int, ...]
    aliases: tuple[bool, ...]
    twice: bool

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        operation = self.spec.operation
        if operation.endswith("reduce_scatter"):
            return ("reduce_scatter_out",)
        names = {"moe_reduction": "moe_allreduce_out", "allgather": "allgather_out"}
        total = names.get(operation, "allreduce_out")
        return tuple(total if name == "allreduce_out" else name for name in self.spec.outputs)

    @property
    def prepared(self) -> bool:
        """Whether the workspaces can do it."""
        spec = self.spec
        return spec.tokens == 0 or any(
            DTYPES[name] == (spec.dtype, spec.comm_dtype) and spec.operation in operations
            for name, operations in PREPARED.items()
        )


@st.composite
def calls(draw: Any, ranks: int) -> Call:
    """Draw a call."""
    operation = draw(st.sampled_from(sorted(CALLED)))
    prepared = [name for name, operations in PREPARED.items() if operation in operations]
    any_dtype = draw(st.integers(0, 9)) == 9
    dtype, comm_dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES) if any_dtype else prepared))]
    if operation == "allgather":
        comm_dtype = dtype
    lanes = 16 // dtype.itemsize
    most = TOKENS * HIDDEN * 2 // 16  # wire vectors of a call
    vectors = draw(st.sampled_from([1, 2, 8, 31, 32, 33]) | st.integers(1, 33))
    wire_vectors = vectors * comm_dtype.itemsize // dtype.itemsize
    tokens = draw(st.integers(0, most // wire_vectors).map(lambda n: min(n, 9)))
    hidden, kind = vectors * lanes, draw(st.integers(0, 19))
    if kind == 18:
        tokens = most // wire_vectors + draw(st.integers(1, 4))
    elif kind == 19:
        hidden += draw(st.integers(1, lanes - 1))
    outputs = tuple(draw(st.sets(st.sampled_from(OUTPUTS), min_size=1)))
    shapes = launch_shapes(vectors)
    whole = "twoshot" in OPERATIONS[operation]
    spec = Spec(
        operation,
        tokens=tokens,
        hidden=hidden,
        dtype=dtype,
        comm_dtype=comm_dtype,
        top_k=draw(st.integers(1, 10)),
        scale=draw(st.sampled_from([None, DType.FLOAT32, dtype])),
        gamma=draw(st.sampled_from([DType.FLOAT32, dtype])),
        residual=draw(st.booleans()),
        in_place=False,
        outputs=tuple(name for name in OUTPUTS if name in outputs),
        numbers={
            "weight_bias": draw(st.sampled_from([0.0, 1.0])),
            "rms_eps": draw(st.sampled_from([0.1, 1e-5])),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.0, 0.5, -1.0])),
        },
        launch={
            "launch_with_pdl": draw(st.booleans()),
            "trigger_completion_at_end": draw(st.sampled_from([None, True, False])),
            **({"use_oneshot": draw(st.sampled_from([None, True, False]))} if whole else {}),
        },
        launch_shape=draw(st.sampled_from([None, *shapes])),
    )
    checked = draw(st.integers(0, 3)) == 3
    return Call(
        spec,
        number=draw(st.integers(0, 2**31)),
        faults=tuple(draw(st.lists(st.integers(0, 2**31), max_size=2))),
        faulty_rank=draw(st.sampled_from([None, *range(ranks)])) if checked else None,
        checked=checked,
        offsets=draw(st.tuples(*[st.sampled_from([0, 0, 1, 3])] * 8)),
        aliases=draw(st.tuples(*[st.sampled_from([False, False, True])] * 3)),
        twice=draw(st.booleans()),
    )


def placed(array: Array, offset: int) -> Array:
    """Copy an array to `offset` bytes behind the beginning of memory that ends with it."""
    memory = np.zeros(offset + array.nbytes, np.uint8)
    memory[offset:] = np.frombuffer(array.tobytes(), np.uint8)
    return np.ndarray(array.shape, array.dtype, memory.data, offset)


class Side:
    """A call on one rank: its arguments, and what they must hold when it is over."""

    def __init__(self, call: Call, rank: int, size: int) -> None:
        """Make a right call."""
        spec = call.spec
        made = make(spec, Options(seed=1), call.number, rank, size)
        offsets = iter(call.offsets * 2)
        inputs = {name: placed(x, 16 * next(offsets)) for name, x in made.inputs.items()}
        self.in_check = True  # what MOE_AR_CHECK asks of indices
        index = inputs.get("expanded_idx_to_permuted_idx")
        if index is not None:
            rows = len(inputs["allreduce_in"])
            if call.number % 3 == 0:
                absent = (index < 0) | (index >= rows)
                index[absent] = np.resize(WILD, absent.sum())
            elif call.number % 3 == 1:
                index[index >= rows] = -1
            self.in_check = bool(((index >= -1) & (index < rows)).all())
        free = [name for name in IN_PLACE.get(spec.operation, ()) if name in inputs]
        self.args: Arguments = {**inputs, **made.options}
        self.right = {name: x.copy() for name, x in inputs.items()}
        for (name, x), alias in zip(made.outputs.items(), call.aliases, strict=False):
            if alias and free:
                other = free.pop()
                self.args[name] = inputs[other]
                del self.right[other]
            else:
                poison = np.full(x.shape, np.nan, x.dtype)
                self.args[name] = placed(poison, 16 * next(offsets))
        self.outputs = made.outputs
        self.before = self.copies()

    def copies(self) -> dict[str, bytes]:
        """Copy all arrays."""
        return {name: x.tobytes() for name, x in self.args.items() if isinstance(x, np.ndarray)}

    def judge(self, dtype: DType) -> None:
        """Check what a right call has left."""
        for name, x in self.right.items():
            assert self.args[name].tobytes() == x.tobytes(), f"{name} was written"
        for name, x in self.outputs.items():
            far = reference.ulp_distance(self.args[name], x, dtype)
            most = NORM_ULPS[dtype] if name == "norm_out" else 0
            assert (far <= most).all(), f"{name} is wrong by {far.max()} ulp"


# ---- trying them ---------------------------------------------------------------------------------


class Fuzz:
    """Workspaces of all ranks, and counts of what was tried with them."""

    def __init__(self, ranks: int) -> None:
        """Build two sets of workspaces, the second under `MOE_AR_CHECK`."""
        self.ranks = ranks
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.workspaces = [self._build(False), self._build(True)]

    def _build(self, checked: bool) -> list[Workspace]:
        before = os.environ.get("MOE_AR_CHECK")
        os.environ["MOE_AR_CHECK"] = str(int(checked))

        def build(group: Any) -> Workspace:
            workspace = Workspace(
                group,
                max_token_num=TOKENS,
                hidden_dim=HIDDEN,
                operations=[],
                backend="cpu",
                timeout_s=10.0,
            )
            for name, operations in PREPARED.items():
                dtype, comm_dtype = DTYPES[name]
                workspace.prepare(dtype=dtype, comm_dtype=comm_dtype, operations=operations)
            return workspace

        try:
            return run_ranks(self.ranks, build)
        finally:
            del os.environ["MOE_AR_CHECK"]
            if before is not None:
                os.environ["MOE_AR_CHECK"] = before

    def try_call(self, call: Call) -> None:
        """Make a call on every rank and check what becomes of it."""
        spec = call.spec
        sides = [Side(call, rank, self.ranks) for rank in range(self.ranks)]
        words = self._wrong(call, sides)
        launches = self._launches(call.checked)
        errors = self._run(call, sides)
        if words is None:
            for side, error in zip(sides, errors, strict=True):
                assert error is None, f"a right call raises {error!r}"
                side.judge(spec.dtype)
            if call.twice and not any(call.aliases) and spec.tokens:  # is not checked again
                assert self._run(call, sides) == [None] * self.ranks
                for side in sides:
                    side.judge(spec.dtype)
                launches += 1
            launches += spec.tokens > 0
            self.counts["right"] += 1
        else:
            kind = WorkspaceError if words == ("is not prepared",) else ArgumentError
            for side, error in zip(sides, errors, strict=True):
                assert type(error) is kind, f"a wrong call ({words}) raises {error!r}"
                named = any(word in str(error) for word in words)
                assert named, f"none of {words} is named: {error}"
                assert side.copies() == side.before, "a wrong call has written"
            self.counts["rejected"] += 1
        self._judge_state(call.checked, launches)
        canary = replace(call, spec=CANARY, faults=(), aliases=(False,) * 3, checked=call.checked)
        sides = [Side(canary, rank, self.ranks) for rank in range(self.ranks)]
        assert self._run(canary, sides) == [None] * self.ranks
        for side in sides:
            side.judge(CANARY.dtype)
        self._judge_state(call.checked, launches + 1)

    def _wrong(self, call: Call, sides: list[Side]) -> tuple[str, ...] | None:
        """Plant the faults; return words of the error that must come, None if none must."""
        spec = call.spec
        words: tuple[str, ...] = ()
        touched: set[str] = set()
        for seed in call.faults:
            told = []
            planted = [dict(side.args) for side in sides]
            common = sorted(set.intersection(*({n for n, x in args.items()
                                                if isinstance(x, np.ndarray)}
                                               for args in planted)))  # fmt: skip
            outputs = set(call.outputs)
            if not common or not outputs <= set(common):  # the fault before has taken them
                continue
            rng = np.random.default_rng(seed)
            fault = list(FAULTS)[rng.integers(len(FAULTS))]
            name = common[rng.integers(len(common))]
            for rank, args in enumerate(planted):
                if call.faulty_rank in (None, rank):
                    told.append(FAULTS[fault](args, name, call, np.random.default_rng([seed, 1])))
            changed = {n for side, args in zip(sides, planted, strict=True)
                       for n in {**side.args, **args}
                       if side.args.get(n, call) is not args.get(n, call)}  # fmt: skip
            # A fault could undo another.
            if told[0] is not None and None not in told and not changed & touched:
                touched |= changed
                self.faults[fault] += 1
                words += tuple(told[0])
                for side, args in zip(sides, planted, strict=True):
                    side.args = args
                    side.before = side.copies()
        lanes = 16 // spec.dtype.itemsize
        if spec.hidden % lanes or spec.tokens * spec.hidden * spec.comm_dtype.itemsize > (
            TOKENS * HIDDEN * 2
        ):
            self.faults["size"] += 1
            words += ("hidden_dim must be", "capacity")
        if call.checked and not all(side.in_check for side in sides):
            self.faults["indices"] += 1
            words += ("expanded_idx_to_permuted_idx must hold",)
        if words:
            return words
        self.faults["unprepared"] += not call.prepared
        return None if call.prepared else ("is not prepared",)

    def _run(self, call: Call, sides: list[Side]) -> list[Exception | None]:
        """Call on every rank; return what each raised."""

        def body(group: Any) -> Exception | None:
            rank = group.Get_rank()
            workspace = self.workspaces[call.checked][rank]
            backend: Any = workspace._backend
            backend.seed = call.number % 4 and call.number + rank
            try:
                CALLED[call.spec.operation](workspace=workspace, **sides[rank].args)
                workspace.check()
            except PeerTimeoutError as error:  # no workspace is of use any more
                raise SystemExit(f"{error}\n{call}") from error
            except Exception as error:
                return error
            return None

        return run_ranks(self.ranks, body)

    def _control(self, checked: bool) -> Iterator[tuple[Workspace, abi.ControlBlock]]:
        for workspace in self.workspaces[checked]:
            data = workspace._backend.read(
                workspace._params.control, ctypes.sizeof(abi.ControlBlock)
            )
            yield workspace, abi.ControlBlock.from_buffer_copy(data)

    def _launches(self, checked: bool) -> int:
        return int(next(self._control(checked))[1].launches)

    def _judge_state(self, checked: bool, launches: int) -> None:
        """Check that the launches before have left every slot empty and all else in order."""
        for workspace, state in self._control(checked):
            begin = workspace._memory.slab.pointer + abi.SLAB_HEADER_BYTES
            size = workspace.nbytes - abi.SLAB_HEADER_BYTES
            words = np.frombuffer(workspace._backend.read(begin, size), np.uint32)
            assert (words == abi.SENTINEL).all(), "a slot is not empty"
            assert state.launches == launches, (state.launches, launches)
            assert set(state.epoch) == {launches % 2}
            assert state.broken == 0

    def run(self, count: int, seed: int) -> int:
        """Try `count` calls; print what was found and return the exit status."""

        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
            report_multiple_bugs=False,
        )
        @hypothesis.seed(seed)
        @hypothesis.given(calls(self.ranks))
        def every_call(call: Call) -> None:
            self.try_call(call)

        failed = 0
        try:
            every_call()
        except AssertionError:
            failed = 1  # hypothesis has stopped there
            traceback.print_exc(limit=-3, file=sys.stdout)
        right, rejected = self.counts["right"], self.counts["rejected"]
        tried = right + rejected + failed
        print("faults:", ", ".join(f"{n} {name}" for name, n in sorted(self.faults.items())))
        print(
            f"{tried} calls tried: {right} right, {rejected} rejected, {failed} failed", flush=True
        )
        return failed

    def close(self) -> None:
        """Close the workspaces."""
        for workspaces in self.workspaces:
            run_ranks(self.ranks, functools.partial(_close, workspaces))


def _close(workspaces: Sequence[Workspace], group: Group) -> None:
    workspaces[group.Get_rank()].close()


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=positive, default=2000)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--seed", type=int, help="default: a new one; it is printed")
    given = parse(parser)
    seed = secrets.randbits(31) if given.seed is None else given.seed
    print(f"seed {seed}, {given.ranks} ranks", flush=True)
    fuzz = Fuzz(given.ranks)
    status = fuzz.run(given.calls, seed)
    fuzz.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
