"""PyTorch's operators and groups: values against the reference, and what the compiler asks."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import (
    BF16,
    F16,
    F32,
    Case,
    Rank,
    Ranks,
    backend,
    check,
    check_bits,
    dense_case,
    each_world,
    random_case,
    reduction_case,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_cases import Tensors, array, tensor, tensors, with_workspace  # noqa: E402

from cupy_moe_ar import (  # noqa: E402
    ArgumentError,
    UnsupportedError,
    Workspace,
    WorkspaceError,
    codecs,
)
from cupy_moe_ar.group import ThreadGroup  # noqa: E402
from cupy_moe_ar.integrations import torch as integration  # noqa: E402
from cupy_moe_ar.integrations.torch import TorchGroup, register, unregister  # noqa: E402
from cupy_moe_ar.testing import WorkerGroup, spawn_ranks  # noqa: E402

OPERATORS = torch.ops.cupy_moe_ar
MAKE: dict[str, Callable[..., Case]] = {
    "moe_finalize_allreduce_fusion": random_case,
    "moe_reduction_allreduce_fusion": lambda *sizes, **more: reduction_case(
        *sizes[:3], [3, 9], *sizes[3:], **more
    ),
    "allreduce_fusion": dense_case,
}
each_producer = pytest.mark.parametrize("name", MAKE)


def split(rank: Rank, case: Case) -> tuple[Any, Tensors]:
    """The first argument of the case's operation, and the others by name."""
    first, *rest = tensors(rank, case.arrays(rank.rank)).items()
    return first[1], dict(rest)


def options(case: Case) -> dict[str, Any]:
    chosen = {name: x for name, x in case.numbers.items() if name != "dtype"}
    return {**chosen, "comm_dtype": case.comm_dtype and case.comm_dtype.value}


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wire"), [(BF16, None), (F16, F32)])
@each_producer
@each_world(2, 3)
def test_all_reduces(ranks: Ranks, name: str, dtype: Any, wire: Any) -> None:
    case = MAKE[name](ranks.size, 5, 264, dtype=dtype, comm_dtype=wire, bias=1.0, eps=1e-5)

    @with_workspace(ranks, case)
    def body(rank: Rank, workspace: Workspace) -> None:
        handle = register(workspace)
        first, rest = split(rank, case)
        residual, norm = getattr(OPERATORS, name)(first, handle, **rest, **options(case))
        check(case, {"residual_out": array(residual), "norm_out": array(norm)})

        outputs = {x: torch.full_like(residual, torch.nan) for x in ("residual_out", "norm_out")}
        outputs[case.total_out] = torch.full_like(residual, torch.nan)
        run = getattr(OPERATORS, f"{name}_out")
        assert run(first, handle, **rest, **outputs, **options(case), use_oneshot=False) is None
        total = outputs.pop(case.total_out)
        check(case, {x: array(y) for x, y in {**outputs, "allreduce_out": total}.items()})
        assert unregister(handle) is workspace


@each_world(2, 3)
def test_plain_allreduce_and_halves(ranks: Ranks) -> None:
    case = dense_case(ranks.size, 7, 264)
    routed = random_case(ranks.size, 7, 264)

    @with_workspace(ranks, case)
    def body(rank: Rank, workspace: Workspace) -> None:
        handle = register(workspace)
        first, rest = split(rank, case)
        total = OPERATORS.allreduce(first, handle)
        check(case, {"allreduce_out": array(total)})

        mine = workspace.share(7)
        part = OPERATORS.reduce_scatter(first, handle)
        check_bits(array(part), array(total)[mine])
        residual, norm = OPERATORS.allgather_residual_rmsnorm(part, handle, **rest)
        check(case, {"residual_out": array(residual), "norm_out": array(norm)})

        first, rest = split(rank, routed)
        del rest["residual_in"], rest["rms_gamma"]
        part = OPERATORS.moe_finalize_reduce_scatter(first, handle, **rest)
        check_bits(array(part), routed.float32.allreduce_out[mine])
        unregister(handle)


GROUPS = {"scale_layout": "column_major", "scale_dtype": "ue8m0"}


def given(numbers: Tensors, rank: Rank) -> Tensors:
    """Options of a format with a scale on the rank's device, if it is an array."""
    return {x: tensor(rank, y) if isinstance(y, np.ndarray) else y for x, y in numbers.items()}


@pytest.mark.parametrize(
    ("quant", "name", "dtype", "formats"),
    [  # kernels that tests/test_quant.py compiles, too
        ("nvfp4", "allreduce_fusion", BF16, [
            {"scale_factor": 0.25}, {"scale_factor": np.float32([0.003]), "scale_layout": "linear"},
        ]),
        ("fp8_per_token_group", "allreduce_fusion", F16, [{}, GROUPS]),
        ("fp8_static", "moe_reduction_allreduce_fusion", F32, [{"scale_factor": 0.01}]),
        ("fp8_per_token", "moe_finalize_allreduce_fusion", F16, [{}]),
    ],
)  # fmt: skip
@each_world(2)
def test_quantised_outputs(
    ranks: Ranks, quant: str, name: str, dtype: Any, formats: list[dict[str, Any]]
) -> None:
    case = MAKE[name](ranks.size, 5, 640, dtype=dtype)

    @with_workspace(ranks, case)
    def body(rank: Rank, workspace: Workspace) -> None:
        workspace.prepare(quant=quant, operations=[case.operation])
        handle = register(workspace)
        first, rest = split(rank, case)
        for numbers in formats:
            norm = torch.full_like(rest["residual_in"], torch.nan)
            codes, scales = codecs.quantize(np.zeros(case.shape, np.float32), quant, **numbers)
            outputs = {"quant_out": tensor(rank, codes)}
            if scales is not None:
                outputs["scale_out"] = tensor(rank, np.full_like(scales, 3))
            more = {**outputs, **given(numbers, rank), "quant": quant}
            run = getattr(OPERATORS, f"{name}_out")
            assert run(first, handle, **rest, norm_out=norm, **more) is None
            codes, scales = codecs.quantize(array(norm), quant, **numbers)
            np.testing.assert_array_equal(array(outputs["quant_out"]), codes)
            if scales is not None:
                np.testing.assert_array_equal(array(outputs["scale_out"]), scales)
        unregister(handle)


@each_world(2)
def test_no_tokens(ranks: Ranks) -> None:
    case = random_case(ranks.size, 0, 264)

    @with_workspace(ranks, case)
    def body(rank: Rank, workspace: Workspace) -> None:
        handle = register(workspace)
        first, rest = split(rank, case)
        residual, norm = OPERATORS.moe_finalize_allreduce_fusion(first, handle, **rest)
        assert residual.shape == norm.shape == (0, 264)
        unregister(handle)


# ---- one rank: faults and the compiler -----------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[tuple[Rank, Workspace, int]]:
    """A rank without peers."""
    rank = Rank(ThreadGroup.create(1)[0])
    device = None
    if backend() == "cuda":
        device, rank.stream = 0, torch.cuda.current_stream(0)
    sizes = {"max_token_num": 64, "hidden_dim": 64, "device": device}
    with Workspace(rank.group, backend=backend(), **sizes) as workspace:
        handle = register(workspace)
        yield rank, workspace, handle
        integration._workspaces.pop(handle, None)


def test_handles(alone: tuple[Rank, Workspace, int]) -> None:
    rank, workspace, handle = alone
    case = dense_case(1, 3, 64)
    first, rest = split(rank, case)
    assert register(workspace) != handle
    with pytest.raises(WorkspaceError, match="no workspace has the handle 12345; register"):
        OPERATORS.allreduce_fusion(first, 12345, **rest)
    with pytest.raises(WorkspaceError, match="no workspace has the handle 12345"):
        OPERATORS.reduce_scatter(first, 12345)
    unregister(handle)
    with pytest.raises(WorkspaceError, match=f"allreduce: no workspace has the handle {handle}"):
        OPERATORS.allreduce(first, handle)
    with pytest.raises(WorkspaceError, match=r"^unregister"):
        unregister(handle)
    again = register(workspace)
    workspace.close()
    with pytest.raises(WorkspaceError, match="allreduce_fusion: the workspace is closed"):
        OPERATORS.allreduce(first, again)


def test_faults_are_the_operations(alone: tuple[Rank, Workspace, int]) -> None:
    rank, _, handle = alone
    first, rest = split(rank, random_case(1, 3, 64))
    rest["expanded_idx_to_permuted_idx"] = rest["expanded_idx_to_permuted_idx"].flatten().long()
    with pytest.raises(ArgumentError, match="must have dtype int32; got int64"):
        OPERATORS.moe_finalize_allreduce_fusion(first, handle, **rest)
    with pytest.raises(ArgumentError, match="must have dtype bfloat16; got float64"):
        OPERATORS.allreduce(torch.zeros(3, 64, dtype=torch.float64), handle)
    with pytest.raises(ArgumentError, match=r"must have shape \[token_num, hidden_dim\]"):
        OPERATORS.reduce_scatter(first[0], handle)
    with pytest.raises(WorkspaceError, match="not prepared for dtype float16"):
        OPERATORS.allreduce(first.half(), handle)


def nvfp4(rows: Any, scale_factor: Any) -> Tensors:
    """A quantised output of 4 tokens of 64 elements."""
    outputs = {"quant_out": (4, 32), "scale_out": (128, 4)}
    made = {name: rows.new_empty(shape, dtype=torch.uint8) for name, shape in outputs.items()}
    return {**made, "quant": "nvfp4", "scale_factor": scale_factor}


def calls(rank: Rank) -> Iterator[tuple[str, Any, Tensors]]:
    """Arguments for every operator."""
    for name, make in MAKE.items():
        first, rest = split(rank, make(1, 4, 64))
        yield name, first, rest
        some = {"norm_out": torch.empty_like(rest["residual_in"])}
        yield f"{name}_out", first, {**rest, **some}
        scale = first.new_full((1,), 0.5, dtype=torch.float32)
        yield f"{name}_out", first, {**rest, **some, **nvfp4(first, scale)}
        yield f"{name}_out.number", first, {**rest, **nvfp4(first, 0.5)}
        if name == "moe_finalize_allreduce_fusion":
            for unused in ("residual_in", "rms_gamma"):
                del rest[unused]
            yield "moe_finalize_reduce_scatter", first, rest
            out = first.new_empty((4, 64))
            yield "moe_finalize_reduce_scatter_out", first, {**rest, "reduce_scatter_out": out}
    yield "allreduce", first, {}
    yield "reduce_scatter", first, {}
    yield "reduce_scatter_out", first, {"reduce_scatter_out": torch.empty_like(first)}
    yield "allgather_residual_rmsnorm", first, rest
    yield "allgather_residual_rmsnorm_out", first, {**rest, **some}
    yield "allgather_residual_rmsnorm_out.number", first, {**rest, **nvfp4(first, 0.5)}


def test_opcheck(alone: tuple[Rank, Workspace, int]) -> None:
    rank, workspace, handle = alone
    workspace.prepare(quant="nvfp4")
    checked = set()
    for name, first, rest in calls(rank):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(OPERATORS, packet), overload or "default")
        torch.library.opcheck(operator, (first, handle), rest)
        checked.add(f"cupy_moe_ar::{name}")
    defined = {name for name in torch._C._dispatch_get_all_op_names() if "cupy_moe_ar" in name}
    assert checked == defined


def own_type(operator: Any, name: str) -> str:
    return next(str(x.type) for x in operator._schema.arguments if x.name == name)


def test_schemas_are_the_operations() -> None:
    for operator in integration._OPERATORS:
        expected = inspect.signature(operator.function).parameters
        left_out = {"workspace", "stream", "launch_shape", "dtype"}
        for suffix in ("", "_out") if operator.all_outputs else ("",):
            packet = getattr(OPERATORS, operator.name + suffix)
            schema = packet.default._schema
            assert packet.overloads() == (
                ["default", "number"] if suffix and "quant" in expected else ["default"]
            )
            if "number" in packet.overloads():
                assert own_type(packet.number, "scale_factor") == "float"
                assert own_type(packet.default, "scale_factor") == "Optional[Tensor]"
            first, handle, *rest = schema.arguments
            assert (first.name, handle.name) == (operator.first, "workspace")
            outputs = {x.name for x in rest if x.alias_info and x.alias_info.is_write}
            assert outputs == (set(operator.all_outputs or ()) if suffix else set())
            for argument in rest:
                default = expected[argument.name].default
                if argument.has_default_value():
                    assert argument.default_value == default, argument.name
                else:
                    assert argument.name in operator.needed or default is inspect.Parameter.empty
            told = {x.name for x in schema.arguments}
            assert told <= set(expected)
            if suffix:
                assert set(expected) - told == left_out - {"workspace"}


def layer(rows: Any, handle: int, index: Any, scale: Any, residual: Any, gamma: Any) -> Any:
    """Functional variants on what the compiler computes, an `_out` one on what it allocates."""
    residual, norm = OPERATORS.moe_finalize_allreduce_fusion(
        rows * 2,
        handle,
        expanded_idx_to_permuted_idx=index,
        expert_scale_factor=scale,
        residual_in=residual,
        rms_gamma=gamma,
    )
    part = OPERATORS.reduce_scatter(norm + 1, handle)
    out = torch.zeros_like(norm)
    OPERATORS.allreduce_fusion_out(part, handle, residual_in=residual, residual_out=out)
    return norm, out * 2


def test_compiles_once_for_all_token_counts(alone: tuple[Rank, Workspace, int]) -> None:
    rank, _, handle = alone
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (4, 7, 64, 2, 33):
        first, rest = split(rank, random_case(1, tokens, 64, shared_on=lambda rank: False))
        given = (first, handle, *rest.values())
        for found, expected in zip(compiled(*given), layer(*given), strict=True):
            check_bits(array(found), array(expected))
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- torch.distributed ---------------------------------------------------------------------------


def join(group: WorkerGroup, folder: str, backend: str = "gloo") -> None:
    """Make the spawned ranks a torch.distributed world."""
    torch.set_num_threads(1)
    method = f"file://{folder}/{backend}"
    size, timeout = group.Get_size(), timedelta(seconds=60)
    dist.init_process_group(
        backend, init_method=method, rank=group.Get_rank(), world_size=size, timeout=timeout
    )


def make_idle(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend that can do nothing."""
    return dist.ProcessGroup(rank, size)


def work(group: WorkerGroup, folder: str) -> str:
    dist.Backend.register_backend("idle", make_idle, devices=["cpu"])
    join(group, folder, "idle")
    elsewhere = TorchGroup()  # over gloo, whatever the backend
    assert elsewhere.allgather(elsewhere.Get_rank()) == [0, 1, 2]
    assert elsewhere.meet(30.0)
    dist.destroy_process_group()

    join(group, folder)
    world = TorchGroup()
    rank, size = world.Get_rank(), world.Get_size()
    assert (rank, size) == (group.Get_rank(), group.Get_size())
    assert world.allgather((rank, "x")) == [(other, "x") for other in range(size)]
    assert [world.bcast(rank, root=root) for root in range(size)] == list(range(size))
    begin = time.monotonic()
    if rank == 1:
        time.sleep(0.2)
    world.barrier()
    assert time.monotonic() - begin > 0.15

    # A subgroup: not the world's first ranks, and numbered anew.
    members = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(UnsupportedError, match="not in the process group"):
            TorchGroup(members)
    else:
        pair = TorchGroup(members)
        assert (pair.Get_rank(), pair.bcast(rank, root=1)) == (rank - 1, 2)
        case = random_case(2, 3, 64)
        options = {"max_token_num": 3, "hidden_dim": 64, "operations": ["moe_finalize"]}
        with Workspace(pair, backend="cpu", **options) as workspace:
            handle = register(workspace)
            first, rest = split(Rank(pair), case)
            residual, norm = OPERATORS.moe_finalize_allreduce_fusion(first, handle, **rest)
            check(case, {"residual_out": array(residual), "norm_out": array(norm)})
            unregister(handle)
    world.barrier()

    assert world.meet(30.0)
    if rank == 2:
        return "left"
    begin = time.monotonic()
    assert not world.meet(1.0)
    assert time.monotonic() - begin < 20
    return "missed"


@pytest.mark.skipif(backend() == "cuda", reason="its workspace is on the CPU")
def test_torch_group(tmp_path: Path) -> None:
    outcomes = spawn_ranks(3, work, str(tmp_path), timeout_s=120)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert not errors, errors[0]
    assert [outcome.value for outcome in outcomes] == ["missed", "missed", "left"]


def test_group_needs_torch_distributed() -> None:
    with pytest.raises(UnsupportedError, match="call init_process_group first"):
        TorchGroup()


# ---- the script ----------------------------------------------------------------------------------


@pytest.mark.skipif(backend() == "cuda", reason="this is the CPU's share of it")
def test_moe_layer() -> None:
    script = Path(__file__).parent.parent / "scripts" / "torch_moe_layer.py"
    sizes = {"--hidden": 64, "--experts": 4, "--intermediate": 32, "--layers": 2, "--ranks": 2}
    words = [str(word) for pair in sizes.items() for word in pair]
    command = [sys.executable, str(script), *words, "--tokens", "1", "3", "--modes", "eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout
    assert re.search(r"^ +1 .* yes +yes\n +3 .* yes +yes$", told, re.MULTILINE), told
    apart = re.findall(r"^ +eager +[13] .* (\S+)$", told, re.MULTILINE)
    assert len(apart) == 2
    assert max(map(float, apart)) < 0.05
    assert told.endswith("\nall held\n")
