"""FlashInfer's names: the same values as the operations', and reasons for what is not served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    dense_case,
    each_world,
    mpi_world,
    random_case,
    reduction_case,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_cases import Tensors, array, tensors, torch_stream  # noqa: E402

from cupy_moe_ar import ArgumentError, UnsupportedError, WorkspaceError  # noqa: E402
from cupy_moe_ar.group import ThreadGroup  # noqa: E402
from cupy_moe_ar.integrations import flashinfer as comm  # noqa: E402
from cupy_moe_ar.integrations.flashinfer import AllReduceFusionPattern as Pattern  # noqa: E402
from cupy_moe_ar.testing import WorkerGroup, run_ranks, spawn_ranks  # noqa: E402

TOKENS, HIDDEN = 5, 264
DTYPES = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}


def on_ranks(ranks: Ranks) -> Callable[..., None]:
    """Run a body on every rank; on GPUs under mpirun only, since PyTorch allocates."""
    if backend() == "cuda" and mpi_world() is None:
        pytest.skip("on GPUs under mpirun only")

    def decorate(body: Callable[[Rank], None]) -> None:
        def on_stream(rank: Rank) -> None:
            with torch_stream(rank):
                body(rank)

        ranks.run(on_stream)

    return decorate


def create(here: Rank, /, dtype: Any = torch.bfloat16, **options: Any) -> Any:
    place = {"world_size": here.size, "rank": here.rank, "comm_backend": here.group}
    sizes = {"max_token_num": TOKENS, "hidden_dim": HIDDEN, "dtype": dtype}
    return comm.create_allreduce_fusion_workspace(**{**place, **sizes, **options})


def split(rank: Rank, case: Case) -> tuple[Any, Tensors]:
    first, *rest = tensors(rank, case.arrays(rank.rank)).items()
    return first[1], dict(rest)


def blank(like: Any) -> Any:
    return torch.full_like(like, torch.nan)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@each_world(2, 3)
def test_patterns(ranks: Ranks, dtype: Any) -> None:
    dense = dense_case(ranks.size, TOKENS, HIDDEN, dtype, bias=1.0, eps=1e-5)
    routed = random_case(ranks.size, TOKENS, HIDDEN, dtype=dtype)
    experts = reduction_case(ranks.size, TOKENS, HIDDEN, [3, 9], dtype)

    @on_ranks(ranks)
    def body(rank: Rank) -> None:
        workspace = create(rank, DTYPES[dtype])

        first, rest = split(rank, dense)
        total = comm.allreduce_fusion(first, workspace, Pattern.kAllReduce, use_oneshot=True)
        check(dense, {"allreduce_out": array(total)})
        residual = blank(first)
        norm = comm.allreduce_fusion(
            input=first,
            workspace=workspace,
            pattern=1,
            launch_with_pdl=True,
            residual_out=residual,
            use_oneshot=False,
            fp32_acc=True,
            rms_eps=1e-5,
            weight_bias=1.0,
            **rest,
        )
        check(dense, {"residual_out": array(residual), "norm_out": array(norm)})

        first, rest = split(rank, routed)
        norm, residual = blank(norm), blank(norm)
        outputs = {"norm_out": norm, "residual_out": residual}
        last = comm.allreduce_fusion(first, workspace, 7, **rest, **outputs)
        assert last is norm
        check(routed, {name: array(x) for name, x in outputs.items()})

        first, rest = split(rank, experts)
        outputs = {"residual_out": blank(norm), "output": blank(norm)}
        rest["moe_reduction_active_experts_token_input"] = first.flatten(0, 1)
        rest["moe_reduction_device_num_experts"] = len(first)
        last = comm.allreduce_fusion(residual, workspace, 6, **rest, **outputs)
        assert last is outputs["residual_out"]
        total = array(outputs.pop("output"))
        check(experts, {"residual_out": array(last), "allreduce_out": total})
        workspace.destroy()
        workspace.destroy()
        with pytest.raises(WorkspaceError, match="no workspace has the handle"):
            comm.allreduce_fusion(norm, workspace, Pattern.kAllReduce)


@pytest.mark.parametrize("dtype", DTYPES)
@each_world(2)
def test_functions_with_sizes_of_their_own(ranks: Ranks, dtype: Any) -> None:
    dense = dense_case(ranks.size, TOKENS, HIDDEN, dtype)
    routed = random_case(ranks.size, TOKENS, HIDDEN, dtype=dtype, factor=2.5)
    experts = reduction_case(ranks.size, TOKENS, HIDDEN, [3, 9], dtype)

    @on_ranks(ranks)
    def body(rank: Rank) -> None:
        handles, pointers, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank.rank, rank.size, TOKENS, HIDDEN, dtype is F32, None, True, rank.group
        )
        assert metadata["max_token_num"] == TOKENS
        here = {"world_size": rank.size, "world_rank": rank.rank, "workspace_ptrs": pointers}
        sizes = {"token_num": TOKENS, "hidden_dim": HIDDEN, "launch_with_pdl": False}
        unused = {"quant_out": None, "scale_out": None, "scale_factor": None, "layout_code": None}

        first, rest = split(rank, dense)
        total, residual, norm = (blank(first).flatten() for _ in range(3))
        plain = {**here, **sizes, **unused, "use_oneshot": None, "fp32_acc": False,
                 "trigger_completion_at_end": True, "metadata": metadata}  # fmt: skip
        nothing = dict.fromkeys(("residual_in", "residual_out", "norm_out", "rms_gamma"))
        comm.trtllm_allreduce_fusion(
            first.flatten(), pattern_code=0, allreduce_out=total, **nothing, rms_eps=None, **plain
        )
        rest["residual_in"] = rest["residual_in"].flatten()
        outputs = {"residual_out": residual, "norm_out": norm, "allreduce_out": None}
        comm.trtllm_allreduce_fusion(
            first.flatten(), pattern_code=1, rms_eps=1e-6, **rest, **outputs, **plain
        )
        outputs["allreduce_out"] = total
        check(dense, {name: array(x).reshape(dense.shape) for name, x in outputs.items()})

        first, rest = split(rank, routed)
        outputs = {"residual_out": blank(rest["residual_in"]), "norm_out": blank(residual)}
        outputs["norm_out"] = outputs["norm_out"].view(TOKENS, HIDDEN)
        comm.trtllm_moe_finalize_allreduce_fusion(
            first,
            norm_weight=rest.pop("rms_gamma"),
            **rest,
            **outputs,
            **here,
            eps=1e-6,
            launch_with_pdl=False,
            quant_out=None,
            scale_out=None,
            routed_scaling_factor=2.5,
        )
        check(routed, {name: array(x) for name, x in outputs.items()})

        first, rest = split(rank, experts)
        outputs = {"residual_out": blank(residual), "norm_out": blank(norm)}
        total = blank(norm).view(TOKENS, HIDDEN)
        comm.trtllm_moe_allreduce_fusion(
            **here,
            **sizes,
            **unused,
            **rest,
            **outputs,
            moe_allreduce_out=total,
            rms_eps=1e-6,
            moe_reduction_device_num_experts=len(first),
            moe_reduction_active_experts_token_input=first.flatten(),
            backend="cake",
        )
        outputs["allreduce_out"] = total
        check(experts, {name: array(x).reshape(experts.shape) for name, x in outputs.items()})
        comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)


@each_world(2)
def test_both_16_bit_types_are_prepared(ranks: Ranks) -> None:
    cases = [dense_case(ranks.size, TOKENS, HIDDEN, dtype) for dtype in (BF16, F16)]

    @on_ranks(ranks)
    def body(rank: Rank) -> None:
        made = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank.rank, rank.size, TOKENS, HIDDEN, False, None, True, rank.group, True
        )
        workspace = made[1]
        assert made[2:] == ([], workspace.metadata)
        for case in cases:
            total = comm.allreduce_fusion(split(rank, case)[0], workspace.workspace_tensor, 0)
            check(case, {"allreduce_out": array(total)})
        fits = workspace.is_buffer_size_sufficient
        told = [fits(rank.size, TOKENS, HIDDEN, x) for x in DTYPES.values()]
        assert told == [True, True, False]
        workspace.destroy()


# ---- one rank ------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[tuple[Rank, Any]]:
    """A rank without peers, and its workspace."""
    rank = Rank(ThreadGroup.create(1)[0])
    rank.stream = torch.cuda.current_stream(0) if backend() == "cuda" else None
    workspace = create(rank)
    yield rank, workspace
    workspace.destroy()


def test_sizes(alone: tuple[Rank, Any]) -> None:
    fits = alone[1].is_buffer_size_sufficient
    assert fits(1, TOKENS, HIDDEN, torch.bfloat16)
    assert fits(1, 1, TOKENS * HIDDEN, torch.bfloat16, use_oneshot=True)
    assert not fits(1, TOKENS + 1, HIDDEN, torch.bfloat16)
    assert not fits(2, TOKENS, HIDDEN, torch.bfloat16)
    assert not fits(1, TOKENS, HIDDEN, torch.float16)


def test_forced_room_for_one_shot() -> None:
    def body(group: ThreadGroup) -> list[bool]:
        told = []
        for force in (True, False):
            sizes = {"max_token_num": 4096, "hidden_dim": 1024, "force_oneshot_support": force}
            workspace = create(Rank(group), **sizes)
            sufficient = workspace.is_buffer_size_sufficient
            told.append(sufficient(group.Get_size(), 4096, 1024, torch.bfloat16, True))
            told.append(sufficient(group.Get_size(), 4096, 1024, torch.bfloat16))
            workspace.destroy()
        return told

    if backend() == "cuda":
        pytest.skip("ranks of one process")
    assert run_ranks(4, body) == [[True, True, False, True]] * 4


def test_outputs_may_be_inputs(alone: tuple[Rank, Any]) -> None:
    """As vLLM calls it: norm over the input, residual over the residual."""
    rank, workspace = alone
    case = dense_case(1, TOKENS, HIDDEN)
    first, rest = split(rank, case)
    found = comm.allreduce_fusion(
        first, workspace, 1, norm_out=first, residual_out=rest["residual_in"], output=first, **rest
    )
    assert found is first
    check(case, {"norm_out": array(first), "residual_out": array(rest["residual_in"])})


def test_compiles(alone: tuple[Rank, Any]) -> None:
    rank, workspace = alone
    case = random_case(1, TOKENS, HIDDEN)
    first, rest = split(rank, case)

    def end(first: Any, **rest: Any) -> Any:
        residual = torch.empty_like(rest["residual_in"])
        norm = comm.allreduce_fusion(first, workspace, 7, residual_out=residual, **rest)
        return norm, residual

    norm, residual = torch.compile(end, backend="aot_eager", fullgraph=True)(first, **rest)
    check(case, {"norm_out": array(norm), "residual_out": array(residual)})
    torch._dynamo.reset()


def test_what_cannot_be_mapped_says_why(alone: tuple[Rank, Any]) -> None:
    rank, workspace = alone
    first, rest = split(rank, dense_case(1, TOKENS, HIDDEN))
    call = comm.allreduce_fusion
    for pattern in (2, 3, 4, 5, 8, 9, 10, 11):
        words = f"{Pattern(pattern).name} writes (FP8|NVFP4).*quantise that"
        with pytest.raises(UnsupportedError, match=words):
            call(first, workspace, pattern, quant_out=first, **rest)
    with pytest.raises(UnsupportedError, match="kMoEFinalizeARResidualRMSNorm writes quantised"):
        call(first, workspace, 7, scale_out=first, **rest)
    with pytest.raises(ArgumentError, match=r"pattern must be one of 0 \(kAllReduce\).*got 12"):
        call(first, workspace, 12)
    with pytest.raises(ArgumentError, match="2 faults:\n  - residual_in is needed\n  - rms_gamma"):
        call(first, workspace, 1)
    with pytest.raises(ArgumentError, match="moe_reduction_scale_input is needed"):
        call(first, workspace, 6, **rest)
    with pytest.raises(ArgumentError, match="expanded_idx_to_permuted_idx is needed"):
        call(first, workspace, 7, **rest)
    with pytest.raises(ArgumentError, match="moe_finalize_backend must be 'trtllm' or 'cake'"):
        call(first, workspace, 0, moe_finalize_backend="other")
    with pytest.raises(UnsupportedError, match=r"got Tensor: memory of FlashInfer's own"):
        call(first, first, 0)
    shapes = r"moe_reduction_scale_input must have shape \[num_experts, token_num\] .*\(5, 1\)"
    with pytest.raises(ArgumentError, match=shapes):
        call(first, workspace, 6, **rest, moe_reduction_device_num_experts=1,
             moe_reduction_active_experts_token_input=first,
             moe_reduction_scale_input=first[:, :1].float())  # fmt: skip
    with pytest.raises(ArgumentError, match="must be the workspace's, 0 and 1; got 1 and 2"):
        comm.trtllm_moe_finalize_allreduce_fusion(
            first, None, None, None, None, None, None, None, workspace, False, 1, 2, 0.0, None,
            None, None,
        )  # fmt: skip
    with pytest.raises(ArgumentError, match="pattern_code must be that of an all-reduce; got 7"):
        comm.trtllm_allreduce_fusion(
            first, 1, 0, TOKENS, HIDDEN, workspace, False, True, True, 7, None, *[None] * 11
        )


def test_creating_checks_its_place() -> None:
    rank = Rank(ThreadGroup.create(1)[0])
    with pytest.raises(ArgumentError, match=r"rank 1 of 2 was given, but .* rank 0 of 1"):
        create(rank, rank=1, world_size=2)
    with pytest.raises(ArgumentError, match="hidden_dim is needed\n  - backend must be"):
        create(rank, hidden_dim=None, backend="nccl")
    with pytest.raises(UnsupportedError, match="8 ranks with 4 GPUs a node are on several hosts"):
        create(rank, world_size=8, gpus_per_node=4)
    with pytest.raises(ArgumentError, match="use_symm_dev_mem needs create_metadata"):
        comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 1, 64, use_symm_dev_mem=True)


def work(group: WorkerGroup, folder: str) -> None:
    size, index = group.Get_size(), group.Get_rank()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/world", rank=index, world_size=size
    )
    case = dense_case(2, TOKENS, HIDDEN)
    rank = Rank(group)
    for options in ({}, {"group": dist.group.WORLD}):
        workspace = create(rank, comm_backend=None, **options)
        total = comm.allreduce_fusion(split(rank, case)[0], workspace, 0)
        check(case, {"allreduce_out": array(total)})
        workspace.checkpoint_prepare()
        workspace.checkpoint_restore(group)
        total = comm.allreduce_fusion(split(rank, case)[0], workspace, 0)
        check(case, {"allreduce_out": array(total)})
        workspace.destroy()


@pytest.mark.skipif(backend() == "cuda", reason="the tensors are on the CPU")
def test_process_groups(tmp_path: Path) -> None:
    outcomes = spawn_ranks(2, work, str(tmp_path), timeout_s=120)
    assert [outcome.error for outcome in outcomes] == [None, None]
