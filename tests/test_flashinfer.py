"""FlashInfer's names: the same values as the operations', and reasons for what is not served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    dense_case,
    each_world,
    mpi_world,
    random_case,
    reduction_case,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_cases import Tensors, array, tensors, torch_stream  # noqa: E402
from torch_cases import tensor as rank_tensor  # noqa: E402

from cupy_moe_ar import ArgumentError, UnsupportedError, WorkspaceError, codecs  # noqa: E402
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


# ---- quantised outputs ---------------------------------------------------------------------------

ROW = 640  # 5 groups of 128: two words of packed scales, the second mostly padding
FORMATS = {
    "fp8_static": (Pattern.kARResidualRMSNormFP8Quant, Pattern.kARResidualRMSNormOutFP8Quant),
    "nvfp4": (Pattern.kARResidualRMSNormFP4Quant, Pattern.kARResidualRMSNormOutFP4Quant),
    "fp8_per_token_group": (
        Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
        Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
    ),
    "fp8_per_token": (
        Pattern.kARResidualRMSNormDynamicFP8Quant,
        Pattern.kARResidualRMSNormOutDynamicFP8Quant,
    ),
}
CANARY = 0x7F7F7F7F


def packed(like: Any, tokens: int) -> tuple[Any, Any]:
    """Scales of groups as upstream has them, and the memory they are in, with a canary behind."""
    column = -(-tokens // 4) * 4
    memory = like.new_full((tokens + column + 4,), CANARY, dtype=torch.int32)
    return memory.as_strided((tokens, 2), (1, column)), memory


@each_world(2)
def test_quantised_patterns(ranks: Ranks) -> None:
    """Codes of the norm that the same call writes; upstream's scales, converted."""
    whole = dense_case(ranks.size, TOKENS, ROW)

    @on_ranks(ranks)
    def body(rank: Rank) -> None:
        workspace = create(rank, hidden_dim=ROW, quant=list(FORMATS))

        def run(quant: str, case: Case, made: Tensors, more: Tensors) -> Any:
            """Call both patterns of a format; return the norm."""
            first, rest = split(rank, case)
            norm, untouched = blank(first), blank(first)
            codes = []
            for pattern, out in zip(FORMATS[quant], (untouched, norm), strict=True):
                for output in made.values():
                    output.view(torch.uint8).fill_(3)
                found = comm.allreduce_fusion(
                    first, workspace, pattern, norm_out=out, **rest, **made, **more
                )
                assert found is made["quant_out"]
                codes.append({name: raw(output) for name, output in made.items()})
            assert untouched.isnan().all()
            check(case, {"norm_out": array(norm)})
            for name in made:
                np.testing.assert_array_equal(codes[0][name], codes[1][name])
            return array(norm)

        def empty(*shape: int, dtype: Any = torch.uint8) -> Any:
            return rank_tensor(rank, np.empty(shape, np.uint8)).to(dtype)

        fp8 = empty(TOKENS, ROW, dtype=torch.float8_e4m3fn)
        for scale in (0.02, np.float32([0.02])):
            outputs = {"quant_out": fp8, "scale_out": empty(1)}
            norm = run("fp8_static", whole, outputs, {"scale_factor": given(rank, scale)})
            codes, _ = codecs.quantize(norm, "fp8_static", scale_factor=np.float32(0.02))
            np.testing.assert_array_equal(raw(fp8), codes)
            assert raw(outputs["scale_out"]) == 3
            near = codecs.dequantize(raw(fp8), None, "fp8_static", scale_factor=0.02)
            np.testing.assert_allclose(near, norm.astype(np.float32), rtol=0.07, atol=1e-3)

        outputs = {"quant_out": fp8, "scale_out": empty(TOKENS, 1, dtype=torch.float32)}
        norm = run("fp8_per_token", whole, outputs, {})
        codes, scales = codecs.quantize(norm, "fp8_per_token")
        np.testing.assert_array_equal(raw(fp8), codes)
        np.testing.assert_array_equal(array(outputs["scale_out"])[:, 0], scales)

        largest = np.abs(norm.astype(np.float32)).max()
        upstream = np.float32(448 * 6) / largest
        ours = np.float32(1) / upstream
        for code, layout, scale_out in (
            (None, "swizzled_128x4", empty(128, 40)),
            (comm.QuantizationSFLayout.SWIZZLED_128x4, "swizzled_128x4",
             empty(128, 10, dtype=torch.int32)),
            (comm.QuantizationSFLayout.LINEAR, "linear", empty(TOKENS, 40)),
        ):  # fmt: skip
            for scale in (float(upstream), upstream.reshape(1)):
                outputs = {"quant_out": empty(TOKENS, ROW // 2), "scale_out": scale_out}
                more = {"scale_factor": given(rank, scale), "layout_code": code}
                norm = run("nvfp4", whole, outputs, more)
                options: Any = {"scale_factor": ours, "scale_layout": layout}
                codes, scales = codecs.quantize(norm, "nvfp4", **options)
                np.testing.assert_array_equal(raw(outputs["quant_out"]), codes)
                np.testing.assert_array_equal(raw(scale_out).reshape(-1), scales)
                assert codecs.decode_e4m3(raw(scale_out)).max() == 448
                near = codecs.dequantize(codes, scales, "nvfp4", **options)
                np.testing.assert_allclose(near, norm.astype(np.float32), atol=largest / 6)

        for tokens in (TOKENS, 4):
            scale_out, memory = packed(fp8, tokens)
            first, rest = split(rank, whole.first(tokens))
            norm, fp8 = blank(first), fp8[:tokens]
            for pattern in FORMATS["fp8_per_token_group"]:
                memory.fill_(CANARY)
                found = comm.allreduce_fusion(
                    first, workspace, pattern, norm_out=norm, quant_out=fp8, scale_out=scale_out,
                    block_quant_group_size=128, **rest,
                )  # fmt: skip
                assert found is fp8
            codes, scales = codecs.quantize(
                array(norm), "fp8_per_token_group", scale_layout="column_major", scale_dtype="ue8m0"
            )
            assert scales is not None
            np.testing.assert_array_equal(raw(fp8), codes)
            words = scales.view(np.int32).reshape(2, -1)[:, :tokens]
            np.testing.assert_array_equal(array(scale_out), words.T)
            assert (memory == CANARY).sum() == len(memory) - 2 * tokens

        # Sizes of its own, so that tensors may be flat.
        first, rest = split(rank, whole)
        norm, residual = (blank(first).flatten() for _ in range(2))
        for quant, columns, scale_out, scale in (
            ("nvfp4", ROW // 2, empty(TOKENS * 40), float(upstream)),
            ("fp8_static", ROW, None, 0.5),
        ):
            quant_out = empty(TOKENS * columns)
            comm.trtllm_allreduce_fusion(
                first.flatten(), rank.size, rank.rank, TOKENS, ROW, workspace, False, True, True,
                FORMATS[quant][1], None, None, rest["residual_in"].flatten(), residual, norm,
                quant_out, scale_out, rest["rms_gamma"], 1e-6, scale, 2,
            )  # fmt: skip
            options = {"scale_factor": ours, "scale_layout": "linear"}
            if quant == "fp8_static":
                options = {"scale_factor": 0.5}
            codes, _ = codecs.quantize(array(norm).reshape(whole.shape), quant, **options)
            np.testing.assert_array_equal(raw(quant_out), codes.reshape(-1))
        workspace.destroy()


def given(rank: Rank, scale: Any) -> Any:
    return scale if isinstance(scale, float) else rank_tensor(rank, scale)


def raw(output: Any) -> Any:
    return output.contiguous().view(torch.uint8).cpu().numpy().copy()


@each_world(1)
def test_quantised_patterns_compile(ranks: Ranks) -> None:
    case = dense_case(ranks.size, TOKENS, ROW)

    @on_ranks(ranks)
    def body(rank: Rank) -> None:
        workspace = create(rank, hidden_dim=ROW, quant=("nvfp4", "fp8_per_token_group"))
        first, rest = split(rank, case)
        halves, scales = (first.new_empty(x, dtype=torch.uint8) for x in ((5, 320), (5, 40)))
        groups = packed(first, TOKENS)[0]

        def end(first: Any, halves: Any, scales: Any, groups: Any, **rest: Any) -> Any:
            fp8 = torch.empty_like(first, dtype=torch.float8_e4m3fn)
            four = comm.allreduce_fusion(
                first, workspace, 3, quant_out=halves, scale_out=scales, scale_factor=8.0,
                layout_code=2, **rest,
            )  # fmt: skip
            eight = comm.allreduce_fusion(
                first, workspace, 8, quant_out=fp8, scale_out=groups, block_quant_group_size=128,
                **rest,
            )  # fmt: skip
            return four + 1, eight.view(torch.uint8) + 1

        told = []
        for function in (end, torch.compile(end, backend="aot_eager", fullgraph=True)):
            for output in (halves, scales, groups):
                output.fill_(1)
            codes = function(first, halves, scales, groups, **rest)
            told.append([raw(x) for x in (*codes, halves, scales, groups)])
        assert told[0][2].any()
        for eager, compiled in zip(*told, strict=True):
            np.testing.assert_array_equal(eager, compiled)
        torch._dynamo.reset()
        workspace.destroy()


def test_what_quantised_patterns_refuse() -> None:
    rank = Rank(ThreadGroup.create(1)[0])
    rank.stream = torch.cuda.current_stream(0) if backend() == "cuda" else None
    workspace = create(rank, hidden_dim=ROW, quant=("nvfp4", "fp8_per_token_group"))
    first, rest = split(rank, dense_case(1, TOKENS, ROW))
    halves, scales = (first.new_empty(x, dtype=torch.uint8) for x in ((5, 320), (128, 40)))
    fp8 = torch.empty_like(first, dtype=torch.float8_e4m3fn)
    groups, memory = packed(first, TOKENS)
    call = comm.allreduce_fusion

    def four(**more: Any) -> Any:
        options = {"quant_out": halves, "scale_out": scales, "scale_factor": 8.0, **more}
        return call(first, workspace, 3, **rest, **options)

    def eight(**more: Any) -> Any:
        options = {"quant_out": fp8, "scale_out": groups, "block_quant_group_size": 128, **more}
        return call(first, workspace, 8, **rest, **options)

    assert four() is halves
    for pattern, quant in ((2, "fp8_static"), (4, "fp8_static"), (10, "fp8_per_token")):
        words = f"not made for {Pattern(pattern).name}; pass quant='{quant}' to the function that"
        with pytest.raises(WorkspaceError, match=words):
            call(first, workspace, pattern, quant_out=fp8, norm_out=first, scale_out=scales,
                 scale_factor=1.0, **rest)  # fmt: skip
    with pytest.raises(UnsupportedError, match="SWIZZLED_128x4 or LINEAR, not as SWIZZLED_8x4"):
        four(layout_code=comm.QuantizationSFLayout.SWIZZLED_8x4)
    with pytest.raises(ArgumentError, match=r"layout_code must be one of 0 \(SWIZ.*got 3"):
        four(layout_code=3)
    for nothing in (0, 0.0):
        with pytest.raises(ArgumentError, match=r"scale_factor must be positive.*got 0\.0"):
            four(scale_factor=nothing)
    with pytest.raises(ArgumentError, match="scale_out must have 5120 bytes"):
        four(scale_out=scales[:5])
    with pytest.raises(UnsupportedError, match=r"block_quant_group_size must be 128.*got 64"):
        eight(block_quant_group_size=64)
    strides = r"scale_out must be int32 of shape \(5, 2\) with strides \(1, 8\); got .*\(2, 1\)"
    with pytest.raises(ArgumentError, match=strides):
        eight(scale_out=groups.contiguous())
    assert (memory == CANARY).all()
    faults = "4 faults:\n  - quant_out is.*norm_out is.*\n  - scale_out is.*\n  - scale_factor is"
    with pytest.raises(ArgumentError, match=faults.replace("is.*norm", "is needed\n  - norm")):
        call(first, workspace, 5, **rest)
    with pytest.raises(ArgumentError, match="block_quant_group_size is needed"):
        eight(block_quant_group_size=None)
    workspace.destroy()
    with pytest.raises(ArgumentError, match="quant must be None or one of fp8_static"):
        create(rank, quant="fp8")


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
    for pattern in (1, 6, 7):
        words = f"{Pattern(pattern).name} writes no quant_out and scale_out here.*quantise norm_out"
        with pytest.raises(UnsupportedError, match=words):
            call(first, workspace, pattern, scale_out=first, **rest)
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
