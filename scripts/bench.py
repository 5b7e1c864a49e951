"""Time a launch, and judge its outputs against float64 in the same run.

    mpirun -n 2 python scripts/bench.py results.json --floor --baselines
    python scripts/bench.py results.json --in-process 2
    python scripts/bench.py results.json --plot results.png     draws what was measured before

A row is printed, and results.json written, as each case ends; what ran and where it ran is in
results.log. On GPUs: CUDA graphs of 20 launches, 25 replays to warm up, 50 timed ones; of each
rank's median the largest of all ranks. On the CPU: calls, a few.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from _baselines import Floors, Kernels, NcclBaseline, ar_fusion_us
from _plot import plot
from _ranks import Rank, choose_backend, parse, positive, start
from _report import Log, Row, line, shape_table
from _workload import (
    DTYPES,
    OPERATIONS,
    PRESETS,
    PROTOCOLS,
    Case,
    Operation,
    Preset,
    common_inputs,
    expected,
)

from cupy_moe_ar import (
    DType,
    LaunchShape,
    Workspace,
    codecs,
    reference,
)
from cupy_moe_ar.checks import comm_dtype_of
from cupy_moe_ar.compile import Variant
from cupy_moe_ar.formats import FORMATS
from cupy_moe_ar.group import Group
from cupy_moe_ar.plan import launch_shapes
from cupy_moe_ar.selfcheck import quantised_outputs

OUTPUTS = ("residual_out", "norm_out")
MOST_JUDGED = 300  # tokens
TURNS = 3
TRIGGERS = {"heard": None, "end": True, "early": False}
GIVEN_SCALE = 0.01


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="presets: " + ", ".join(PRESETS),
    )
    add = parser.add_argument
    add("out_json", metavar="OUT_JSON", type=Path)
    what = parser.add_argument_group("what to run")
    what.add_argument("--op", choices=OPERATIONS, default="moe_finalize")
    what.add_argument("--protocol", choices=PROTOCOLS, default="auto")
    what.add_argument("--tokens", type=positive, nargs="+", default=[1, 4, 16, 64, 128])
    what.add_argument("--hidden", type=positive, nargs="+", help="default: 6144 7168")
    what.add_argument("--top-k", type=positive, help="default: 8")
    what.add_argument("--preset", choices=PRESETS, nargs="+", metavar="NAME", help="named models")
    what.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    what.add_argument("--comm-dtype", choices=DTYPES, help="what travels; default: the dtype")
    what.add_argument("--capacity", type=positive, help="tokens; default: 2048 on GPUs")
    more = parser.add_argument_group("what to measure besides")
    more.add_argument("--floor", action="store_true", help="bare exchange and other limits")
    more.add_argument("--baselines", action="store_true", help="what users would run instead")
    more.add_argument("--host", action="store_true", help="host time of a call")
    more.add_argument(
        "--prefill", type=positive, metavar="TOKENS", help="also time a launch after one of so many"
    )
    more.add_argument("--shapes", action="store_true", help="every launch that the planner knows")
    more.add_argument(
        "--quant", choices=FORMATS, nargs="+", metavar="FORMAT", default=[],
        help="quantised outputs, a row each: " + ", ".join(FORMATS),
    )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument("--in-process", type=positive, metavar="RANKS", help="ranks as threads")
    how.add_argument("--no-pdl", action="store_true", help="without programmatic launch")
    how.add_argument("--trigger", choices=TRIGGERS, default="heard", help="of the next launch")
    how.add_argument("--replays", type=positive, help="samples; default: 50, on the CPU 3")
    how.add_argument("--append", action="store_true", help="keep the rows of OUT_JSON")
    add("--plot", metavar="PNG", type=Path, help="draw OUT_JSON and run nothing")
    return parser


class Bench:
    """One run on one rank."""

    def __init__(
        self, group: Group, workspace: Workspace, operation: Operation, options: argparse.Namespace
    ) -> None:
        """Measure what does not depend on the case; collective."""
        self.options = options
        self.operation = operation
        self.workspace = workspace
        self.rank = rank = Rank(group, workspace)
        self.log = Log(rank, options)
        self.np_dtype = reference.numpy_dtype(workspace.dtype)
        self.floors: Floors | None = None
        self.nccl: NcclBaseline | None = None
        self.kernels: Kernels | None = None
        self._prefills: dict[Preset, Callable[[], None]] = {}
        if not (options.floor or options.baselines):
            return
        if not rank.on_gpu:
            self.log.say("no floors and no baselines: they need GPUs\n")
            return
        kernels = Kernels(rank, workspace.dtype)
        if options.floor:
            self.floors = Floors(rank, kernels)
            store = self.floors.store_bandwidth
            self.log.say(
                f"empty launch {self.floors.empty_us:.2f} us, device copy (read + write) "
                f"{self.floors.copy_bandwidth / 1e9:.0f} GB/s, peer store "
                + (f"{store / 1e9:.0f} GB/s\n" if store else "-\n")
            )
        if options.baselines:
            self.kernels = kernels
            try:
                self.nccl = NcclBaseline(rank, kernels, workspace.dtype)
            except RuntimeError as reason:
                self.log.say(f"no nccl_us: {reason}\n")

    def close(self) -> None:
        """Let go; collective."""
        if self.nccl:
            self.nccl.close()

    def run(self, case: Case, preset: str | None) -> bool:
        """Measure a case and add its rows; return whether its outputs are sound."""
        rows = [self._run(case, preset, quant) for quant in (None, *self.options.quant)]
        return all(row["sound"] for row in rows)

    def _run(self, case: Case, preset: str | None, quant: str | None) -> Row:
        """Measure one launch and add its row; return it, and whether its outputs are sound."""
        rank, options, operation = self.rank, self.options, self.operation
        inputs, common = operation.inputs(case, rank.index), common_inputs(case)
        arrays, outputs, sample = self._sample(case, inputs | common)
        blank = quantised_outputs(quant, case.tokens, case.model.hidden)
        quantised = {name: rank.put(x) for name, x in blank.items()}
        scale = GIVEN_SCALE if quant is not None and FORMATS[quant].needs_scale else None
        sample |= {"quant": quant, **quantised, "scale_factor": scale}
        home = self.workspace.home("bench")
        protocol = operation.describe(home, **sample, dtype=case.dtype).protocol

        call = self._caller(case, sample)
        us, plain_us = self._time(call, case, sample)
        errors, floor, equal = self._judge(case, inputs, common, outputs)
        model = case.model
        row: Row = {
            "op": options.op,
            "protocol": options.protocol,
            "served_by": protocol,
            "world": rank.size,
            "hidden": model.hidden,
            "top_k": model.top_k,
            "tokens": case.tokens,
            "dtype": case.dtype.value,
            "comm_dtype": case.comm_dtype.value,
            "quant": quant,
            "us": us,
            "plain_us": plain_us,
            "us_over_plain": us / plain_us if plain_us else None,
            "floor_us": None,
            "ar_fusion_us": None,
            "nccl_us": None,
            "empty_us": None,
            "link_us": None,
            "memory_us": None,
            "residual_mean_abs_error": errors["residual_out"][0],
            "residual_max_abs_error": errors["residual_out"][1],
            "residual_rounding_floor": floor["residual_out"][0],
            "norm_mean_abs_error": errors["norm_out"][0],
            "norm_max_abs_error": errors["norm_out"][1],
            "bits_equal": equal,
            "backend": self.workspace.backend,
            "preset": preset,
            "pdl": not options.no_pdl,
            "trigger": options.trigger,
        }
        if quant is not None:
            row["quant_exact"] = self._exact(quant, scale, outputs["norm_out"], quantised)
            equal = equal and row["quant_exact"]
        if self.floors and quant is None:
            row["floor_us"] = self.floors.exchange_us(case.message_bytes)
            row["empty_us"] = self.floors.empty_us
            read = operation.bytes_read(case)
            row["link_us"] = self.floors.link_us(case, protocol)
            row["memory_us"] = self.floors.memory_us(case, read, len(OUTPUTS), protocol)
        if self.kernels and quant is None and options.op == "moe_finalize":
            theirs = self._outputs(case)
            row["ar_fusion_us"] = ar_fusion_us(
                rank, self.kernels, self.workspace, case, arrays, **theirs
            )
        if self.nccl and quant is None and options.op != "moe_reduction":
            by_nccl = self._outputs(case)
            row["nccl_us"] = self.nccl.time_us(case, arrays, **by_nccl)
            their_errors, _, _ = self._judge(case, inputs, common, by_nccl)
            row["nccl_residual_mean_abs_error"] = their_errors["residual_out"][0]
        if options.prefill and quant is None:
            row["after_prefill_us"] = self._after_prefill_us(case, call)
        if options.host:
            row |= self._host(case, call, sample, protocol, quant)
        shapes = self._shapes(case, call, protocol, quant) if options.shapes else []
        if shapes:
            row["shapes"] = shapes
        row |= self.log.facts
        row = {key: round(x, 3) if key.endswith("us") and x else x for key, x in row.items()}
        self.log.say(line(options, row))
        self.log.add(row)
        if shapes:
            self.log.say(shape_table(shapes))
        sound = equal and bool(np.isfinite([worst for _, worst in errors.values()]).all())
        return {**row, "sound": all(rank.group.allgather(sound))}

    def _outputs(self, case: Case) -> Row:
        """Make room on the device, filled with NaN."""
        poison = np.full((case.tokens, case.model.hidden), np.nan, self.np_dtype)
        return {name: self.rank.put(poison) for name in OUTPUTS}

    def _sample(self, case: Case, inputs: Row) -> tuple[Row, Row, Row]:
        """Put a call's inputs on the device; return them, outputs, and all its arguments."""
        arrays = {name: self.rank.put(x) for name, x in inputs.items() if x is not None}
        outputs = self._outputs(case)
        arguments = {**arrays, **outputs, **self.operation.options(case)}
        return arrays, outputs, arguments | {"use_oneshot": PROTOCOLS[self.options.protocol]}

    def _caller(self, case: Case, sample: Row) -> Callable[..., None]:
        """Return what makes the call, with a launch shape if it is given one."""
        options = self.options

        def call(launch_shape: LaunchShape | None = None) -> None:
            self.operation.call(
                workspace=self.workspace,
                **sample,
                dtype=case.dtype,
                launch_with_pdl=not options.no_pdl,
                trigger_completion_at_end=TRIGGERS[options.trigger],
                launch_shape=launch_shape,
                stream=self.rank.stream,
            )

        return call

    def _time(
        self, call: Callable[[], None], case: Case, sample: Row
    ) -> tuple[float, float | None]:
        """Time a call and, if it quantises, one that does not, in turns; medians."""
        if sample["quant"] is None:
            return self.rank.time_us(call, self.options.replays), None
        quantised = dict.fromkeys(("quant", "quant_out", "scale_out", "scale_factor"))
        plain = self._caller(case, sample | quantised)
        turns = [
            [self.rank.time_us(each, self.options.replays) for each in (call, plain)]
            for _ in range(TURNS)
        ]
        us, plain_us = map(statistics.median, zip(*turns, strict=True))
        return us, plain_us

    def _after_prefill_us(self, case: Case, call: Callable[[], None]) -> float:
        """Time a launch that follows a prefill's: the two as one, less the prefill's alone."""
        rank, replays = self.rank, self.options.replays
        if case.model not in self._prefills:
            large = replace(case, tokens=self.options.prefill)
            inputs = self.operation.inputs(large, rank.index) | common_inputs(large)
            _, _, sample = self._sample(large, inputs)
            self._prefills[case.model] = self._caller(large, sample)
        prefill = self._prefills[case.model]

        def both() -> None:
            prefill()
            call()

        return rank.time_us(both, replays) - rank.time_us(prefill, replays)

    def _exact(self, quant: str, given: float | None, norm_out: Any, quantised: Row) -> bool:
        """Whether the quantised outputs are, bit for bit, what the norm asks for."""
        norm = self.rank.get(norm_out, self.np_dtype)
        found = [self.rank.get(array, np.dtype(np.uint8)) for array in quantised.values()]
        expected = codecs.quantize(norm, quant, scale_factor=given)
        return all(
            a.tobytes() == b.tobytes()
            for a, b in zip(found, [x for x in expected if x is not None], strict=True)
        )

    def _judge(
        self, case: Case, inputs: Row, common: Row, outputs: Row
    ) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]], bool]:
        """Return errors and rounding floor against float64, and whether all ranks are equal.

        Of many tokens some are judged, evenly spread; all must be equal.
        """
        rank = self.rank
        found = {name: rank.get(array, self.np_dtype) for name, array in outputs.items()}
        equal = rank.same_bits(*found.values())
        some = np.unique(np.linspace(0, case.tokens - 1, MOST_JUDGED).astype(np.intp))
        found = {name: array[some] for name, array in found.items()}
        picked = self.operation.pick(inputs, some)
        partials = rank.group.allgather(self.operation.partial(case, picked))
        told = None
        if rank.index == 0:
            replicated = {
                "residual_in": common["residual_in"][some],
                "rms_gamma": common["rms_gamma"],
            }
            exact = expected(case, partials, replicated, exact=True)
            told = reference.errors(found, exact), reference.rounding_floor(exact, case.dtype)
        errors, floor = rank.group.bcast(told)
        return errors, floor, equal

    def _shapes(
        self, case: Case, call: Callable[[LaunchShape], None], protocol: str, quant: str | None
    ) -> list[Row]:
        vectors = case.row_bytes // 16
        variant = self._variant(case, protocol, quant)
        plan_of = functools.partial(self.workspace.plan_rows, variant, case.tokens, vectors)
        chosen = plan_of().shape
        found = []
        for shape in launch_shapes(vectors):
            try:
                plan = plan_of(shape)
            except ValueError:  # not on this device
                continue
            us = self.rank.time_us(functools.partial(call, shape), self.options.replays)
            found.append(
                {
                    "cluster_blocks": shape.cluster_blocks,
                    "block_threads": shape.block_threads,
                    "kernel": shape.kernel,
                    "grid_blocks": plan.grid_blocks,
                    "us": round(us, 3),
                    "chosen": shape == chosen,
                }
            )
        return found

    def _variant(self, case: Case, protocol: str, quant: str | None) -> Variant:
        dtypes = case.dtype, case.comm_dtype
        return Variant(self.options.op, protocol, *dtypes, self.rank.size, quant)

    def _host(
        self, case: Case, call: Callable[[], None], sample: Row, protocol: str, quant: str | None
    ) -> Row:
        """Time the host: the call, its checks, and the driver's launch alone."""
        rank, workspace = self.rank, self.workspace
        backend: Any = workspace._backend
        home = workspace.home("bench")
        told = {
            "host_call_us": None,
            "host_describe_us": rank.host_us(
                lambda: self.operation.describe(home, **sample, dtype=case.dtype)
            ),
            "host_plan_us": None,
            "host_launch_us": None,
        }
        if not rank.on_gpu:
            return told
        told["host_call_us"] = rank.host_us(call)
        planned = self.operation.plan(
            workspace=workspace,
            **sample,
            dtype=case.dtype,
            launch_with_pdl=not self.options.no_pdl,
            stream=rank.stream,
        )
        told["host_plan_us"] = rank.host_us(planned.run)
        variant = self._variant(case, protocol, quant)
        plan = workspace.plan_rows(variant, case.tokens, case.row_bytes // 16)
        launcher = backend.launcher(variant, plan, not self.options.no_pdl)
        # The arguments of the last launch are still in place.
        bare, function = launcher._launch, launcher._function
        config, addresses = launcher.config, launcher._arguments_address
        told["host_launch_us"] = rank.host_us(lambda: bare(config, function, addresses, 0))
        return told


def models(options: argparse.Namespace) -> dict[str | None, list[Preset]]:
    """Return the layers to run, by name of the preset; without presets one for each size."""
    if options.preset:
        if options.hidden or options.top_k:
            raise ValueError("--preset has a hidden size and a top-k of its own")
        return {name: [PRESETS[name]] for name in options.preset}
    hiddens = options.hidden or [6144, 7168]
    return {None: [Preset(h, options.top_k or 8, shared=True, factor=2.5) for h in hiddens]}


def bench(group: Group, options: argparse.Namespace) -> int:
    """Run the benchmark on one rank; return its exit status, which is the same on all."""
    backend = choose_backend(group)
    dtype = DType.parse(options.dtype)
    comm_dtype = comm_dtype_of(dtype, options.comm_dtype)
    runs = [
        (name, Case(tokens, model, dtype, comm_dtype))
        for name, several in models(options).items()
        for model in several
        for tokens in options.tokens
    ]
    least = max(*options.tokens, options.prefill or 1)
    capacity = max(options.capacity or (2048 if backend == "cuda" else 1), least)
    operations = {options.op, "allreduce"} if options.baselines else {options.op}
    workspace = Workspace(
        group,
        max_token_num=capacity,
        max_oneshot_token_num=capacity if options.protocol == "oneshot" else None,
        hidden_dim=max(case.model.hidden for _, case in runs),
        dtype=dtype,
        comm_dtype=comm_dtype,
        operations=sorted(operations),
        quant=options.quant,
        backend=backend,
        timeout_s=60.0,
    )
    with workspace:
        run = Bench(group, workspace, OPERATIONS[options.op], options)
        run.log.say(line(options))
        sound = [run.run(case, name) for name, case in runs]
        run.close()
    if not all(sound):
        run.log.say("FAILED: outputs are not finite, or ranks differ")
    return 0 if all(sound) else 1


if __name__ == "__main__":
    given = parse(arguments())
    if given.plot:
        plot(json.loads(given.out_json.read_text()), given.plot)
    else:
        start(lambda group: bench(group, given), given.in_process)
