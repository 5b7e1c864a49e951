"""Every operation and protocol on real ranks, against the reference: does it work here?

Payloads are small integers, so that FP32 sums of them are exact in any order: the totals must have
the reference's bits. Each launch has numbers of its own; some are -0.0, and rows that no route
names are NaN. So a stale, lost or misplaced word shows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import codecs, reference
from .errors import MoeArError
from .formats import FORMATS, hidden_problem, scales_of
from .group import Group
from .launch import device_limits
from .ops import (
    allgather_residual_rmsnorm,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_finalize_reduce_scatter,
    moe_reduction_allreduce_fusion,
    reduce_scatter,
)
from .terminal import progress
from .testing import Device, choose_backend
from .types import DType
from .workspace import Workspace

__all__ = [
    "DTYPES",
    "NORM_ULPS",
    "TRIALS",
    "Case",
    "Options",
    "Trial",
    "check",
    "quantised_outputs",
]

Array = NDArray[Any]

DTYPES = {
    "bfloat16": (DType.BFLOAT16, DType.BFLOAT16),
    "bfloat16/float32": (DType.BFLOAT16, DType.FLOAT32),
    "float16": (DType.FLOAT16, DType.FLOAT16),
    "float16/float32": (DType.FLOAT16, DType.FLOAT32),
    "float32": (DType.FLOAT32, DType.FLOAT32),
}
"""By name, as on a command line: activations and what travels."""

NORM_ULPS = {DType.BFLOAT16: 1, DType.FLOAT16: 1, DType.FLOAT32: 8}
"""Units in the last place that a norm may be off, by its type."""

_TOP_K = 4
_FACTOR, _EPS, _BIAS, _SCALE = 2.0, 1e-5, 0.5, 0.0123


@dataclass(frozen=True)
class Options:
    """What to check; the same on every rank.

    Attributes:
        backend: As `Workspace` takes it.
        dtypes: Names of `DTYPES`.
        quant: Names of formats; the operations that have a norm also run with each of them.
        hidden: Row lengths; None is 7168 and 2880 on GPUs, else 512 and 360.
        tokens: Token counts of the launches, one after the other; None is a choice likewise.
        timeout_s: Bound of every wait for a peer.
    """

    backend: str | None = None
    dtypes: tuple[str, ...] = ("bfloat16",)
    quant: tuple[str, ...] = ()
    hidden: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    timeout_s: float = 30.0


def check(group: Group, options: Options, say: Callable[[str], None]) -> str | None:
    """Build a workspace and run everything in it; collective.

    Args:
        group: The ranks.
        options: What to check.
        say: Called on rank 0 with lines for people.

    Returns:
        None if all is right, else what failed; the same on every rank.
    """
    rank = group.Get_rank()
    tell = say if rank == 0 else lambda text: None
    pairs = [DTYPES[name] for name in options.dtypes]
    backend = choose_backend(group, options.backend)
    on_gpu = backend == "cuda"
    hidden = options.hidden or ((7168, 2880) if on_gpu else (512, 360))
    tokens = options.tokens or ((1, 3, 140, 2) if on_gpu else (1, 3, 20, 2))
    tell(f"building a workspace of {group.Get_size()} ranks on the {backend} backend")
    try:
        with progress():
            workspace = Workspace(
                group,
                max_token_num=max(tokens),
                max_oneshot_token_num=max(tokens),
                hidden_dim=max(hidden),
                dtype=pairs[0][0],
                comm_dtype=DType.FLOAT32,  # makes room for the widest
                operations=[],
                backend=backend,
                timeout_s=options.timeout_s,
            )
    except MoeArError as error:
        return f"building the workspace: {error}"
    with workspace:
        device = Device(workspace.device)
        limits = device_limits(device.device) if device.on_gpu else None
        words = f"{limits.name} ({limits.pci_bus_id})" if limits else workspace.backend
        for peer, where in enumerate(group.allgather(words)):
            tell(f"rank {peer}: {where}, {workspace.nbytes / 2**20:.0f} MiB shared")
        for name, pair in zip(options.dtypes, pairs, strict=True):
            for quant in (None, *options.quant):
                rows = [h for h in hidden if not (quant and hidden_problem(FORMATS[quant], h))]
                if not rows:
                    return f"{quant}: no row length of {hidden} is a multiple of its blocks"
                try:
                    with progress():
                        workspace.prepare(dtype=pair[0], comm_dtype=pair[1], quant=quant)
                except MoeArError as error:
                    return f"preparing {', '.join(filter(None, (name, quant)))}: {error}"
                for trial in TRIALS:
                    if quant and trial.scatters:
                        continue
                    cases = [
                        Case(trial, *pair, *sizes, number, quant)
                        for number, sizes in enumerate(itertools.product(tokens, rows))
                    ]
                    what = f"{trial.name}, {quant}" if quant else trial.name
                    wrong = _run(group, workspace, device, cases)
                    tell(f"{'WRONG' if wrong else 'right'}  {name:<16}  {what}")
                    if wrong:
                        return f"{what}, {name}: {wrong}"
    return None


def quantised_outputs(quant: str | None, token_num: int, hidden_dim: int) -> dict[str, Array]:
    """Make `quant_out` and `scale_out` of a format, filled with what no kernel writes."""
    if quant is None:
        return {}
    fmt = FORMATS[quant]
    width = hidden_dim * fmt.code_bits // 8
    outputs: dict[str, Array] = {"quant_out": np.full((token_num, width), 0xFF, np.uint8)}
    if fmt.has_scales:
        scales = scales_of(fmt, token_num, hidden_dim)
        raw = np.full(scales.nbytes, 0xFF, np.uint8)
        outputs["scale_out"] = raw.view(scales.array_dtypes[0]).reshape(scales.shape)
    return outputs


# ---- what is run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One operation by one protocol.

    Attributes:
        name: For people.
        function: The operation.
        kind: "finalize", "reduction" or "dense": what a rank passes in, and adds up.
        output: Name of the total's output.
        options: More arguments.
    """

    name: str
    function: Callable[..., None]
    kind: str
    output: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scatters(self) -> bool:
        """Whether a rank gets its own tokens only, and no norm."""
        return self.output == "reduce_scatter_out"

    @property
    def gathers(self) -> bool:
        """Whether a rank passes in the tokens that it owns."""
        return self.output == "allgather_out"


def _both(function: Callable[..., None], kind: str, output: str) -> list[Trial]:
    names = {"one-shot": True, "two-shot": False}
    return [
        Trial(f"{function.__name__}, {protocol}", function, kind, output, {"use_oneshot": oneshot})
        for protocol, oneshot in names.items()
    ]


TRIALS = (
    *_both(moe_finalize_allreduce_fusion, "finalize", "allreduce_out"),
    *_both(moe_reduction_allreduce_fusion, "reduction", "moe_allreduce_out"),
    *_both(allreduce_fusion, "dense", "allreduce_out"),
    Trial(
        moe_finalize_reduce_scatter.__name__,
        moe_finalize_reduce_scatter,
        "finalize",
        "reduce_scatter_out",
    ),
    Trial(reduce_scatter.__name__, reduce_scatter, "dense", "reduce_scatter_out"),
    Trial(
        allgather_residual_rmsnorm.__name__, allgather_residual_rmsnorm, "dense", "allgather_out"
    ),
)
"""Everything that is run."""


@dataclass(frozen=True)
class Case:
    """One launch: its sizes, its numbers and the right answer, which any rank can make."""

    trial: Trial
    dtype: DType
    comm_dtype: DType
    tokens: int
    hidden: int
    number: int
    quant: str | None = None

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.number, self.tokens, self.hidden, *key])

    def _integers(self, rng: np.random.Generator, *shape: int) -> Array:
        signs = rng.choice([-1.0, 1.0], shape)  # makes -0.0, too
        return (signs * rng.integers(0, 5, shape)).astype(reference.numpy_dtype(self.dtype))

    def own(self, rank: int) -> dict[str, Array]:
        """Return what a rank alone passes in."""
        rng = self._rng(1, rank)
        row = (self.tokens, self.hidden)
        if self.trial.gathers:  # every rank's tokens are of one array
            return {"allgather_in": self._integers(self._rng(1), *row)}
        if self.trial.kind == "dense":
            return {"allreduce_in": self._integers(rng, *row)}
        scale = rng.choice(np.array([0.5, 1, 2], np.float32), (self.tokens, _TOP_K))
        if self.trial.kind == "reduction":
            return {
                "moe_reduction_active_experts_token_input": self._integers(rng, _TOP_K, *row),
                "moe_reduction_scale_input": np.ascontiguousarray(scale.T),
            } | ({"moe_reduction_token_input": self._integers(rng, *row)} if rank % 2 else {})
        routes = self.tokens * _TOP_K
        index = rng.permutation(routes + 3)[:routes].astype(np.int32)
        index[rng.random(routes) < 0.25] = -1
        rows = self._integers(rng, routes + 3, self.hidden)
        rows[np.setdiff1d(np.arange(routes + 3), index)] = np.nan  # never read
        return {
            "allreduce_in": rows,
            "expanded_idx_to_permuted_idx": index.reshape(self.tokens, _TOP_K),
            "expert_scale_factor": scale,
        } | ({} if rank % 2 else {"shared_expert_output": self._integers(rng, *row)})

    def common(self) -> dict[str, Array]:
        """Return what every rank passes in."""
        rng = self._rng(2)
        residual = self._integers(rng, self.tokens, self.hidden)
        gamma = rng.choice([0.5, 1.0, 2.0], self.hidden).astype(residual.dtype)
        return {} if self.trial.scatters else {"residual_in": residual, "rms_gamma": gamma}

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments that are no arrays."""
        factor = {"routed_scaling_factor": _FACTOR} if self.trial.kind == "finalize" else {}
        norm = {} if self.trial.scatters else {"rms_eps": _EPS, "weight_bias": _BIAS}
        wire = {} if self.trial.gathers else {"comm_dtype": self.comm_dtype}
        codes = {"quant": self.quant, **self._scale} if self.quant else {}
        return {**factor, **norm, **wire, **codes, "dtype": self.dtype, **self.trial.options}

    @property
    def _scale(self) -> dict[str, float]:
        given = self.quant is not None and FORMATS[self.quant].needs_scale
        return {"scale_factor": _SCALE} if given else {}

    def outputs(self, share: slice) -> dict[str, Array]:
        """Return what the launch writes to, poisoned; `share` are the rank's own tokens."""
        dtype = reference.numpy_dtype(self.dtype)
        tokens = range(self.tokens)[share] if self.trial.scatters else range(self.tokens)
        norms = () if self.trial.scatters else ("residual_out", "norm_out")
        poison = np.full((len(tokens), self.hidden), np.nan, dtype)
        outputs: dict[str, Array] = dict.fromkeys((self.trial.output, *norms), poison)
        return outputs | quantised_outputs(self.quant, self.tokens, self.hidden)

    def codes(self, norm_out: Array) -> dict[str, Array]:
        """Return the right quantised outputs for a norm."""
        if not self.quant:
            return {}
        scale = self._scale.get("scale_factor")
        codes, scales = codecs.quantize(norm_out, self.quant, scale_factor=scale)
        return {"quant_out": codes} | ({} if scales is None else {"scale_out": scales})

    def expected(self, world_size: int) -> dict[str, Array]:
        """Return the right outputs, all tokens of them, by name."""
        ranks = range(1 if self.trial.gathers else world_size)
        common = self.common()
        result = reference.finish(
            [self._partial(self.own(rank)) for rank in ranks],
            dtype=self.dtype,
            comm_dtype=self.dtype if self.trial.gathers else self.comm_dtype,
            rms_eps=_EPS,
            weight_bias=_BIAS,
            residual_in=common.get("residual_in"),
            rms_gamma=common.get("rms_gamma"),
        ).arrays()
        total = {self.trial.output: result.pop("allreduce_out")}
        return total if self.trial.scatters else total | result

    def _partial(self, own: dict[str, Array]) -> Array:
        first, *others = own.values()
        if self.trial.kind == "finalize":
            shared = own.get("shared_expert_output")
            return reference.moe_finalize(first, others[0], others[1], shared, _FACTOR)
        if self.trial.kind == "reduction":
            return reference.moe_reduction(first, others[0], own.get("moe_reduction_token_input"))
        return first.astype(np.float64)


def _run(group: Group, workspace: Workspace, device: Device, cases: list[Case]) -> str:
    """Launch the cases one right after the other and judge them; return what is wrong."""
    rank, trial = group.Get_rank(), cases[0].trial
    launches = []
    for case in cases:
        share = workspace.share(case.tokens)
        given = case.own(rank)
        if trial.gathers:
            given = {name: array[share] for name, array in given.items()}
        arrays = {name: device.put(array) for name, array in (given | case.common()).items()}
        poison = case.outputs(share)
        written = {name: device.put(array) for name, array in poison.items()}
        launches.append((arrays, written, {name: array.dtype for name, array in poison.items()}))
    device.synchronize()
    group.barrier()
    wrong = ""
    try:
        for case, (arrays, outputs, _) in zip(cases, launches, strict=True):
            numbers = case.numbers
            trial.function(
                workspace=workspace, **arrays, **outputs, **numbers, stream=device.stream
            )
        device.synchronize()
        workspace.check()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if not any(group.allgather(wrong)):
        digest = hashlib.sha256()
        for case, (_, outputs, dtypes) in zip(cases, launches, strict=True):
            found = {name: device.get(array, dtypes[name]) for name, array in outputs.items()}
            wrong = wrong or _judge(case, found, group.Get_size(), workspace.share(case.tokens))
            for array in found.values():
                digest.update(array.tobytes())
        digests = group.allgather(digest.digest())
        if not trial.scatters and len(set(digests)) > 1:
            wrong = wrong or "the ranks' outputs are not the same bits"
    told = group.allgather(wrong)
    return "; ".join(f"rank {peer}: {words}" for peer, words in enumerate(told) if words)


def _judge(case: Case, found: Mapping[str, Array], world_size: int, share: slice) -> str:
    """Compare one launch's outputs with the right ones; return what is wrong."""
    expected = case.expected(world_size)
    codes = case.codes(found["norm_out"]) if "norm_out" in found else {}
    for name, right in (expected | codes).items():
        output = found[name]
        right = right[share] if case.trial.scatters else right
        if name == "norm_out":
            far = reference.ulp_distance(output, right, case.dtype)
            wrong = far > NORM_ULPS[case.dtype]
        else:
            right = right.reshape(output.shape)
            wrong = ~(output.astype(np.float32) == right.astype(np.float32))
        if wrong.any():
            token, column = np.argwhere(wrong)[0]
            return (
                f"{name} of {case.tokens} tokens, hidden {case.hidden}: {wrong.sum()} of "
                f"{wrong.size} elements differ, first at [{token}, {column}]: "
                f"{output[token, column]}, not {right[token, column]}"
            )
    return ""
