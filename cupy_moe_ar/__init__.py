"""Fused MoE finalize + all-reduce + residual + RMSNorm, one kernel launch a rank."""

from .call import Call
from .errors import (
    ArgumentError,
    CompileError,
    MoeArError,
    PeerTimeoutError,
    UnsupportedError,
    WorkspaceError,
)
from .ops import moe_finalize_allreduce_fusion
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
    "UnsupportedError",
    "Workspace",
    "WorkspaceError",
    "moe_finalize_allreduce_fusion",
]

__version__ = "0.1.0"
