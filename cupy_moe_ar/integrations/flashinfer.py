"""FlashInfer's fused all-reduces by its own names and arguments, run by this package.

    import cupy_moe_ar.integrations.flashinfer as comm       # was: import flashinfer.comm as comm

FlashInfer itself is not needed. Tensors are PyTorch's, on CUDA or, with the CPU backend, on the
CPU. A workspace made here goes to functions of this module only: what upstream's functions hand on
as `workspace_ptrs` or `ipc_handles` is an `AllReduceFusionWorkspace` here.

What differs, besides what the package promises (sums in FP32, equal bits on all ranks, bounded
waits, any `hidden_dim` of whole 16 bytes):

- `backend`, `moe_finalize_backend` and `fp32_acc` choose nothing: there is one implementation.
- Creating and destroying a workspace are collective over `comm_backend` or `group`. Kernels with
  quantised outputs are compiled and loaded then, too: `quant` names their formats.
- Scales have upstream's meaning: `scale_factor` divides in the FP8 patterns (x is about
  code * scale_factor) and multiplies in the FP4 ones (x is about code * scale / scale_factor: it is
  448 * 6 / max). Division is true division here, so that codes can differ from upstream's by a
  rounding; a block or token of zeros has the least scale (0, UE8M0: 2**-127), where upstream has a
  floor of 1e-10 for groups and 1 / (448 * 512) for tokens.
- Faults are `ArgumentError`, a `ValueError`. What cannot be mapped raises `UnsupportedError` with
  the reason: `SWIZZLED_8x4`, groups of other than 128 elements, quantised outputs of the MoE
  patterns, and ranks of several hosts.
- Expert scales may be FP32, whatever the activations.
- Under `torch.compile` the calls are operators `torch.ops.cupy_moe_ar.*`.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError, WorkspaceError
from ..formats import FORMATS
from ..types import DType
from ..workspace import Workspace
from .torch import TorchGroup, register, unregister

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "FP4QuantizationSFLayout",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]


class AllReduceFusionPattern(enum.IntEnum):
    """What a call computes and writes, by FlashInfer's numbers."""

    kAllReduce = 0  # noqa: N815
    kARResidualRMSNorm = 1  # noqa: N815
    kARResidualRMSNormFP8Quant = 2  # noqa: N815
    kARResidualRMSNormFP4Quant = 3  # noqa: N815
    kARResidualRMSNormOutFP8Quant = 4  # noqa: N815
    kARResidualRMSNormOutFP4Quant = 5  # noqa: N815
    kMoEReductionARResidualRMSNorm = 6  # noqa: N815
    kMoEFinalizeARResidualRMSNorm = 7  # noqa: N815
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8  # noqa: N815
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9  # noqa: N815
    kARResidualRMSNormDynamicFP8Quant = 10  # noqa: N815
    kARResidualRMSNormOutDynamicFP8Quant = 11  # noqa: N815


class QuantizationSFLayout(enum.IntEnum):
    """Where the scales of FP4 blocks lie, by FlashInfer's numbers."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


FP4QuantizationSFLayout = QuantizationSFLayout  # its earlier name

_OPERATORS = torch.ops.cupy_moe_ar
_OPERATIONS = ("allreduce", "moe_reduction", "moe_finalize")  # to prepare
_Pattern = AllReduceFusionPattern
# Format, and whether norm_out is written besides.
_QUANTISED = {
    _Pattern.kARResidualRMSNormFP8Quant: ("fp8_static", False),
    _Pattern.kARResidualRMSNormOutFP8Quant: ("fp8_static", True),
    _Pattern.kARResidualRMSNormFP4Quant: ("nvfp4", False),
    _Pattern.kARResidualRMSNormOutFP4Quant: ("nvfp4", True),
    _Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: ("fp8_per_token_group", False),
    _Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: ("fp8_per_token_group", True),
    _Pattern.kARResidualRMSNormDynamicFP8Quant: ("fp8_per_token", False),
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant: ("fp8_per_token", True),
}
_LAYOUTS = {
    QuantizationSFLayout.SWIZZLED_128x4: "swizzled_128x4",
    QuantizationSFLayout.LINEAR: "linear",
}


# ---- workspaces ----------------------------------------------------------------------------------


class AllReduceFusionWorkspace:
    """A workspace as FlashInfer's functions pass it about.

    Attributes:
        workspace: The package's own `Workspace`.
        handle: Its number for `torch.ops.cupy_moe_ar.*`.
        quant: Formats of quantised outputs that it was made for.
        rank: Own rank.
        world_size: Number of ranks.
        backend: "trtllm": the one of FlashInfer's backends that has the same patterns.
        workspace_tensor: The workspace itself: what upstream passes as `workspace_ptrs`.
        metadata: Upstream's entries that mean something here: `tp_rank`, `tp_size`,
            `max_token_num`, `hidden_dim`, `use_fp32_lamport`.
    """

    backend = "trtllm"

    def __init__(
        self, workspace: Workspace, dtypes: tuple[DType, ...], quant: tuple[str, ...]
    ) -> None:
        """Wrap a workspace in which these are prepared; for the functions below."""
        self.workspace = workspace
        self.quant = quant
        self.rank = workspace.rank
        self.world_size = workspace.world_size
        self.handle = register(workspace)
        self._dtypes = dtypes
        self._destroyed = False
        self.metadata = {
            "tp_rank": self.rank,
            "tp_size": self.world_size,
            "max_token_num": workspace.max_token_num,
            "hidden_dim": workspace.hidden_dim,
            "use_fp32_lamport": workspace.dtype is DType.FLOAT32,
        }

    @property
    def workspace_tensor(self) -> AllReduceFusionWorkspace:
        """Return itself, to be passed on as `workspace_ptrs`."""
        return self

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: Any,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether a call with these sizes can be made; the same on every rank.

        Args:
            tp_size: Number of ranks.
            num_tokens: Tokens of the call.
            hidden_dim: Elements of a row.
            dtype: Activation dtype, of PyTorch or by name.
            use_oneshot: True: by one-shot; None or False: at all.

        Raises:
            ValueError: `dtype` is none that the package knows.
        """
        activation = DType.parse(dtype)
        return (
            tp_size == self.world_size
            and activation in self._dtypes
            and self.workspace.fits(num_tokens, hidden_dim, activation, use_oneshot=use_oneshot)
        )

    def checkpoint_prepare(self) -> None:
        """Release what ranks share; collective, see `Workspace.checkpoint_prepare`."""
        self.workspace.checkpoint_prepare()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Share memory again; collective, see `Workspace.checkpoint_restore`."""
        self.workspace.checkpoint_restore(comm_backend)

    def destroy(self) -> None:
        """Close the workspace; collective, and nothing when called again.

        It waits a minute at most for ranks that do not come, if the ranks are a process group or an
        mpi4py communicator; another `comm_backend` as long as its `barrier` does.
        """
        if not self._destroyed:
            self._destroyed = True
            unregister(self.handle).close()


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: Any = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    quant: str | Iterable[str] | None = None,
) -> AllReduceFusionWorkspace:
    """Build a workspace for `allreduce_fusion`; collective.

    It takes every call of at most `max_token_num * hidden_dim` elements, and is on the current CUDA
    device.

    Args:
        backend: "auto", "trtllm" or "mnnvl": no difference.
        world_size: Number of ranks; checked against the group.
        rank: Own rank; likewise.
        max_token_num: Most tokens of a call.
        hidden_dim: Elements of a row.
        dtype: torch.bfloat16, float16 or float32: the activations.
        gpus_per_node: None or at least `world_size`: all ranks are on one host.
        comm_backend: FlashInfer's CommBackend, an mpi4py communicator or any other object with
            `Get_rank, Get_size, allgather, bcast, barrier`; None is `group`.
        force_oneshot_support: Leave room for one-shot at every size, not only where it is faster.
        group: torch.distributed process group; None is the world.
        quant: Formats of the quantised patterns that will be called, not an argument of upstream's:
            "fp8_static" (`...FP8Quant`), "nvfp4" (`...FP4Quant`), "fp8_per_token_group"
            (`...PerTokenGroupFP8PackedQuant`), "fp8_per_token" (`...DynamicFP8Quant`).

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: The ranks cannot share memory, or are on several hosts.
        CompileError: A compiler is missing or refused a kernel.
    """
    function = "create_allreduce_fusion_workspace"
    given = {
        "world_size": world_size,
        "rank": rank,
        "max_token_num": max_token_num,
        "hidden_dim": hidden_dim,
        "dtype": dtype,
    }
    faults = [f"{name} is needed" for name, value in given.items() if value is None]
    if backend not in ("auto", "trtllm", "mnnvl"):
        faults.append(f"backend must be 'auto', 'trtllm' or 'mnnvl'; got {backend!r}")
    if faults:
        raise ArgumentError(function, faults)
    if gpus_per_node is not None and gpus_per_node < given["world_size"]:
        raise UnsupportedError(
            f"{function}: {world_size} ranks with {gpus_per_node} GPUs a node are on several "
            "hosts; all ranks must be on one"
        )
    oneshot = max_token_num if force_oneshot_support else None
    return _build(
        function,
        comm_backend,
        group,
        rank,
        world_size,
        max_token_num,
        hidden_dim,
        (dtype,),
        oneshot,
        quant,
    )


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Any = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
    *,
    quant: str | Iterable[str] | None = None,
) -> tuple[Any, ...]:
    """Build a workspace for the `trtllm_*` functions; collective.

    Args:
        tp_rank: Own rank; checked against the group.
        tp_size: Number of ranks; likewise.
        max_token_num: Most tokens of a call.
        hidden_dim: Elements of a row.
        use_fp32_lamport: The activations are float32; else bfloat16 and float16 are prepared.
        group: torch.distributed process group; None is the world.
        create_metadata: Return metadata, too.
        comm_backend: As `create_allreduce_fusion_workspace`; None is `group`.
        use_symm_dev_mem: Return a list of memory handles, too, which is empty here.
        quant: As `create_allreduce_fusion_workspace`.

    Returns:
        As many values as upstream's: what stands for its IPC handles, what stands for its
        `workspace_ptrs` (both are the workspace), memory handles if `use_symm_dev_mem`, and
        metadata if `create_metadata`.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: The ranks cannot share memory.
        CompileError: A compiler is missing or refused a kernel.
    """
    function = "trtllm_create_ipc_workspace_for_all_reduce_fusion"
    if use_symm_dev_mem and not create_metadata:
        raise ArgumentError(function, ["use_symm_dev_mem needs create_metadata"])
    dtypes = (torch.float32,) if use_fp32_lamport else (torch.bfloat16, torch.float16)
    made = _build(
        function,
        comm_backend,
        group,
        tp_rank,
        tp_size,
        max_token_num,
        hidden_dim,
        dtypes,
        None,
        quant,
    )
    handles: list[Any] = [[]] if use_symm_dev_mem else []
    metadata = [made.metadata] if create_metadata else []
    return made, made, *handles, *metadata


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace: Any, group: Any = None) -> None:
    """Destroy what `trtllm_create_ipc_workspace_for_all_reduce_fusion` has made; collective.

    Args:
        workspace: Its first result.
        group: Not used.
    """
    _own(workspace).destroy()


def _build(
    function: str,
    comm_backend: Any,
    process_group: Any,
    rank: Any,
    world_size: Any,
    max_token_num: Any,
    hidden_dim: Any,
    dtypes: tuple[Any, ...],
    max_oneshot_token_num: int | None,
    quant: str | Iterable[str] | None,
) -> AllReduceFusionWorkspace:
    comm = TorchGroup(process_group) if comm_backend is None else comm_backend
    place = (comm.Get_rank(), comm.Get_size())
    if (rank, world_size) != place:
        raise ArgumentError(
            function,
            [
                f"rank {rank} of {world_size} was given, but in the group this is rank {place[0]} "
                f"of {place[1]}"
            ],
        )
    formats = (quant,) if isinstance(quant, str) else tuple(quant or ())
    on_gpu = torch.cuda.is_available() and os.environ.get("MOE_AR_BACKEND") != "cpu"
    workspace = Workspace(
        comm,
        max_token_num=max_token_num,
        hidden_dim=hidden_dim,
        dtype=dtypes[0],
        max_oneshot_token_num=max_oneshot_token_num,
        operations=_OPERATIONS,
        device=torch.cuda.current_device() if on_gpu else None,
    )
    try:
        for other in dtypes[1:]:
            workspace.prepare(dtype=other, operations=_OPERATIONS)
        for each in dtypes if formats else ():
            workspace.prepare(dtype=each, operations=("allreduce",), quant=formats)
    except BaseException:
        workspace.close()
        raise
    return AllReduceFusionWorkspace(workspace, tuple(map(DType.parse, dtypes)), formats)


# ---- calls ---------------------------------------------------------------------------------------


def allreduce_fusion(
    input: Any,  # noqa: A002
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant_out: Any = None,
    scale_out: Any = None,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    scale_factor: Any = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: Any = None,
    moe_reduction_active_experts_token_input: Any = None,
    moe_reduction_token_input: Any = None,
    expanded_idx_to_permuted_idx: Any = None,
    expert_scale_factor: Any = None,
    shared_expert_output: Any = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> Any:
    """Sum over ranks, with what `pattern` adds before and behind, in one launch.

    T is the activation dtype. As upstream, `output` is written by `kAllReduce` and
    `kMoEReductionARResidualRMSNorm` only.

    Args:
        input: T `[token_num, hidden_dim]`: this rank's part; with `kMoEFinalizeARResidualRMSNorm`
            the permuted rows `[num_permuted_rows, hidden_dim]`. Not read with
            `kMoEReductionARResidualRMSNorm`.
        workspace: From `create_allreduce_fusion_workspace`.
        pattern: One of `AllReduceFusionPattern`; the workspace must have been made for the format
            of a quantised one.
        launch_with_pdl: Start before the previous kernel of the stream has ended.
        trigger_completion_at_end: When the next kernel may start.
        output: T `[token_num, hidden_dim]`, written: the total. New with `kAllReduce` if None.
        residual_out: T `[token_num, hidden_dim]`, written: total + residual_in. Not if None.
        norm_out: T `[token_num, hidden_dim]`, written: its RMSNorm. New if None, but not with
            `kMoEReductionARResidualRMSNorm`. Of the quantised patterns those with `Out` need it,
            the others leave it alone.
        quant_out: Written by the quantised patterns, which need it: E4M3 `[token_num, hidden_dim]`
            as float8_e4m3fn or uint8; FP4 `[token_num, hidden_dim / 2]` as uint8, the first of two
            codes in the low half.
        scale_out: Written, padding as zeros. FP4: E4M3, an element for 16, in any shape of the
            right size, as uint8, float8_e4m3fn or int32: `[token_num, hidden_dim / 16]` with
            `LINEAR`, else both padded, to 128 and 4. Dynamic FP8: float32 `[token_num, 1]`.
            Groups: UE8M0, four to an int32, `[token_num, ceil(hidden_dim / 512)]` with strides of 1
            and `token_num` padded to 4; where that is padded a second launch copies them, and the
            padding between columns is left alone. Not written by FP8 with a given scale.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank; needed but for
            `kAllReduce`.
        rms_gamma: T or float32 `[hidden_dim]`; likewise.
        rms_eps: Added to the mean of squares.
        scale_factor: FP8 with a given scale: divides x; FP4: 448 * 6 / max, the inverse of what the
            package's own operations take. A number or a float32 tensor of one element, read at each
            launch; the inverse of a tensor is a small launch of its own.
        layout_code: FP4: `SWIZZLED_128x4` (None) or `LINEAR`.
        use_oneshot: True or False: one-shot or two-shot; None: the faster. Never changes bits.
        fp32_acc: No difference: sums are always FP32.
        moe_reduction_device_num_experts: Active experts of this rank.
        moe_reduction_scale_input: float32 `[num_experts, token_num]`, or flat; the order in which
            upstream's kernels read it, too.
        moe_reduction_active_experts_token_input: T `[num_experts, token_num, hidden_dim]`, or flat
            in this order.
        moe_reduction_token_input: T `[token_num, hidden_dim]`: this rank's partial of the shared
            expert; None adds nothing.
        expanded_idx_to_permuted_idx: int32 `[token_num, top_k]`: rows of the routes, -1 for none.
        expert_scale_factor: T or float32 `[token_num, top_k]`; None is 1. The routed factor, if
            there is one, is part of it.
        shared_expert_output: T `[token_num, hidden_dim]`: this rank's partial of the shared
            expert; None adds nothing.
        block_quant_group_size: 128, which groups need.
        weight_bias: Added to gamma: 1 for models that store gamma - 1.
        moe_finalize_backend: "trtllm" or "cake": no difference.

    Returns:
        `output` of `kAllReduce`, `quant_out` of a quantised pattern, else `norm_out`; in
        `kMoEReductionARResidualRMSNorm` the first of `norm_out`, `residual_out` and `output` that
        was given.

    Raises:
        ArgumentError: Arguments are wrong; nothing was launched.
        UnsupportedError: Quantisation that cannot be mapped.
        WorkspaceError: The workspace was destroyed, or was not made for the dtype or format.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.
    """
    function = "allreduce_fusion"
    chosen = _pattern(function, pattern)
    if chosen not in _QUANTISED:
        _refuse_quantised(function, chosen, quant_out, scale_out)
    _check_backend(function, "moe_finalize_backend", moe_finalize_backend)
    options: dict[str, Any] = {
        "launch_with_pdl": launch_with_pdl,
        "trigger_completion_at_end": trigger_completion_at_end,
        "use_oneshot": use_oneshot,
    }
    handle = _own(workspace).handle
    if chosen == _Pattern.kAllReduce:
        output = torch.empty_like(input) if output is None else output
        _OPERATORS.allreduce_fusion_out(input, handle, allreduce_out=output, **options)
        return output
    needed = {"residual_in": residual_in, "rms_gamma": rms_gamma}
    if chosen == _Pattern.kMoEReductionARResidualRMSNorm:
        needed["moe_reduction_device_num_experts"] = moe_reduction_device_num_experts
        needed["moe_reduction_scale_input"] = moe_reduction_scale_input
        needed["moe_reduction_active_experts_token_input"] = (
            moe_reduction_active_experts_token_input
        )
    if chosen in _QUANTISED:
        fmt, with_norm = FORMATS[_QUANTISED[chosen][0]], _QUANTISED[chosen][1]
        needed["quant_out"] = quant_out
        if with_norm:
            needed["norm_out"] = norm_out
        if fmt.has_scales:
            needed["scale_out"] = scale_out
        if fmt.needs_scale:
            needed["scale_factor"] = scale_factor
        if fmt.name == "fp8_per_token_group":
            needed["block_quant_group_size"] = block_quant_group_size
    if chosen == _Pattern.kMoEFinalizeARResidualRMSNorm:
        needed["expanded_idx_to_permuted_idx"] = expanded_idx_to_permuted_idx
    missing = [f"{name} is needed" for name, value in needed.items() if value is None]
    if missing:
        raise ArgumentError(function, missing)
    options.update(
        residual_in=residual_in,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        weight_bias=weight_bias,
        residual_out=residual_out,
    )
    if chosen == _Pattern.kMoEReductionARResidualRMSNorm:
        tokens, hidden = residual_in.shape[0], residual_in.shape[-1]
        _reduce_experts(
            handle,
            (moe_reduction_device_num_experts, tokens, hidden),
            moe_reduction_active_experts_token_input,
            moe_reduction_scale_input,
            moe_reduction_token_input=moe_reduction_token_input,
            moe_allreduce_out=output,
            norm_out=norm_out,
            **options,
        )
        return next(x for x in (norm_out, residual_out, output) if x is not None)
    if chosen in _QUANTISED:
        _quantised(
            function,
            _own(workspace),
            chosen,
            input,
            scale_out,
            scale_factor,
            layout_code,
            block_quant_group_size,
            norm_out=norm_out if with_norm else None,
            quant_out=quant_out,
            **options,
        )
        return quant_out
    norm_out = torch.empty_like(residual_in) if norm_out is None else norm_out
    if chosen == _Pattern.kMoEFinalizeARResidualRMSNorm:
        _OPERATORS.moe_finalize_allreduce_fusion_out(
            input,
            handle,
            expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
            expert_scale_factor=expert_scale_factor,
            shared_expert_output=shared_expert_output,
            norm_out=norm_out,
            **options,
        )
    else:
        _OPERATORS.allreduce_fusion_out(input, handle, norm_out=norm_out, **options)
    return norm_out


def trtllm_allreduce_fusion(
    allreduce_in: Any,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Any,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Any,
    residual_in: Any,
    residual_out: Any,
    norm_out: Any,
    quant_out: Any,
    scale_out: Any,
    rms_gamma: Any,
    rms_eps: float | None,
    scale_factor: Any,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """`allreduce_fusion` with sizes of their own, so that tensors may be flat.

    Args:
        allreduce_in: T, `token_num * hidden_dim` elements: this rank's part.
        world_size: Number of ranks; checked.
        world_rank: Own rank; checked.
        token_num: Tokens of the call.
        hidden_dim: Elements of a row.
        workspace_ptrs: The workspace.
        launch_with_pdl: As `allreduce_fusion`, and so the next two.
        trigger_completion_at_end: When the next kernel may start.
        fp32_acc: No difference.
        pattern_code: Of an all-reduce.
        use_oneshot: As `allreduce_fusion`.
        allreduce_out: T, as large: the total, written by `kAllReduce`.
        residual_in: T, as large, the same on every rank.
        residual_out: T, as large, written.
        norm_out: T, as large, written.
        quant_out: As `allreduce_fusion`, or flat.
        scale_out: As `allreduce_fusion`.
        rms_gamma: T or float32 `[hidden_dim]`.
        rms_eps: Added to the mean of squares; None is 1e-6.
        scale_factor: As `allreduce_fusion`, and so `layout_code` and `block_quant_group_size`.
        layout_code: Where the scales of FP4 lie.
        metadata: Of the workspace; not used.
        block_quant_group_size: Elements of a group.
        weight_bias: Added to gamma; None is 0.

    Raises:
        ArgumentError: Arguments are wrong; nothing was launched.
        UnsupportedError: Quantisation that cannot be mapped.
        WorkspaceError: The workspace was destroyed, or was not made for the dtype or format.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.
    """
    function = "trtllm_allreduce_fusion"
    workspace = _at(function, workspace_ptrs, world_rank, world_size)
    pattern = _pattern(function, pattern_code)
    if pattern in (_Pattern.kMoEReductionARResidualRMSNorm, _Pattern.kMoEFinalizeARResidualRMSNorm):
        raise ArgumentError(
            function, [f"pattern_code must be that of an all-reduce; got {pattern}"]
        )
    shape = (token_num, hidden_dim)
    quant, _ = _QUANTISED.get(pattern, ("fp8_static", False))
    columns = hidden_dim * FORMATS[quant].code_bits // 8
    allreduce_fusion(
        _unflattened(allreduce_in, shape),
        workspace,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        _unflattened(allreduce_out, shape),
        _unflattened(residual_out, shape),
        _unflattened(norm_out, shape),
        _unflattened(quant_out, (token_num, columns)),
        scale_out,
        _unflattened(residual_in, shape),
        rms_gamma,
        1e-6 if rms_eps is None else rms_eps,
        scale_factor,
        layout_code,
        use_oneshot=use_oneshot,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias or 0.0,
    )


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Any,
    launch_with_pdl: bool,
    residual_in: Any,
    rms_gamma: Any,
    rms_eps: float,
    scale_factor: Any,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: Any,
    moe_reduction_active_experts_token_input: Any,
    moe_reduction_token_input: Any,
    layout_code: int | None,
    moe_allreduce_out: Any,
    residual_out: Any,
    norm_out: Any,
    quant_out: Any,
    scale_out: Any,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Sum over own experts, then over ranks, add the residual, take the RMSNorm; in one launch.

    Tensors of rows may be flat.

    Args:
        world_size: Number of ranks; checked.
        world_rank: Own rank; checked.
        token_num: Tokens of the call.
        hidden_dim: Elements of a row.
        workspace_ptrs: The workspace.
        launch_with_pdl: Start before the previous kernel of the stream has ended.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank.
        rms_gamma: T or float32 `[hidden_dim]`.
        rms_eps: Added to the mean of squares.
        scale_factor: Of quantised outputs; not used.
        moe_reduction_device_num_experts: Active experts of this rank.
        moe_reduction_scale_input: float32 `[num_experts, token_num]`.
        moe_reduction_active_experts_token_input: T `[num_experts, token_num, hidden_dim]`.
        moe_reduction_token_input: T `[token_num, hidden_dim]`: this rank's partial of the shared
            expert; None adds nothing.
        layout_code: Of quantised outputs; not used.
        moe_allreduce_out: T `[token_num, hidden_dim]`, written: the total.
        residual_out: T `[token_num, hidden_dim]`, written.
        norm_out: T `[token_num, hidden_dim]`, written. Any of the three may be None, not all.
        quant_out: Must be None.
        scale_out: Must be None.
        weight_bias: Added to gamma; None is 0.
        backend: "trtllm" or "cake": no difference.

    Raises:
        ArgumentError: Arguments are wrong; nothing was launched.
        UnsupportedError: An output is quantised.
        WorkspaceError: The workspace was destroyed, or its dtype is another.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.
    """
    function = "trtllm_moe_allreduce_fusion"
    workspace = _at(function, workspace_ptrs, world_rank, world_size)
    _refuse_quantised(function, _Pattern.kMoEReductionARResidualRMSNorm, quant_out, scale_out)
    _check_backend(function, "backend", backend)
    shape = (token_num, hidden_dim)
    rows = {
        "moe_reduction_token_input": moe_reduction_token_input,
        "residual_in": residual_in,
        "moe_allreduce_out": moe_allreduce_out,
        "residual_out": residual_out,
        "norm_out": norm_out,
    }
    _reduce_experts(
        workspace.handle,
        (moe_reduction_device_num_experts, *shape),
        moe_reduction_active_experts_token_input,
        moe_reduction_scale_input,
        **{name: _unflattened(tensor, shape) for name, tensor in rows.items()},
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        weight_bias=weight_bias or 0.0,
        launch_with_pdl=launch_with_pdl,
    )


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: Any,
    residual_in: Any,
    norm_weight: Any,
    expanded_idx_to_permuted_idx: Any,
    norm_out: Any,
    residual_out: Any,
    quant_out: Any,
    scale_out: Any,
    workspace_ptrs: Any,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: Any,
    expert_scale_factor: Any,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Finalize a MoE layer, sum over ranks, add the residual, take the RMSNorm; in one launch.

    Args:
        allreduce_in: T `[num_permuted_rows, hidden_dim]`: this rank's expert outputs in permuted,
            padded order.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank.
        norm_weight: T or float32 `[hidden_dim]`: gamma.
        expanded_idx_to_permuted_idx: int32 `[token_num, top_k]`: rows of the routes, -1 for none.
        norm_out: T `[token_num, hidden_dim]`, written; None is not.
        residual_out: T `[token_num, hidden_dim]`, written; None is not.
        quant_out: Must be None.
        scale_out: Must be None.
        workspace_ptrs: The workspace.
        launch_with_pdl: Start before the previous kernel of the stream has ended.
        world_rank: Own rank; checked.
        world_size: Number of ranks; checked.
        eps: Added to the mean of squares.
        shared_expert_output: T `[token_num, hidden_dim]`: this rank's partial of the shared
            expert; None adds nothing.
        expert_scale_factor: T or float32 `[token_num, top_k]`; None is 1.
        routed_scaling_factor: Multiplies the routed sum; None is 1.
        weight_bias: Added to gamma; None is 0.
        backend: "trtllm" or "cake": no difference.

    Raises:
        ArgumentError: Arguments are wrong; nothing was launched.
        UnsupportedError: An output is quantised.
        WorkspaceError: The workspace was destroyed, or its dtype is another.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.
    """
    function = "trtllm_moe_finalize_allreduce_fusion"
    workspace = _at(function, workspace_ptrs, world_rank, world_size)
    _refuse_quantised(function, _Pattern.kMoEFinalizeARResidualRMSNorm, quant_out, scale_out)
    _check_backend(function, "backend", backend)
    _OPERATORS.moe_finalize_allreduce_fusion_out(
        allreduce_in,
        workspace.handle,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor,
        shared_expert_output=shared_expert_output,
        routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        residual_in=residual_in,
        rms_gamma=norm_weight,
        rms_eps=eps,
        weight_bias=weight_bias or 0.0,
        residual_out=residual_out,
        norm_out=norm_out,
        launch_with_pdl=launch_with_pdl,
    )


# ---- what several functions share ----------------------------------------------------------------


def _own(workspace: Any) -> AllReduceFusionWorkspace:
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise UnsupportedError(
            "the workspace must be one that cupy_moe_ar.integrations.flashinfer has made; got "
            f"{type(workspace).__name__}: memory of FlashInfer's own cannot be used"
        )
    return workspace


def _at(function: str, workspace: Any, rank: int, world_size: int) -> AllReduceFusionWorkspace:
    """Check that a workspace is of this place in the group."""
    own = _own(workspace)
    if (rank, world_size) != (own.rank, own.world_size):
        raise ArgumentError(
            function,
            [
                f"world_rank and world_size must be the workspace's, {own.rank} and "
                f"{own.world_size}; got {rank} and {world_size}"
            ],
        )
    return own


def _pattern(function: str, pattern: int) -> AllReduceFusionPattern:
    try:
        return AllReduceFusionPattern(pattern)
    except ValueError:
        known = ", ".join(f"{x.value} ({x.name})" for x in AllReduceFusionPattern)
        raise ArgumentError(
            function, [f"pattern must be one of {known}; got {pattern!r}"]
        ) from None


def _refuse_quantised(
    function: str, pattern: AllReduceFusionPattern, quant_out: Any, scale_out: Any
) -> None:
    if quant_out is not None or scale_out is not None:
        raise UnsupportedError(
            f"{function}: {pattern.name} writes no quant_out and scale_out here, since it does not "
            "say in which format; torch.ops.cupy_moe_ar.*_out take quant=, or quantise norm_out"
        )


def _quantised(
    function: str,
    workspace: AllReduceFusionWorkspace,
    pattern: AllReduceFusionPattern,
    rows: Any,
    scale_out: Any,
    scale_factor: Any,
    layout_code: int | None,
    group_size: int | None,
    **options: Any,
) -> None:
    """All-reduce with a quantised output, upstream's scales converted to this package's."""
    quant, _ = _QUANTISED[pattern]
    if quant not in workspace.quant:
        raise WorkspaceError(
            f"{function}: the workspace was not made for {pattern.name}; pass quant={quant!r} to "
            "the function that creates it, since kernels are loaded collectively and never by a "
            "launch"
        )
    options["quant"] = quant
    if FORMATS[quant].needs_scale:
        options["scale_factor"] = scale_factor
    if quant == "nvfp4":
        options["scale_layout"] = _layout(function, layout_code)
        options["scale_factor"] = _inverse(scale_factor)
        options["scale_out"] = (
            scale_out.view(torch.uint8) if scale_out.dtype == torch.int32 else scale_out
        )
    elif quant == "fp8_per_token":
        options["scale_out"] = scale_out
    elif quant == "fp8_per_token_group":
        if group_size != FORMATS[quant].block:
            raise UnsupportedError(
                f"{function}: block_quant_group_size must be {FORMATS[quant].block}, the only size "
                f"of groups that the kernels have; got {group_size}"
            )
        options.update(scale_layout="column_major", scale_dtype="ue8m0")
        options["scale_out"] = _columns(function, scale_out, rows.shape, group_size)
    _OPERATORS.allreduce_fusion_out(rows, workspace.handle, **options)
    if quant == "fp8_per_token_group" and rows.shape[0] % 4:
        scale_out.copy_(options["scale_out"].t()[: rows.shape[0]])


def _layout(function: str, code: int | None) -> str:
    try:
        chosen = QuantizationSFLayout(0 if code is None else code)
    except ValueError:
        known = ", ".join(f"{x.value} ({x.name})" for x in QuantizationSFLayout)
        raise ArgumentError(
            function, [f"layout_code must be one of {known}; got {code!r}"]
        ) from None
    if chosen not in _LAYOUTS:
        raise UnsupportedError(
            f"{function}: the kernels write scales as SWIZZLED_128x4 or LINEAR, not as "
            f"{chosen.name}"
        )
    return _LAYOUTS[chosen]


def _inverse(scale_factor: Any) -> Any:
    if isinstance(scale_factor, torch.Tensor):
        return scale_factor.reciprocal()
    return 1.0 / scale_factor if scale_factor else 0.0  # the operation says what is wrong with 0


def _columns(function: str, scale_out: Any, shape: Any, group_size: int) -> Any:
    """Return whole columns of packed scales, which the kernel writes.

    Upstream's tensor ends with its last token: one that is padded has no room for them.
    """
    tokens, words = shape[0], -(-shape[1] // (4 * group_size))
    column = -(-tokens // 4) * 4
    found = (tuple(scale_out.shape), tuple(scale_out.stride()), scale_out.dtype)
    if found != ((tokens, words), (1, column), torch.int32):
        raise ArgumentError(
            function,
            [
                f"scale_out must be int32 of shape {(tokens, words)} with strides {(1, column)}; "
                f"got {found[2]} of shape {found[0]} with strides {found[1]}"
            ],
        )
    return scale_out.new_empty((words, column)) if tokens % 4 else scale_out.t()


def _check_backend(function: str, name: str, backend: str) -> None:
    if backend not in ("trtllm", "cake"):
        raise ArgumentError(function, [f"{name} must be 'trtllm' or 'cake'; got {backend!r}"])


def _unflattened(tensor: Any, shape: tuple[int, ...]) -> Any:
    """View rows that are flat, wholly or but for the last dimension, in their shape.

    Any other shape is left to the operation's own check: it is never guessed.
    """
    if tensor is None or not tensor.is_contiguous():
        return tensor
    flat = ((math.prod(shape),), (math.prod(shape[:-1]), shape[-1]))
    return tensor.view(shape) if tuple(tensor.shape) in flat else tensor


def _reduce_experts(
    handle: int, shape: tuple[Any, ...], experts: Any, scale: Any, **arguments: Any
) -> None:
    _OPERATORS.moe_reduction_allreduce_fusion_out(
        _unflattened(experts, shape),
        handle,
        moe_reduction_scale_input=_unflattened(scale, shape[:2]),
        **arguments,
    )
