"""Fused MoE finalize + all-reduce + residual + RMSNorm, one kernel launch a rank."""

from .call import Call
from .codecs import dequantize
from .errors import (
    ArgumentError,
    CompileError,
    MoeArError,
    PeerTimeoutError,
    UnsupportedError,
    WorkspaceError,
)
from .formats import quant_size, scale_size
from .ops import (
    PlannedCall,
    allgather_residual_rmsnorm,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_finalize_reduce_scatter,
    moe_reduction_allreduce_fusion,
    plan_allreduce_fusion,
    plan_moe_finalize_allreduce_fusion,
    plan_moe_reduction_allreduce_fusion,
    reduce_scatter,
)
from .plan import LaunchShape
from .types import DType
from .workspace import Workspace

__all__ = [
    "ArgumentError",
    "Call",
    "CompileError",
    "DType",
    "LaunchShape",
    "MoeArError",
    "PeerTimeoutError",
    "PlannedCall",
    "UnsupportedError",
    "Workspace",
    "WorkspaceError",
    "allgather_residual_rmsnorm",
    "allreduce_fusion",
    "dequantize",
    "moe_finalize_allreduce_fusion",
    "moe_finalize_reduce_scatter",
    "moe_reduction_allreduce_fusion",
    "plan_allreduce_fusion",
    "plan_moe_finalize_allreduce_fusion",
    "plan_moe_reduction_allreduce_fusion",
    "quant_size",
    "reduce_scatter",
    "scale_size",
]

__version__ = "0.1.0"
