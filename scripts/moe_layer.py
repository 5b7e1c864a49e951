"""A small MoE layer in NumPy or CuPy whose end is done twice: step by step, and by one launch.

    mpirun -n 2 python scripts/moe_layer.py            a rank a process
    python scripts/moe_layer.py --in-process 2         a rank a thread

Tensor parallel: every rank has the router, a slice of each expert and a slice of the shared expert.
Router, permutation and expert GEMMs are plain array code. The end of the layer is

    step by step   gather and weigh the rows, add the shared expert; sum over ranks by NCCL, or
                   without it over the host; add the residual; RMSNorm
    fused          moe_finalize_allreduce_fusion

Both are compared with float64. Exit status 0: the fused end is right, and the same on all ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from _baselines import connect_nccl
from _ranks import Rank, choose_backend, parse, positive, start, table

from cupy_moe_ar import DType, Workspace, moe_finalize_allreduce_fusion, reference
from cupy_moe_ar.group import Group

EPS = 1e-6
FACTOR = 2.5
SLACK = {DType.FLOAT32: 2.0}  # of the step-by-step end's mean error; else 1.05
LAUNCHES = 20

Arrays = dict[str, Any]


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--hidden", type=positive, help="default: 7168 on GPUs, else 512")
    parser.add_argument("--intermediate", type=positive, help="default: 512 on GPUs, else 128")
    parser.add_argument("--experts", type=positive, default=16)
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--in-process", type=positive, metavar="RANKS", help="ranks as threads")
    return parser


@dataclass(frozen=True)
class Expert:
    """One rank's slice of a gated feed-forward network: hidden -> intermediate -> hidden."""

    gate: Any
    up: Any
    down: Any

    def __call__(self, xp: Any, x: Any) -> Any:
        """Return this rank's partial of its output."""
        gate = x @ self.gate
        return (gate / (1 + xp.exp(-gate)) * (x @ self.up)) @ self.down


class Layer:
    """One rank of the layer, up to its end.

    Arithmetic is float32; what a model would store between its kernels is rounded to its dtype.
    """

    def __init__(self, rank: Rank, xp: Any, options: argparse.Namespace) -> None:
        """Draw the weights: the router is the same on every rank, slices are a rank's own."""
        self.xp, self.top_k = xp, options.top_k
        self.dtype = reference.numpy_dtype(DType.parse(options.dtype))
        hidden, width = options.hidden, max(1, options.intermediate // rank.size)
        replicated, own = np.random.default_rng(1), np.random.default_rng([2, rank.index])

        def weights(rng: np.random.Generator, *shape: int) -> Any:
            drawn = rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
            return xp.asarray(drawn)

        def expert() -> Expert:
            return Expert(
                weights(own, hidden, width),
                weights(own, hidden, width),
                weights(own, width, hidden) / rank.size**0.5,
            )

        self.router = weights(replicated, hidden, options.experts)
        self.experts = [expert() for _ in range(options.experts)]
        self.shared = expert()
        gamma = 1 + 0.1 * replicated.standard_normal(hidden)
        self.gamma = xp.asarray(gamma.astype(np.float32))

    def __call__(self, x: Any) -> Arrays:
        """Return what the layer's end is given, by the operation's argument names."""
        xp = self.xp
        logits = x @ self.router
        chosen = xp.argsort(-logits, axis=1)[:, : self.top_k]
        weights = xp.exp(xp.take_along_axis(logits, chosen, axis=1))
        weights /= weights.sum(axis=1, keepdims=True)

        routes = chosen.ravel()
        order = xp.argsort(routes)  # rows of one expert lie together
        index = xp.empty(len(routes), np.int32)
        index[order] = xp.arange(len(routes), dtype=np.int32)
        permuted = x[order // self.top_k]
        counts = xp.bincount(routes, minlength=len(self.experts)).tolist()
        rows = xp.empty(permuted.shape, self.dtype)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                rows[part] = expert(xp, permuted[part]).astype(self.dtype)
                first += count
        return {
            "allreduce_in": rows,
            "expanded_idx_to_permuted_idx": index.reshape(chosen.shape),
            "expert_scale_factor": weights.astype(np.float32),
            "shared_expert_output": self.shared(xp, x).astype(self.dtype),
            "rms_gamma": self.gamma,
        }


class StepByStep:
    """The end of the layer without this library."""

    def __init__(self, rank: Rank, xp: Any, dtype: DType) -> None:
        """Look for NCCL; collective."""
        self._rank, self._xp, self._dtype = rank, xp, reference.numpy_dtype(dtype)
        self._nccl: Any = None
        self.how = "NumPy over the host"
        if xp is not np:
            try:
                self._nccl, self._type, self._sum = connect_nccl(rank, dtype)
                self.how = "NCCL"
            except RuntimeError as reason:
                self.how = f"NumPy over the host ({reason})"

    def __call__(self, given: Arrays, residual_in: Any) -> tuple[Any, Any]:
        """Return the residual and its norm."""
        xp, T = self._xp, self._dtype
        rows = given["allreduce_in"][given["expanded_idx_to_permuted_idx"]].astype(np.float32)
        routed = (rows * given["expert_scale_factor"][:, :, None]).sum(axis=1)
        shared = given["shared_expert_output"].astype(np.float32)
        total = self._sum_over_ranks((FACTOR * routed + shared).astype(T))
        residual = (total.astype(np.float32) + residual_in.astype(np.float32)).astype(T)
        wide = residual.astype(np.float32)
        root = xp.sqrt((wide * wide).mean(axis=1, keepdims=True) + np.float32(EPS))
        return residual, (wide * given["rms_gamma"] / root).astype(T)

    def _sum_over_ranks(self, partial: Any) -> Any:
        rank = self._rank
        if self._nccl is not None:
            total = self._xp.empty_like(partial)
            self._nccl.allReduce(partial.data.ptr, total.data.ptr, partial.size, self._type,
                                 self._sum, rank.stream.ptr)  # fmt: skip
            return total
        host = to_host(partial)
        parts = rank.group.allgather(host.astype(np.float32))
        return self._xp.asarray(np.sum(parts, axis=0).astype(host.dtype))

    def close(self) -> None:
        """Let NCCL go; collective."""
        if self._nccl is not None:
            self._nccl.destroy()


def moe_layer(group: Group, options: argparse.Namespace) -> int:
    """Run one rank; return its exit status, which is the same on all."""
    backend = choose_backend(group)
    options.hidden = options.hidden or (7168 if backend == "cuda" else 512)
    options.intermediate = options.intermediate or (512 if backend == "cuda" else 128)
    if options.top_k > options.experts:
        raise ValueError(f"--top-k must be at most --experts; got {options.top_k}")
    dtype = DType.parse(options.dtype)
    with Workspace(
        group,
        max_token_num=max(options.tokens),
        hidden_dim=options.hidden,
        dtype=dtype,
        operations=["moe_finalize"],
        backend=backend,
        timeout_s=60.0,
    ) as workspace:
        rank = Rank(group, workspace)
        xp, why = array_library(rank)
        layer = Layer(rank, xp, options)
        unfused = StepByStep(rank, xp, dtype)
        for index, device in enumerate(group.allgather(rank.device_name)):
            rank.say(f"rank {index} of {rank.size}: {device}")
        if why:
            rank.say(f"NumPy on the host does all but the fused end, since CuPy cannot: {why}")
        rank.say(
            f"hidden {options.hidden}, intermediate {options.intermediate}, top-{options.top_k} of "
            f"{options.experts} experts and a shared one, {dtype.value}; step by step sums by "
            f"{unfused.how}\n"
        )
        lines, held = [], True
        for tokens in options.tokens:
            told, right = _compare(rank, workspace, layer, unfused, tokens)
            lines.append(told)
            held = held and right
        unfused.close()
    rank.say(table(HEAD, lines))
    if not rank.on_gpu:
        rank.say("\nthe fused times are the emulator's, and say nothing of GPUs")
    rank.say("\nall held" if held else "\nNOT all held")
    return 0 if held else 1


HEAD = ("tokens", "step by step us", "fused us", "fused, graph us", "max |difference|",
        "mean |error| step by step", "fused", "rounding floor", "ranks equal", "held")  # fmt: skip


def array_library(rank: Rank) -> tuple[Any, str]:
    """Return CuPy on GPUs where it can multiply, else NumPy and the reason; the same on all."""
    if not rank.on_gpu:
        return np, ""
    import cupy

    why = ""
    try:
        ones = cupy.ones((8, 8), np.float32)
        cupy.exp(ones @ ones).get()
    except Exception as error:  # of cuBLAS, of NVRTC, of missing headers
        why = str(error).partition("\n")[0] or type(error).__name__
    reasons = [told for told in rank.group.allgather(why) if told]
    return (np, reasons[0]) if reasons else (cupy, "")


def to_host(array: Any) -> Any:
    """Return an array of NumPy's."""
    return array if isinstance(array, np.ndarray) else array.get()


def _compare(
    rank: Rank, workspace: Workspace, layer: Layer, unfused: StepByStep, tokens: int
) -> tuple[tuple[str, ...], bool]:
    """Do the end of the layer both ways; return a line and whether the fused way is right."""
    xp, dtype = layer.xp, workspace.dtype
    T = np.dtype(reference.numpy_dtype(dtype))
    rng = np.random.default_rng([3, tokens])
    x = xp.asarray(rng.standard_normal((tokens, layer.router.shape[0]), np.float32))
    residual_in = xp.asarray(4 * rng.standard_normal(x.shape, np.float32)).astype(T)
    given = layer(x)
    inputs = {
        name: rank.put(array) if isinstance(array, np.ndarray) else array
        for name, array in {**given, "residual_in": residual_in}.items()
    }
    poison = np.full(x.shape, np.nan, T)
    residual_out, norm_out = rank.put(poison), rank.put(poison)

    def fused() -> None:
        moe_finalize_allreduce_fusion(
            workspace=workspace,
            **inputs,
            routed_scaling_factor=FACTOR,
            rms_eps=EPS,
            residual_out=residual_out,
            norm_out=norm_out,
            stream=rank.stream,
        )

    def step_by_step() -> None:
        unfused(given, residual_in)

    steps = dict(zip(("residual_out", "norm_out"), unfused(given, residual_in), strict=True))
    rank.meet()
    fused()
    rank.meet()
    found = {"residual_out": residual_out, "norm_out": norm_out}
    host = {name: rank.get(array, T) for name, array in found.items()}
    host_steps = {name: to_host(array) for name, array in steps.items()}
    equal = rank.same_bits(*host.values())
    exact = _exact(rank, given, residual_in, dtype)
    errors, their_errors = reference.errors(host, exact), reference.errors(host_steps, exact)
    floor = reference.rounding_floor(exact, dtype)
    slack = SLACK.get(dtype, 1.05)
    close = all(errors[name][0] <= slack * their_errors[name][0] for name in host)
    right = all(rank.group.allgather(equal and close))
    far = max(
        float(np.abs(host[name].astype(np.float64) - host_steps[name].astype(np.float64)).max())
        for name in host
    )
    times = [_us(rank, step_by_step), _us(rank, fused)]
    replayed = f"{rank.time_us(fused):.1f}" if rank.on_gpu else "-"
    means = (their_errors["residual_out"][0], errors["residual_out"][0], floor["residual_out"][0])
    return (
        str(tokens),
        *(f"{us:.1f}" for us in times),
        replayed,
        f"{far:.2e}",
        *(f"{mean:.3e}" for mean in means),
        "yes" if equal else "NO",
        "yes" if right else "NO",
    ), right


def _exact(rank: Rank, given: Arrays, residual_in: Any, dtype: DType) -> reference.Result:
    """Return the end of the layer in float64."""
    host = {name: to_host(array) for name, array in given.items()}
    partial = reference.moe_finalize(
        host["allreduce_in"],
        host["expanded_idx_to_permuted_idx"],
        host["expert_scale_factor"],
        host["shared_expert_output"],
        FACTOR,
    )
    return reference.finish(
        rank.group.allgather(partial),
        dtype=dtype,
        residual_in=to_host(residual_in),
        rms_gamma=host["rms_gamma"],
        rms_eps=EPS,
        exact=True,
    )


def _us(rank: Rank, call: Callable[[], None]) -> float:
    """Time a call as a loop without CUDA graphs has it: the slowest rank's microseconds."""
    if not rank.on_gpu:
        return rank.time_us(call)

    def several() -> None:
        for _ in range(LAUNCHES):
            call()

    several()
    rank.meet()
    own = min(rank.event_us(several) for _ in range(5)) / LAUNCHES
    return float(max(rank.group.allgather(own)))


if __name__ == "__main__":
    given_words = parse(arguments())
    start(lambda group: moe_layer(group, given_words), given_words.in_process)
