"""The operations. Each is one kernel launch on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import CPU, current_stream, identity, stream_handle
from .call import (
    Call,
    describe_allgather,
    describe_allreduce,
    describe_moe_finalize,
    describe_moe_finalize_reduce_scatter,
    describe_moe_reduction,
    describe_reduce_scatter,
)
from .checks import Home
from .errors import ArgumentError
from .plan import LaunchShape
from .types import DType
from .workspace import Launch, Workspace

__all__ = [
    "PlannedCall",
    "allgather_residual_rmsnorm",
    "allreduce_fusion",
    "moe_finalize_allreduce_fusion",
    "moe_finalize_reduce_scatter",
    "moe_reduction_allreduce_fusion",
    "plan_allreduce_fusion",
    "plan_moe_finalize_allreduce_fusion",
    "plan_moe_reduction_allreduce_fusion",
    "reduce_scatter",
]

_PLAIN = frozenset((type(None), bool, int, float, str, DType))
_REMEMBERED = 4096  # checked calls that a workspace keeps


def moe_finalize_allreduce_fusion(
    allreduce_in: Any,
    workspace: Workspace,
    *,
    expanded_idx_to_permuted_idx: Any,
    expert_scale_factor: Any = None,
    shared_expert_output: Any = None,
    routed_scaling_factor: float = 1.0,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Finalize a MoE layer, sum over ranks, add the residual, take the RMSNorm; in one launch.

    With T the activation dtype and C the wire dtype, on every rank r and for every token t:

        routed  = sum over k of expert_scale_factor[t, k] * allreduce_in[index[t, k]]    (float32)
        partial = C(routed_scaling_factor * routed + shared_expert_output[t])
        total   = T(sum over r of partial)                   float32, ranks in order, rounded once
        residual_out[t] = T(total + residual_in[t])
        norm_out[t]     = T(residual_out[t] * (weight_bias + rms_gamma)
                            / sqrt(mean(residual_out[t]**2) + rms_eps))

    With C = float32 and a 16-bit T the total stays float32 up to the residual add. Every rank gets
    the same bits, and a token's bits depend on nothing but its inputs. The operation is the
    reduction: do not all-reduce its results again. Method after FlashInfer's
    `trtllm_moe_finalize_allreduce_fusion` and TensorRT-LLM's MoEAllReduce, with float32 sums.

    Args:
        allreduce_in: T `[num_permuted_rows, hidden_dim]`: this rank's expert outputs in permuted,
            padded order. Rows that no index names are not read.
        workspace: Of the group that sums; every rank calls with the same shapes and options.
        expanded_idx_to_permuted_idx: int32 `[token_num, top_k]`: row of each route; an index
            outside 0..num_permuted_rows-1 (such as -1) skips the route, its scale included.
        expert_scale_factor: T or float32 `[token_num, top_k]`: router weights; None is 1.
        shared_expert_output: T `[token_num, hidden_dim]`: this rank's *partial* output of the
            shared expert; it is summed over ranks and not multiplied by the routed factor. May be
            None on some ranks only.
        routed_scaling_factor: Multiplies the routed sum. Many routers have it in the scales
            already: pass 1 then.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank; None adds nothing.
        rms_gamma: T or float32 `[hidden_dim]`, the same on every rank; needed for `norm_out`.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma: 1 for models that store gamma - 1 (Gemma, Qwen3.5).
        allreduce_out: T `[token_num, hidden_dim]`, written: the total.
        residual_out: T `[token_num, hidden_dim]`, written. May be `residual_in` itself.
        norm_out: T `[token_num, hidden_dim]`, written. Outputs may be None, but not all of them;
            each but quantised ones may be exactly `residual_in` or `shared_expert_output`.
        quant: Also writes what `norm_out` holds, or would hold, as codes; the format must have been
            prepared. x is about code * scale, and in nvfp4 * `scale_factor`. Codes are rounded to
            nearest and saturate; a NaN makes its block NaN (`codecs` has the arithmetic):
            - "fp8_static": E4M3; the scale is `scale_factor`.
            - "fp8_per_token_group": E4M3, a scale for 128 elements of a token.
            - "nvfp4": E2M1, an E4M3 scale for 16 elements, and `scale_factor` for all.
            - "mxfp8": E4M3, a UE8M0 scale (a power of two, rounded up) for 32 elements.
            - "fp8_per_token": E4M3, a float32 scale for a token.
        quant_out: uint8 or float8_e4m3fn `[token_num, hidden_dim]`, written; for nvfp4 uint8 or
            float4_e2m1fn_x2 `[token_num, hidden_dim / 2]`, the first of two codes in the low half.
        scale_out: Written, padding as zeros: any shape of `scale_size(...)` bytes. None for
            fp8_static.
        scale_factor: For fp8_static and nvfp4: a positive number, or a float32 array of one element
            on the device, which is read at each launch.
        scale_layout: nvfp4, mxfp8: "swizzled_128x4" (None: tiles as cuBLAS and CUTLASS take them)
            or "linear" `[token_num, hidden_dim / block]`; fp8_per_token_group: "row_major" (None)
            or "column_major" (as DeepGEMM takes it: float32 `[hidden_dim / 128, tokens]`, or UE8M0
            packed into int32 `[hidden_dim / 512, tokens]`; tokens padded to a multiple of 4).
        scale_dtype: fp8_per_token_group: "float32" (None) or "ue8m0".
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        use_oneshot: True: every rank sends its part of every token to every peer; False: to the
            token's owner, which sends the total to every peer; None: the faster of the two, by
            bytes, world size and capacity. Never changes bits.
        launch_with_pdl: Start before the previous kernel of the stream has ended (programmatic
            dependent launch, sm_90 and newer); what that kernel wrote is waited for.
        trigger_completion_at_end: When the next kernel may start: True: when this one's outputs are
            written; False: as soon as this one runs; None: the best of what was measured: when no
            peer is waited for any more, or for many tokens at the end. That kernel must itself wait
            for this one's end.
        launch_shape: Forces a launch (`plan.launch_shapes`), for measuring; never changes bits.
        stream: CuPy, PyTorch or Numba stream, `__cuda_stream__` object or integer handle. None is
            the current stream of the library that `allreduce_in` comes from, CuPy or PyTorch.

    `token_num` 0 returns at once. Arrays are CuPy, PyTorch or other CUDA arrays (DLPack objects or
    capsules, `__cuda_array_interface__`; JAX's as inputs only) on the workspace's device,
    C-contiguous, rows on 16-byte boundaries, `hidden_dim * itemsize` a multiple of 16; NumPy arrays
    or others of the host on the CPU backend.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        Two ranks, threads of this process, on the CPU backend. Rank 0 has one of the token's two
        routes, rank 1 has both.

        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     rank = group.Get_rank()
        ...     rows = np.full((1, 8), 1 + rank, ml_dtypes.bfloat16)
        ...     index = np.array([[0, rank - 1]], np.int32)
        ...     total, norm = np.empty_like(rows), np.empty_like(rows)
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         moe_finalize_allreduce_fusion(
        ...             rows, workspace, expanded_idx_to_permuted_idx=index,
        ...             rms_gamma=np.ones(8, np.float32), allreduce_out=total, norm_out=norm)
        ...     return float(total[0, 0]), float(norm[0, 0])
        >>> run_ranks(2, body)  # 1 on rank 0, 2 + 2 on rank 1
        [(5.0, 1.0), (5.0, 1.0)]
    """
    _launch(
        "moe_finalize_allreduce_fusion",
        describe_moe_finalize,
        workspace,
        {
            "allreduce_in": allreduce_in,
            "expanded_idx_to_permuted_idx": expanded_idx_to_permuted_idx,
            "expert_scale_factor": expert_scale_factor,
            "shared_expert_output": shared_expert_output,
            "routed_scaling_factor": routed_scaling_factor,
            "residual_in": residual_in,
            "rms_gamma": rms_gamma,
            "rms_eps": rms_eps,
            "weight_bias": weight_bias,
            "allreduce_out": allreduce_out,
            "residual_out": residual_out,
            "norm_out": norm_out,
            "quant": quant,
            "quant_out": quant_out,
            "scale_out": scale_out,
            "scale_factor": scale_factor,
            "scale_layout": scale_layout,
            "scale_dtype": scale_dtype,
            "dtype": dtype,
            "comm_dtype": comm_dtype,
            "use_oneshot": use_oneshot,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


def allreduce_fusion(
    allreduce_in: Any,
    workspace: Workspace,
    *,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Sum over ranks, add the residual, take the RMSNorm; in one launch.

    With T the activation dtype and C the wire dtype, for every token t:

        total           = T(sum over r of C(allreduce_in of rank r)[t])   float32, ranks in order
        residual_out[t] = T(total + residual_in[t])
        norm_out[t]     = T(residual_out[t] * (weight_bias + rms_gamma)
                            / sqrt(mean(residual_out[t]**2) + rms_eps))

    With C = float32 and a 16-bit T the total stays float32 up to the residual add. Every rank gets
    the same bits, and a token's bits depend on nothing but its inputs. Method after FlashInfer's
    `allreduce_fusion`, with float32 sums; which outputs are given selects the pattern.

    Args:
        allreduce_in: T `[token_num, hidden_dim]`: this rank's part.
        workspace: Of the group that sums; every rank calls with the same shapes and options.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank; None adds nothing.
        rms_gamma: T or float32 `[hidden_dim]`, the same on every rank; needed for `norm_out`.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma: 1 for models that store gamma - 1 (Gemma, Qwen3.5).
        allreduce_out: T `[token_num, hidden_dim]`, written: the total.
        residual_out: T `[token_num, hidden_dim]`, written.
        norm_out: T `[token_num, hidden_dim]`, written. Outputs may be None, but not all of them;
            each but quantised ones may be exactly `allreduce_in` or `residual_in`.
        quant: As `moe_finalize_allreduce_fusion`, and so the next five.
        quant_out: Codes, written.
        scale_out: Scales, written.
        scale_factor: A scale that is given.
        scale_layout: Of `scale_out`.
        scale_dtype: Of `scale_out`.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        use_oneshot: As `moe_finalize_allreduce_fusion`.
        launch_with_pdl: As `moe_finalize_allreduce_fusion`, and so the next three.
        trigger_completion_at_end: When the next kernel may start.
        launch_shape: Forces a launch, for measuring.
        stream: Where to launch.

    `token_num` 0 returns at once. Arrays are as `moe_finalize_allreduce_fusion` takes them.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     part = np.full((3, 8), 1 + group.Get_rank(), ml_dtypes.bfloat16)
        ...     residual = np.full_like(part, 0.5)
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         allreduce_fusion(part, workspace, residual_in=residual, residual_out=residual)
        ...     return float(residual[2, 7])
        >>> run_ranks(2, body)
        [3.5, 3.5]
    """
    _launch(
        "allreduce_fusion",
        describe_allreduce,
        workspace,
        {
            "allreduce_in": allreduce_in,
            "residual_in": residual_in,
            "rms_gamma": rms_gamma,
            "rms_eps": rms_eps,
            "weight_bias": weight_bias,
            "allreduce_out": allreduce_out,
            "residual_out": residual_out,
            "norm_out": norm_out,
            "quant": quant,
            "quant_out": quant_out,
            "scale_out": scale_out,
            "scale_factor": scale_factor,
            "scale_layout": scale_layout,
            "scale_dtype": scale_dtype,
            "dtype": dtype,
            "comm_dtype": comm_dtype,
            "use_oneshot": use_oneshot,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


def moe_reduction_allreduce_fusion(
    moe_reduction_active_experts_token_input: Any,
    workspace: Workspace,
    *,
    moe_reduction_scale_input: Any,
    moe_reduction_token_input: Any = None,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    moe_allreduce_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    use_oneshot: bool | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Sum over own experts, then over ranks, add the residual, take the RMSNorm; in one launch.

    For small batches, where every active expert of a rank computes every token. On every rank r:

        reduced = sum over e of moe_reduction_scale_input[e, t]
                                * moe_reduction_active_experts_token_input[e, t]         (float32)
        partial = C(reduced + moe_reduction_token_input[t])

    and from there on as `allreduce_fusion`. Method and argument names after FlashInfer's
    `trtllm_moe_allreduce_fusion`, which adds in 16 bits; here all sums are float32. The number of
    experts is a dimension of the input, not an argument.

    Args:
        moe_reduction_active_experts_token_input: T `[num_experts, token_num, hidden_dim]`: what
            each active expert of this rank made of each token. `num_experts` may differ between
            ranks, and be 0.
        workspace: Of the group that sums; every rank calls with the same shapes and options.
        moe_reduction_scale_input: float32 `[num_experts, token_num]`: weight of an expert for a
            token; 0 for one that the token is not routed to.
        moe_reduction_token_input: T `[token_num, hidden_dim]`: this rank's *partial* of the shared
            expert, summed over ranks; None adds nothing, on some ranks only if need be.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank; None adds nothing.
        rms_gamma: T or float32 `[hidden_dim]`, the same on every rank; needed for `norm_out`.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma: 1 for models that store gamma - 1 (Gemma, Qwen3.5).
        moe_allreduce_out: T `[token_num, hidden_dim]`, written: the total.
        residual_out: T `[token_num, hidden_dim]`, written.
        norm_out: T `[token_num, hidden_dim]`, written. Outputs may be None, but not all of them;
            each but quantised ones may be exactly `residual_in` or `moe_reduction_token_input`.
        quant: As `moe_finalize_allreduce_fusion`, and so the next five.
        quant_out: Codes, written.
        scale_out: Scales, written.
        scale_factor: A scale that is given.
        scale_layout: Of `scale_out`.
        scale_dtype: Of `scale_out`.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        use_oneshot: As `moe_finalize_allreduce_fusion`.
        launch_with_pdl: As `moe_finalize_allreduce_fusion`, and so the next three.
        trigger_completion_at_end: When the next kernel may start.
        launch_shape: Forces a launch, for measuring.
        stream: Where to launch.

    `token_num` 0 returns at once. Arrays are as `moe_finalize_allreduce_fusion` takes them.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     rank = group.Get_rank()
        ...     experts = np.full((2, 3, 8), 1 + rank, ml_dtypes.bfloat16)  # two on each rank
        ...     scale = np.array([[1, 0, 0.5], [0, 1, 0.5]], np.float32)
        ...     total = np.empty((3, 8), experts.dtype)
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         moe_reduction_allreduce_fusion(
        ...             experts, workspace, moe_reduction_scale_input=scale,
        ...             moe_allreduce_out=total)
        ...     return total[:, 0].tolist()
        >>> run_ranks(2, body)
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    _launch(
        "moe_reduction_allreduce_fusion",
        describe_moe_reduction,
        workspace,
        {
            "moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input,
            "moe_reduction_scale_input": moe_reduction_scale_input,
            "moe_reduction_token_input": moe_reduction_token_input,
            "residual_in": residual_in,
            "rms_gamma": rms_gamma,
            "rms_eps": rms_eps,
            "weight_bias": weight_bias,
            "moe_allreduce_out": moe_allreduce_out,
            "residual_out": residual_out,
            "norm_out": norm_out,
            "quant": quant,
            "quant_out": quant_out,
            "scale_out": scale_out,
            "scale_factor": scale_factor,
            "scale_layout": scale_layout,
            "scale_dtype": scale_dtype,
            "dtype": dtype,
            "comm_dtype": comm_dtype,
            "use_oneshot": use_oneshot,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


def moe_finalize_reduce_scatter(
    allreduce_in: Any,
    workspace: Workspace,
    *,
    expanded_idx_to_permuted_idx: Any,
    expert_scale_factor: Any = None,
    shared_expert_output: Any = None,
    routed_scaling_factor: float = 1.0,
    reduce_scatter_out: Any,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Finalize a MoE layer and sum over ranks, each rank the tokens it owns; in one launch.

    The first half of `moe_finalize_allreduce_fusion(use_oneshot=False)`:
    `allgather_residual_rmsnorm` is the other. For layers whose tokens are spread over ranks
    (sequence parallelism), or to reduce over hosts in between. A rank owns the tokens
    `workspace.share(token_num)`: a run, of equal lengths or one token more, empty where there are
    fewer tokens than ranks.

        reduce_scatter_out[i] = T(sum over r of partial[share.start + i])

    with `partial` as in `moe_finalize_allreduce_fusion`. With a wire of T the two halves give the
    bits of the whole; with one of float32 the total is rounded to T in between.

    Args:
        allreduce_in: T `[num_permuted_rows, hidden_dim]`: this rank's expert outputs in permuted,
            padded order. Rows that no index names are not read.
        workspace: Of the group that sums; every rank calls with the same shapes and options.
        expanded_idx_to_permuted_idx: int32 `[token_num, top_k]`: row of each route; an index
            outside 0..num_permuted_rows-1 (such as -1) skips the route, its scale included.
        expert_scale_factor: T or float32 `[token_num, top_k]`: router weights; None is 1.
        shared_expert_output: T `[token_num, hidden_dim]`: this rank's *partial* output of the
            shared expert, for all tokens.
        routed_scaling_factor: Multiplies the routed sum.
        reduce_scatter_out: T `[share, hidden_dim]`, written: totals of the own tokens. Overlaps
            nothing.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        launch_with_pdl: As `moe_finalize_allreduce_fusion`, and so the next three.
        trigger_completion_at_end: When the next kernel may start.
        launch_shape: Forces a launch, for measuring.
        stream: Where to launch.

    `token_num` 0 returns at once. Arrays are as `moe_finalize_allreduce_fusion` takes them.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     rows = np.full((1, 8), 1 + group.Get_rank(), ml_dtypes.bfloat16)
        ...     index = np.zeros((3, 1), np.int32)  # every token is routed to that row
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         own = workspace.share(3)
        ...         total = np.empty((own.stop - own.start, 8), rows.dtype)
        ...         moe_finalize_reduce_scatter(
        ...             rows, workspace, expanded_idx_to_permuted_idx=index,
        ...             reduce_scatter_out=total)
        ...     return own, total[:, 0].tolist()
        >>> run_ranks(2, body)
        [(slice(0, 2, None), [3.0, 3.0]), (slice(2, 3, None), [3.0])]
    """
    _launch(
        "moe_finalize_reduce_scatter",
        describe_moe_finalize_reduce_scatter,
        workspace,
        {
            "allreduce_in": allreduce_in,
            "expanded_idx_to_permuted_idx": expanded_idx_to_permuted_idx,
            "expert_scale_factor": expert_scale_factor,
            "shared_expert_output": shared_expert_output,
            "routed_scaling_factor": routed_scaling_factor,
            "reduce_scatter_out": reduce_scatter_out,
            "dtype": dtype,
            "comm_dtype": comm_dtype,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


def reduce_scatter(
    allreduce_in: Any,
    workspace: Workspace,
    *,
    reduce_scatter_out: Any,
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Sum over ranks, each rank the tokens it owns; in one launch.

    The first half of `allreduce_fusion(use_oneshot=False)`; see `moe_finalize_reduce_scatter` for
    who owns what.

        reduce_scatter_out[i] = T(sum over r of C(allreduce_in of rank r)[share.start + i])

    Args:
        allreduce_in: T `[token_num, hidden_dim]`: this rank's part of all tokens.
        workspace: Of the group that sums; every rank calls with the same shapes and options.
        reduce_scatter_out: T `[share, hidden_dim]`, written: totals of the own tokens. Overlaps
            nothing.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        launch_with_pdl: As `moe_finalize_allreduce_fusion`, and so the next three.
        trigger_completion_at_end: When the next kernel may start.
        launch_shape: Forces a launch, for measuring.
        stream: Where to launch.

    `token_num` 0 returns at once. Arrays are as `moe_finalize_allreduce_fusion` takes them.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        As `moe_finalize_reduce_scatter`, whose example has the same outputs.

        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     part = np.full((3, 8), 1 + group.Get_rank(), ml_dtypes.bfloat16)
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         total = np.empty_like(part[workspace.share(3)])
        ...         reduce_scatter(part, workspace, reduce_scatter_out=total)
        ...     return total[:, 0].tolist()
        >>> run_ranks(2, body)
        [[3.0, 3.0], [3.0]]
    """
    _launch(
        "reduce_scatter",
        describe_reduce_scatter,
        workspace,
        {
            "allreduce_in": allreduce_in,
            "reduce_scatter_out": reduce_scatter_out,
            "dtype": dtype,
            "comm_dtype": comm_dtype,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


def allgather_residual_rmsnorm(
    allgather_in: Any,
    workspace: Workspace,
    *,
    residual_in: Any = None,
    rms_gamma: Any = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    allgather_out: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    quant: str | None = None,
    quant_out: Any = None,
    scale_out: Any = None,
    scale_factor: Any = None,
    scale_layout: str | None = None,
    scale_dtype: str | None = None,
    dtype: DType | str | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool | None = None,
    launch_shape: LaunchShape | None = None,
    stream: Any = None,
) -> None:
    """Gather every rank's tokens, add the residual, take the RMSNorm; in one launch.

    The second half of the all-reduces with `use_oneshot=False`; see `moe_finalize_reduce_scatter`
    for who owns what. Rows travel as T; -0.0 arrives as +0.0.

    Args:
        allgather_in: T `[share, hidden_dim]`: rows of the tokens `workspace.share(token_num)`.
        workspace: Of the group that gathers; every rank calls with the same shapes and options.
        residual_in: T `[token_num, hidden_dim]`, the same on every rank; None adds nothing.
        rms_gamma: T or float32 `[hidden_dim]`, the same on every rank; needed for `norm_out`.
        rms_eps: Added to the mean of squares.
        weight_bias: Added to gamma: 1 for models that store gamma - 1 (Gemma, Qwen3.5).
        allgather_out: T `[token_num, hidden_dim]`, written: the rows of all ranks.
        residual_out: T `[token_num, hidden_dim]`, written: rows + residual_in.
        norm_out: T `[token_num, hidden_dim]`, written: the norm of residual_out. Outputs may be
            None, but not all of them; each but quantised ones may be exactly `residual_in`.
        quant: As `moe_finalize_allreduce_fusion`, and so the next five.
        quant_out: Codes, written.
        scale_out: Scales, written.
        scale_factor: A scale that is given.
        scale_layout: Of `scale_out`.
        scale_dtype: Of `scale_out`.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        launch_with_pdl: As `moe_finalize_allreduce_fusion`, and so the next three.
        trigger_completion_at_end: When the next kernel may start.
        launch_shape: Forces a launch, for measuring.
        stream: Where to launch.

    `token_num` 0 returns at once. Arrays are as `moe_finalize_allreduce_fusion` takes them.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, unprepared for these dtypes, or on another stream.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         every = np.arange(3, dtype=np.float32).astype(ml_dtypes.bfloat16)
        ...         rows = np.repeat(every[workspace.share(3), None], 8, axis=1)
        ...         gathered = np.empty((3, 8), rows.dtype)
        ...         allgather_residual_rmsnorm(rows, workspace, allgather_out=gathered)
        ...     return gathered[:, 0].tolist()
        >>> run_ranks(2, body)
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    _launch(
        "allgather_residual_rmsnorm",
        describe_allgather,
        workspace,
        {
            "allgather_in": allgather_in,
            "residual_in": residual_in,
            "rms_gamma": rms_gamma,
            "rms_eps": rms_eps,
            "weight_bias": weight_bias,
            "allgather_out": allgather_out,
            "residual_out": residual_out,
            "norm_out": norm_out,
            "quant": quant,
            "quant_out": quant_out,
            "scale_out": scale_out,
            "scale_factor": scale_factor,
            "scale_layout": scale_layout,
            "scale_dtype": scale_dtype,
            "dtype": dtype,
            "trigger_completion_at_end": trigger_completion_at_end,
        },
        launch_with_pdl=launch_with_pdl,
        launch_shape=launch_shape,
        stream=stream,
    )


class PlannedCall:
    """A call that was checked and planned once, to be launched any number of times.

    It keeps its arrays. What they hold is read at each launch; in a CUDA graph too.
    """

    __slots__ = ("_arrays", "_launch", "_stream")

    def __init__(self, launch: Launch, stream: int, arrays: dict[str, Any]) -> None:
        """Bind; made by the `plan_*` functions."""
        self._launch = launch
        self._stream = stream
        self._arrays = arrays

    def run(self, stream: Any = None) -> None:
        """Launch, and do nothing else.

        Args:
            stream: As the operation's; None is the stream of the time of planning.

        Raises:
            WorkspaceError: The workspace was closed, or is on another stream.
            PeerTimeoutError: An earlier launch gave up waiting for a peer.
        """
        self._launch.run(self._stream if stream is None else stream_handle(stream))


def plan_moe_finalize_allreduce_fusion(
    allreduce_in: Any, workspace: Workspace, **arguments: Any
) -> PlannedCall:
    """Check and plan a `moe_finalize_allreduce_fusion`, whose arguments it takes.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument.
        WorkspaceError: The workspace is closed, or unprepared for these dtypes.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from cupy_moe_ar.testing import run_ranks
        >>> def body(group):
        ...     part = np.ones((3, 8), ml_dtypes.bfloat16)
        ...     total = np.empty_like(part)
        ...     with Workspace(group, max_token_num=4, hidden_dim=8, backend="cpu") as workspace:
        ...         planned = plan_allreduce_fusion(part, workspace, allreduce_out=total)
        ...         for step in range(3):
        ...             part[:] = step
        ...             planned.run()
        ...     return float(total[0, 0])
        >>> run_ranks(2, body)
        [4.0, 4.0]
    """
    first = {"allreduce_in": allreduce_in}
    function = "moe_finalize_allreduce_fusion"
    return _plan(function, describe_moe_finalize, workspace, {**first, **arguments})


def plan_allreduce_fusion(allreduce_in: Any, workspace: Workspace, **arguments: Any) -> PlannedCall:
    """Check and plan an `allreduce_fusion`, whose arguments it takes.

    Raises and is used as `plan_moe_finalize_allreduce_fusion`.
    """
    first = {"allreduce_in": allreduce_in}
    return _plan("allreduce_fusion", describe_allreduce, workspace, {**first, **arguments})


def plan_moe_reduction_allreduce_fusion(
    moe_reduction_active_experts_token_input: Any, workspace: Workspace, **arguments: Any
) -> PlannedCall:
    """Check and plan a `moe_reduction_allreduce_fusion`, whose arguments it takes.

    Raises and is used as `plan_moe_finalize_allreduce_fusion`.
    """
    first = {"moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input}
    function = "moe_reduction_allreduce_fusion"
    return _plan(function, describe_moe_reduction, workspace, {**first, **arguments})


def _plan(
    function: str, describe: Callable[..., Call], workspace: Workspace, arguments: dict[str, Any]
) -> PlannedCall:
    stream = arguments.pop("stream", None)
    options: dict[str, Any] = {
        name: arguments.pop(name)
        for name in ("launch_with_pdl", "launch_shape")
        if name in arguments
    }
    settled = _settled(function, describe, workspace, arguments, options, stream)
    return PlannedCall(*settled, arguments)


def _launch(
    function: str,
    describe: Callable[..., Call],
    workspace: Workspace,
    arguments: dict[str, Any],
    *,
    launch_with_pdl: bool,
    launch_shape: LaunchShape | None,
    stream: Any,
) -> None:
    """Check, then launch on the stream of the first of `arguments` unless one is given.

    A call that was made before with the same arrays at the same addresses is not checked again.
    """
    home = workspace.home(function)
    options: Any = {"launch_with_pdl": launch_with_pdl, "launch_shape": launch_shape}
    launch, key = None, None
    if not workspace.checked:
        with contextlib.suppress(TypeError, ValueError):  # `describe` puts them into words
            key = (function, *options.values(), *map(_identity, arguments.values()))
            launch = workspace.launches.get(key)
    if launch is not None:
        launch.run(_stream(function, home, stream, arguments))
        return
    launch, handle = _settled(function, describe, workspace, arguments, options, stream)
    if key is not None:
        if len(workspace.launches) >= _REMEMBERED:
            workspace.launches.clear()
        workspace.launches[key] = launch
    launch.run(handle)


def _identity(argument: Any) -> Any:
    """Return what of an argument a checked call depends on."""
    if argument.__class__ in _PLAIN:
        return argument
    return identity(argument)


def _settled(
    function: str,
    describe: Callable[..., Call],
    workspace: Workspace,
    arguments: dict[str, Any],
    options: dict[str, Any],
    stream: Any,
) -> tuple[Launch, int]:
    """Check and plan a call and find its stream; with `MOE_AR_CHECK` compare it over the group."""
    home = workspace.home(function)

    call: Call | None = None
    faults: Sequence[str] = ()
    try:
        call = describe(home, **arguments)
        launch = workspace.plan(function, call, **options)
        return launch, _stream(function, home, stream, arguments)
    except ArgumentError as error:
        call, faults = None, error.faults
        raise
    finally:
        # Whatever became of the call here, the peers may be waiting.
        if workspace.checked:
            workspace.agree(function, faults, call, options.get("launch_shape"))


def _stream(function: str, home: Home, stream: Any, arguments: dict[str, Any]) -> int:
    source, array = next(iter(arguments.items()))
    if home.device == CPU:
        if stream is not None:
            raise ArgumentError(function, [f"stream must be None on the CPU; got {stream!r}"])
        return 0
    try:
        handle = current_stream(array) if stream is None else stream_handle(stream)
    except (TypeError, ValueError) as error:
        raise ArgumentError(function, [f"stream: {error}"]) from error
    if handle is None:
        raise ArgumentError(
            function,
            [
                f"stream must be given, since {source} is neither a CuPy nor a PyTorch array but "
                f"{type(array).__name__}"
            ],
        )
    return handle
