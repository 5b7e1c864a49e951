"""A whole tensor-parallel MoE layer in PyTorch, its end unfused and with this library.

    python scripts/torch_moe_layer.py --ranks 2            spawns the ranks
    torchrun --nproc-per-node 2 scripts/torch_moe_layer.py

Router, permutation, two batched GEMMs over the experts, shared expert; then the end of the layer,
by index and sum, `dist.all_reduce` (NCCL or gloo), residual add and RMSNorm, or by one call of
`torch.ops.cupy_moe_ar.moe_finalize_allreduce_fusion`. Every rank has a slice of every expert. A
step is all layers, each with weights of its own: eager, compiled, and on GPUs in CUDA graphs.

Prints microseconds a step, the end's error against float64, and the host's cost of a call. Exit
status 0: the fused end was right, and the same on all ranks. Without MPI.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import _checkout  # noqa: F401
import torch
import torch.distributed as dist
from _ranks import positive, table

from cupy_moe_ar import Workspace, moe_finalize_allreduce_fusion, plan_moe_finalize_allreduce_fusion
from cupy_moe_ar.group import Group, mixed_mpi
from cupy_moe_ar.integrations.torch import TorchGroup, register, unregister
from cupy_moe_ar.testing import spawn_ranks

MODES = ("eager", "graph", "compile", "graph+compile")
EPS, FACTOR = 1e-6, 2.5
END_CALLS = 20  # in the graph of the end alone
TIMEOUT_S = 300.0  # for everything

Pair = tuple[Any, Any]


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, help="to spawn; default: the GPUs, or 2")
    parser.add_argument("--tokens", type=positive, nargs="+", help="of each step")
    parser.add_argument("--layers", type=positive, help="of a step; default: 32 on GPUs, else 2")
    parser.add_argument("--hidden", type=positive, help="default: 7168 on GPUs, else 256")
    parser.add_argument("--experts", type=positive, help="default: 16 on GPUs, else 8")
    parser.add_argument("--top-k", type=positive, help="default: 8 on GPUs, else 2")
    parser.add_argument("--intermediate", type=positive, default=256, help="of a rank's slice")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES)
    return parser


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and where it runs."""

    hidden: int
    experts: int
    top_k: int
    intermediate: int
    layers: int
    device: Any


class Weights(NamedTuple):
    """One layer. All but router and gamma are this rank's slices."""

    router: Any  # [hidden, experts]
    up: Any  # [experts, hidden, 2 * intermediate]
    down: Any  # [experts, intermediate, hidden]
    shared_up: Any  # [hidden, 2 * intermediate]
    shared_down: Any  # [intermediate, hidden]
    gamma: Any  # [hidden]


class Partial(NamedTuple):
    """What a rank's GEMMs leave for the end of the layer."""

    rows: Any  # [experts * tokens, hidden], in permuted, padded order
    index: Any  # int32 [tokens, top_k]
    scale: Any  # float32 [tokens, top_k]
    shared: Any  # [tokens, hidden]


End = Callable[[Partial, Any, Any], Pair]  # with residual and gamma; returns residual and norm


# ---- the model -----------------------------------------------------------------------------------


def make_weights(sizes: Sizes, layer: int, rank: int) -> Weights:
    """Draw a layer's weights: `router` and `gamma` the same on every rank."""

    def draw(seed: int, fan_in: int, *shape: int) -> Any:
        generator = torch.Generator(sizes.device).manual_seed(seed)
        values = torch.randn(*shape, generator=generator, device=sizes.device)
        return values.div_(fan_in**0.5).bfloat16()

    hidden, experts, inner = sizes.hidden, sizes.experts, sizes.intermediate
    same, own = 1000 * layer, 1000 * layer + 10 * (rank + 1)
    return Weights(
        draw(same, hidden, hidden, experts),
        draw(own, hidden, experts, hidden, 2 * inner),
        draw(own + 1, inner, experts, inner, hidden),
        draw(own + 2, hidden, hidden, 2 * inner),
        draw(own + 3, inner, inner, hidden),
        1 + draw(same + 1, 100, hidden),
    )


def swiglu(x: Any) -> Any:
    """Gate one half by the other."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def experts(x: Any, weights: Weights, top_k: int) -> Partial:
    """Compute all of a layer but its end.

    Every expert has room for all tokens, so that no size depends on the routing.
    """
    tokens, hidden = x.shape
    experts = weights.up.shape[0]
    probability = torch.softmax(x.float() @ weights.router.float(), dim=-1)
    scale, chosen = probability.topk(top_k, dim=-1)
    scale = scale / scale.sum(dim=-1, keepdim=True)
    expert = chosen.flatten()
    to_expert = expert[:, None] == torch.arange(experts, device=x.device)
    place = to_expert.int().cumsum(0).gather(1, expert[:, None]).squeeze(1) - 1
    row = expert * tokens + place
    permuted = x.new_zeros(experts * tokens, hidden)
    permuted = permuted.index_copy(0, row, x.repeat_interleave(top_k, dim=0))
    inner = swiglu(torch.bmm(permuted.view(experts, tokens, hidden), weights.up))
    rows = torch.bmm(inner, weights.down).view(experts * tokens, hidden)
    shared = swiglu(x @ weights.shared_up) @ weights.shared_down
    return Partial(rows, row.view(tokens, top_k).int(), scale, shared)


def unfused(partial: Partial, residual: Any, gamma: Any) -> Pair:
    """End the layer with PyTorch's own operators, in FP32 where that is free."""
    routed = (partial.rows[partial.index.long()].float() * partial.scale[..., None]).sum(dim=1)
    total = (FACTOR * routed + partial.shared.float()).to(residual.dtype)
    dist.all_reduce(total)
    residual = total + residual
    x = residual.float()
    norm = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * gamma.float()
    return residual, norm.to(residual.dtype)


def fused(handle: int) -> End:
    """Return the end by this library."""

    def end(partial: Partial, residual: Any, gamma: Any) -> Pair:
        pair: Pair = torch.ops.cupy_moe_ar.moe_finalize_allreduce_fusion(
            partial.rows,
            handle,
            expanded_idx_to_permuted_idx=partial.index,
            expert_scale_factor=partial.scale,
            shared_expert_output=partial.shared,
            routed_scaling_factor=FACTOR,
            residual_in=residual,
            rms_gamma=gamma,
            rms_eps=EPS,
        )
        return pair

    return end


def make_layer(end: End, top_k: int) -> Callable[[Any, Any, Weights], Pair]:
    """Return a layer's forward pass."""

    def layer(x: Any, residual: Any, weights: Weights) -> Pair:
        return end(experts(x, weights, top_k), residual, weights.gamma)

    return layer


# ---- clocks --------------------------------------------------------------------------------------


class Clock:
    """Times of one rank; what it returns is the largest of all ranks' medians."""

    def __init__(self, group: Group, device: Any) -> None:
        """Take the group and the device."""
        self.group = group
        self.on_gpu = device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device, then for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.group.barrier()

    def us(self, run: Callable[[], object], repeats: int) -> float:
        """Return the microseconds of one `run`, the device's included."""
        samples = []
        for i in range(repeats + 3):
            self.wait()
            if self.on_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                sample = begin.elapsed_time(end) * 1e3
            else:
                start = time.perf_counter()
                run()
                sample = (time.perf_counter() - start) * 1e6
            if i >= 3:
                samples.append(sample)
        return self._largest(statistics.median(samples))

    def host_us(self, call: Callable[[], object]) -> float:
        """Return the host's microseconds of one `call`; the queue is never full."""
        samples = []
        for _ in range(20):
            self.wait()
            for _ in range(100):
                start = time.perf_counter()
                call()
                samples.append((time.perf_counter() - start) * 1e6)
        return self._largest(statistics.median(samples))

    def _largest(self, value: float) -> float:
        return float(max(self.group.allgather(value)))


def captured(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Capture `run`, which has run before, on the current stream.

    Returns:
        What replays it, and what it returned: tensors that each replay writes.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        results = run()
    return graph.replay, results


# ---- what is shown -------------------------------------------------------------------------------


class Show:
    """One rank of the script."""

    def __init__(self, group: Group, workspace: Workspace, sizes: Sizes) -> None:
        """Draw the weights."""
        self.group = group
        self.workspace = workspace
        self.sizes = sizes
        self.clock = Clock(group, sizes.device)
        self.handle = register(workspace)
        self.ends: dict[str, End] = {"unfused": unfused, "fused": fused(self.handle)}
        self.layers = [
            make_weights(sizes, layer, group.Get_rank()) for layer in range(sizes.layers)
        ]
        self.forward = {name: make_layer(end, self.sizes.top_k) for name, end in self.ends.items()}
        self.compiled = {
            name: torch.compile(layer, dynamic=True) for name, layer in self.forward.items()
        }

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.group.Get_rank() == 0:
            print(text, flush=True)

    def inputs(self, tokens: int) -> Pair:
        """Draw the first layer's input, the same on every rank."""
        generator = torch.Generator(self.sizes.device).manual_seed(tokens)
        shape = (tokens, self.sizes.hidden)
        x = torch.randn(shape, generator=generator, device=self.sizes.device).bfloat16()
        return x, (4 * x.float().roll(1, 0)).bfloat16()

    def step(self, layer: Callable[[Any, Any, Weights], Pair], tokens: int) -> Callable[[], Pair]:
        """Return what runs all layers."""
        first, first_residual = self.inputs(tokens)

        def run() -> Pair:
            x, residual = first, first_residual
            for weights in self.layers:
                residual, x = layer(x, residual, weights)
            return residual, x

        return run

    def time_steps(self, modes: list[str], token_counts: list[int]) -> None:
        """Print a row for each mode and number of tokens, as soon as it is known."""
        self.say(f"microseconds a step of {self.sizes.layers} layers:")
        head = ("mode", "tokens", "unfused", "fused", "saved", "difference")
        self.say("".join(cell.rjust(14) for cell in head))
        for mode in modes:
            for tokens in token_counts:
                times, results = [], []
                for name in self.ends:
                    layers = self.compiled if "compile" in mode else self.forward
                    run: Callable[[], Any] = self.step(layers[name], tokens)
                    result = run()
                    if "graph" in mode:
                        run()
                        run, result = captured(run)
                    times.append(self.clock.us(run, 50 if "graph" in mode else 10))
                    results.append([x.clone() for x in result])
                plain, own = times
                cells = (mode, str(tokens), f"{plain:.1f}", f"{own:.1f}", f"{1 - own / plain:.0%}",
                         f"{_distance(*results):.1e}")  # fmt: skip
                self.say("".join(cell.rjust(14) for cell in cells))

    def judge_ends(self, token_counts: list[int]) -> bool:
        """Time the end alone and compare it with float64; return whether the fused one is right."""
        rows, held = [], True
        for tokens in token_counts:
            x, residual = self.inputs(tokens)
            weights = self.layers[0]
            partial = experts(x, weights, self.sizes.top_k)
            exact = self._exact(partial, residual)
            cells, errors = [str(tokens)], []
            for end in self.ends.values():
                found, norm = end(partial, residual, weights.gamma)
                errors.append((found.double() - exact).abs().mean().item())

                cells.append(f"{self._end_us(end, partial, residual, weights.gamma):.2f}")
            floor = (exact.bfloat16().double() - exact).abs().mean().item()
            same = len(set(self.group.allgather(_digest(found, norm)))) == 1
            right = same and errors[1] <= 1.05 * errors[0]
            right = all(self.group.allgather(right))
            held = held and right
            cells += [f"{error:.2e}" for error in (*errors, floor)]
            rows.append((*cells, "yes" if same else "NO", "yes" if right else "NO"))
        head = ("tokens", "unfused us", "fused us", "mean |error|", "fused", "of rounding",
                "ranks equal", "held")  # fmt: skip
        where = f"graph of {END_CALLS}" if self.clock.on_gpu else "eager"
        self.say(f"\nthe end alone ({where}), and the error of the residual:")
        self.say(table(head, rows))
        return held

    def _end_us(self, end: End, *given: Any) -> float:
        def run() -> None:
            for _ in range(END_CALLS):
                end(*given)

        if not self.clock.on_gpu:
            return self.clock.us(run, 1) / END_CALLS
        replay, _ = captured(run)
        return self.clock.us(replay, 50) / END_CALLS

    def _exact(self, partial: Partial, residual: Any) -> Any:
        routed = partial.rows[partial.index.long()].double() * partial.scale[..., None].double()
        total = FACTOR * routed.sum(dim=1) + partial.shared.double()
        dist.all_reduce(total)
        return total + residual.double()

    def host_cost(self) -> None:
        """Print what a call costs the host."""
        # On the CPU a launch blocks: zero tokens launch nothing.
        tokens = 1 if self.clock.on_gpu else 0
        x, residual = self.inputs(1)
        weights = self.layers[0]
        rows, *rest = experts(x, weights, self.sizes.top_k)
        index, scale, shared, residual = (t[:tokens] for t in (*rest, residual))
        norm_out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
        given = {
            "expanded_idx_to_permuted_idx": index,
            "expert_scale_factor": scale,
            "shared_expert_output": shared,
            "residual_in": residual,
            "rms_gamma": weights.gamma,
        }
        outputs = {"residual_out": residual_out, "norm_out": norm_out}
        operators = torch.ops.cupy_moe_ar
        planned = plan_moe_finalize_allreduce_fusion(rows, self.workspace, **given, **outputs)
        ways: dict[str, Callable[[], object]] = {
            "planned.run()": planned.run,
            "moe_finalize_allreduce_fusion(...)": lambda: moe_finalize_allreduce_fusion(
                rows, self.workspace, **given, **outputs
            ),
            "torch.ops, _out": lambda: operators.moe_finalize_allreduce_fusion_out(
                rows, self.handle, **given, **outputs
            ),
            "torch.ops, new outputs": lambda: operators.moe_finalize_allreduce_fusion(
                rows, self.handle, **given
            ),
        }
        launch = "a token" if self.clock.on_gpu else "no token, so without the launch"
        self.say(f"\nthe host's microseconds a call ({launch}):")
        lines = [(name, f"{self.clock.host_us(call):.1f}") for name, call in ways.items()]
        self.say(table(("call", "us"), lines))


def _distance(plain: Any, own: Any) -> float:
    """Return how far apart the norms are, in units of their length."""
    difference = (plain[1].float() - own[1].float()).norm() / plain[1].float().norm()
    return float(difference.item())


def _digest(*tensors: Any) -> bytes:
    data = b"".join(x.view(torch.int16).cpu().numpy().tobytes() for x in tensors)
    return hashlib.sha256(data).digest()


# ---- ranks ---------------------------------------------------------------------------------------


def on_gpus(ranks: int) -> bool:
    """Whether each rank has a GPU of its own, as NCCL wants."""
    return os.environ.get("MOE_AR_BACKEND") != "cpu" and torch.cuda.device_count() >= ranks


@torch.no_grad()  # type: ignore[untyped-decorator]
def show(options: argparse.Namespace) -> int:
    """Run one rank of an initialised world; return its exit status, the same on all."""
    group = TorchGroup()
    rank, ranks = group.Get_rank(), group.Get_size()
    gpu = on_gpus(ranks)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    sizes = Sizes(
        options.hidden or (7168 if gpu else 256),
        options.experts or (16 if gpu else 8),
        options.top_k or (8 if gpu else 2),
        options.intermediate,
        options.layers or (32 if gpu else 2),
        device,
    )
    token_counts = options.tokens or ([1, 4, 16, 64] if gpu else [2, 5])
    modes = [mode for mode in options.modes if gpu or "graph" not in mode]
    if gpu:
        torch.cuda.set_stream(torch.cuda.Stream(device))  # a workspace is bound to one stream
    with Workspace(
        group,
        max_token_num=max(token_counts),
        hidden_dim=sizes.hidden,
        operations=["moe_finalize"],
        device=device.index,
        backend=device.type,
        timeout_s=60.0,
    ) as workspace:
        here = Show(group, workspace, sizes)
        name = torch.cuda.get_device_name(device) if gpu else "CPU emulator"
        here.say(
            f"{ranks} ranks, {name}; torch {torch.__version__}, {dist.get_backend()}\n"
            f"hidden {sizes.hidden}, top-{sizes.top_k} of {sizes.experts} experts of "
            f"{sizes.intermediate} a rank, shared expert, bfloat16\n"
        )
        held = here.judge_ends(token_counts)
        here.host_cost()
        here.say("")
        here.time_steps(modes, token_counts)
        here.say("\nall held" if held else "\nNOT all held")
        unregister(here.handle)
    group.barrier()
    return 0 if held else 1


def work(group: Group, options: argparse.Namespace, store: str) -> int:
    """Run a spawned rank."""
    rank, ranks = group.Get_rank(), group.Get_size()
    join(ranks, rank, init_method=f"file://{store}", rank=rank, world_size=ranks)
    return guarded(options)


def guarded(options: argparse.Namespace) -> int:
    """Run one rank and leave the world; a rank that raises ends at once, without its peers."""
    try:
        status: int = show(options)
    except BaseException:
        print(f"[rank {dist.get_rank()}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    dist.destroy_process_group()
    return status


def join(ranks: int, local_rank: int, **options: Any) -> None:
    """Make torch.distributed's world; all ranks are on one host."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpus(ranks):
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", **options)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **options)


def main() -> int:
    """Start the ranks, or be the one that torchrun has started."""
    parser = arguments()
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        join(int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
        return guarded(options)
    if mixed_mpi(1, os.environ, ""):
        parser.error("it starts its ranks itself: run it without mpirun, or under torchrun")
    ranks = options.ranks or (min(torch.cuda.device_count(), 8) if on_gpus(2) else 2)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = spawn_ranks(ranks, work, options, f"{folder}/store", timeout_s=TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            print(f"[rank {rank}] {outcome.error}", file=sys.stderr)
    return max(1 if outcome.error else int(outcome.value) for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
