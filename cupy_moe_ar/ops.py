"""The operations. Each is one kernel launch on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arrays import CPU, current_stream, stream_handle
from .call import Call, Home, describe_moe_finalize
from .errors import ArgumentError
from .plan import LaunchShape
from .types import DType
from .workspace import Workspace

__all__ = ["moe_finalize_allreduce_fusion"]


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
    dtype: DType | str | None = None,
    comm_dtype: DType | str | None = None,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
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
            each may be exactly `residual_in` or `shared_expert_output`.
        dtype: T, for arrays whose library has no name for it; None is the workspace's.
        comm_dtype: C: T or float32; None is the workspace's.
        launch_with_pdl: Start before the previous kernel of the stream has ended (programmatic
            dependent launch, sm_90 and newer); what that kernel wrote is waited for.
        trigger_completion_at_end: Let the next kernel start when this one's outputs are written;
            False: as soon as this one runs. Such a kernel must itself wait for this one's end.
        launch_shape: Forces a launch (`plan.launch_shapes`), for measuring; never changes bits.
        stream: CuPy or PyTorch stream, `__cuda_stream__` object or integer handle. None is the
            current stream of the library that `allreduce_in` comes from.

    `token_num` 0 returns at once. Arrays are CuPy, PyTorch or other CUDA arrays (DLPack,
    `__cuda_array_interface__`) on the workspace's device, C-contiguous, rows on 16-byte
    boundaries, `hidden_dim * itemsize` a multiple of 16; NumPy arrays on the CPU backend.

    Raises:
        ArgumentError: A `ValueError` that names every wrong argument; nothing was launched.
        WorkspaceError: The workspace is closed, or not prepared for these dtypes.
        PeerTimeoutError: An earlier launch gave up waiting for a peer.
    """
    function = "moe_finalize_allreduce_fusion"
    home = workspace.home(function)
    handle = 0

    def describe() -> Call:
        nonlocal handle
        call = describe_moe_finalize(
            home,
            allreduce_in=allreduce_in,
            expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
            expert_scale_factor=expert_scale_factor,
            shared_expert_output=shared_expert_output,
            routed_scaling_factor=routed_scaling_factor,
            residual_in=residual_in,
            rms_gamma=rms_gamma,
            rms_eps=rms_eps,
            weight_bias=weight_bias,
            allreduce_out=allreduce_out,
            residual_out=residual_out,
            norm_out=norm_out,
            dtype=dtype,
            comm_dtype=comm_dtype,
            trigger_completion_at_end=trigger_completion_at_end,
        )
        handle = _stream(function, home, stream, allreduce_in)
        return call

    call = _agreed(workspace, function, describe) if workspace.checked else describe()
    workspace.run(call, stream=handle, launch_with_pdl=launch_with_pdl, launch_shape=launch_shape)


def _agreed(workspace: Workspace, function: str, describe: Callable[[], Call]) -> Call:
    """Describe a call and compare it over the group: `MOE_AR_CHECK`."""
    try:
        call = describe()
    except ArgumentError as error:
        workspace.agree(function, error.faults, None)
        raise
    workspace.agree(function, (), call)
    return call


def _stream(function: str, home: Home, stream: Any, array: Any) -> int:
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
                "stream must be given, since allreduce_in is neither a CuPy nor a PyTorch array "
                f"but {type(array).__name__}"
            ],
        )
    return handle
