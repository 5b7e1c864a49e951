"""PyTorch: groups of torch.distributed, and the operations as `torch.ops.cupy_moe_ar.*`.

Importing this module registers the operators. PyTorch's dispatcher passes numbers and tensors, so
an operator knows its workspace by an integer:

    import torch.distributed as dist
    from cupy_moe_ar import Workspace
    from cupy_moe_ar.integrations.torch import TorchGroup, register, unregister

    dist.init_process_group()                                # started by torchrun
    workspace = Workspace(TorchGroup(), max_token_num=128, hidden_dim=7168)
    handle = register(workspace)
    residual, norm = torch.ops.cupy_moe_ar.moe_finalize_allreduce_fusion(
        rows, handle, expanded_idx_to_permuted_idx=index, expert_scale_factor=scales,
        residual_in=residual, rms_gamma=gamma)

Every operation of the package has two operators. The one that ends in `_out` takes the operation's
outputs, which it declares as mutated, and returns nothing. The other returns new tensors:

| operator | returns |
|---|---|
| `moe_finalize_allreduce_fusion`, `moe_reduction_allreduce_fusion`, `allreduce_fusion`, `allgather_residual_rmsnorm` | `(residual_out, norm_out)`; `rms_gamma` is needed, in the last one `residual_in` too |
| `allreduce` (`allreduce_fusion` without the rest) | the total |
| `moe_finalize_reduce_scatter`, `reduce_scatter` | the totals of the own tokens |

Arguments are the operations', by name, but `stream` (it is PyTorch's current one), `launch_shape` and
`dtype` (the tensor's). Quantised outputs (`quant`, `quant_out`, `scale_out` and what goes with them)
are those of the `_out` operators; `scale_factor` is a tensor or a number. Numbers of tokens may be symbolic: `torch.compile(dynamic=True)` compiles once
for all of them. A graph keeps the handle as a constant. Every rank must compile the same code, so
that its compiler keeps, drops and orders the same operators. There are no gradients. PyTorch 2.8 or
newer.
"""  # noqa: E501

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError, WorkspaceError
from ..ops import (
    allgather_residual_rmsnorm,
    allreduce_fusion,
    moe_finalize_allreduce_fusion,
    moe_finalize_reduce_scatter,
    moe_reduction_allreduce_fusion,
    reduce_scatter,
)
from ..types import DType
from ..workspace import Workspace

__all__ = ["TorchGroup", "register", "unregister"]


# ---- groups --------------------------------------------------------------------------------------


class TorchGroup:
    """The ranks of a torch.distributed process group, as `Workspace` wants them.

    Objects travel over gloo: over the group itself if that is its backend, else over a gloo group
    of the same ranks that the constructor makes. NCCL is never used.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Wrap a process group; collective over it unless its backend is gloo.

        Args:
            process_group: None is the world. Ranks are those of this group.

        Raises:
            UnsupportedError: torch.distributed is not initialised, or this process is not in the
                group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "torch.distributed is not initialised; call init_process_group first"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if dist.get_rank(group) < 0:
            raise UnsupportedError("this process is not in the process group")
        if dist.get_backend(group) != "gloo":
            group = dist.new_group(
                dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
            )
        self._group = group

    def Get_rank(self) -> int:
        """Return the own rank in the group."""
        return int(dist.get_rank(self._group))

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return int(dist.get_world_size(self._group))

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        told: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(told, sendobj, group=self._group)
        return told

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        told = [obj]
        source = dist.get_global_rank(self._group, root)
        dist.broadcast_object_list(told, src=source, group=self._group)
        return told[0]

    def barrier(self) -> None:
        """Return once every rank has come here."""
        dist.barrier(group=self._group)

    def meet(self, seconds: float) -> bool:
        """Wait for every rank to come here; return False if one is gone or after `seconds`."""
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True


# ---- workspaces ----------------------------------------------------------------------------------

_workspaces: dict[int, Workspace] = {}
_handles = itertools.count(1)


def register(workspace: Workspace) -> int:
    """Return a new number by which the operators know a workspace, and keep it until `unregister`.

    Handles count from 1 in every process. Ranks of one process have a workspace each, so a handle
    each.
    """
    handle = next(_handles)
    _workspaces[handle] = workspace
    return handle


def unregister(handle: int) -> Workspace:
    """Forget a handle and return its workspace, which stays open.

    Raises:
        WorkspaceError: No workspace has this handle.
    """
    workspace = _registered("unregister", handle)
    del _workspaces[handle]
    return workspace


def _registered(function: str, handle: int) -> Workspace:
    workspace = _workspaces.get(handle)
    if workspace is None:
        raise WorkspaceError(
            f"{function}: no workspace has the handle {handle}; register(workspace) returns one, "
            "which is good in its own process until unregister"
        )
    return workspace


# ---- operators -----------------------------------------------------------------------------------

_ROUTES = (
    "Tensor expanded_idx_to_permuted_idx, Tensor? expert_scale_factor=None, "
    "Tensor? shared_expert_output=None, float routed_scaling_factor=1.0"
)
_NORM = "Tensor? rms_gamma=None, float rms_eps=1e-06, float weight_bias=0.0"
_RESIDUAL_NORM = f"Tensor? residual_in=None, {_NORM}"
_PDL = "bool launch_with_pdl=False, bool? trigger_completion_at_end=None"
_WIRE = f"str? comm_dtype=None, {_PDL}"
_ALLREDUCE = f"bool? use_oneshot=None, {_WIRE}"
_QUANT = "str? quant=None, str? scale_layout=None, str? scale_dtype=None"
# By overload: a schema has no type for a tensor or a number.
_SCALES = {"": "Tensor? scale_factor=None", ".number": "float scale_factor"}

_Tensors = tuple[Any, ...]
# From the first tensor, the handle and the other arguments.
_Allocate = Callable[[Any, int, dict[str, Any]], _Tensors]

_DTYPES = {
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.float32: DType.FLOAT32,
}


@dataclass(frozen=True)
class _Operator:
    """An operator.

    Attributes:
        name: Its name; `_out` is added for the variant that takes the outputs.
        function: What it runs.
        first: The function's first argument.
        inputs: Schema of the other inputs.
        options: Schema of what stands behind inputs and outputs.
        outputs: Arguments of the function that the functional variant returns.
        allocate: Makes them, on fake tensors too.
        needed: Inputs that are optional for the function, but not for the functional variant.
        all_outputs: Of the other variant; None if there is none.
    """

    name: str
    function: Callable[..., None]
    first: str
    inputs: str
    options: str
    outputs: tuple[str, ...]
    allocate: _Allocate
    needed: tuple[str, ...] = ()
    all_outputs: tuple[str, ...] | None = None

    @property
    def functional_schema(self) -> str:
        """Schema of the variant that returns its outputs."""
        inputs = self.inputs
        for name in self.needed:
            inputs = inputs.replace(f"Tensor? {name}=None", f"Tensor {name}")
        returned = ", ".join(["Tensor"] * len(self.outputs))
        arguments = ", ".join(filter(None, (inputs, self.options)))
        return f"{self.name}(Tensor {self.first}, int workspace, *, {arguments}) -> ({returned})"

    @property
    def out_schemas(self) -> dict[str, str]:
        """Schemas of the variant that takes them, by name; one where there are no scales."""
        names = self.all_outputs or ()
        optional = len(names) > 1
        outputs = ", ".join(
            f"Tensor(a{i}!)? {name}=None" if optional else f"Tensor(a{i}!) {name}"
            for i, name in enumerate(names)
        )
        scales = {"": ""}
        if "quant_out" in names:
            scales = {overload: f"{_QUANT}, {scale}" for overload, scale in _SCALES.items()}
        made = {}
        for overload, quant in scales.items():
            name = f"{self.name}_out{overload}"
            arguments = ", ".join(filter(None, (self.inputs, outputs, quant, self.options)))
            made[name] = f"{name}(Tensor {self.first}, int workspace, *, {arguments}) -> ()"
        return made

    def run_out(self, first: Any, workspace: int, **arguments: Any) -> None:
        """Launch into given outputs."""
        target = _registered(self.name, workspace)
        self.function(first, target, dtype=_DTYPES.get(first.dtype), **arguments)

    def run(self, first: Any, workspace: int, **arguments: Any) -> Any:
        """Launch into new outputs."""
        outputs = self.allocate(first, workspace, arguments)
        self.run_out(first, workspace, **arguments, **dict(zip(self.outputs, outputs, strict=True)))
        return outputs if len(outputs) > 1 else outputs[0]

    def fake(self, first: Any, workspace: int, **arguments: Any) -> Any:
        """Allocate what `run` returns."""
        outputs = self.allocate(first, workspace, arguments)
        return outputs if len(outputs) > 1 else outputs[0]


def _rows_by_index(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    shape = (arguments["expanded_idx_to_permuted_idx"].shape[0], first.shape[-1])
    return first.new_empty(shape), first.new_empty(shape)


def _last_two(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    shape = first.shape[-2:]
    return first.new_empty(shape), first.new_empty(shape)


def _one_of_last_two(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    return (first.new_empty(first.shape[-2:]),)


def _like_residual(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    shape = arguments["residual_in"].shape
    return first.new_empty(shape), first.new_empty(shape)


def _share(first: Any, handle: int, token_num: Any) -> _Tensors:
    # `plan.share_of` in a form that symbolic sizes can take.
    workspace = _registered("a reduce-scatter", handle)
    share = (token_num + workspace.world_size - 1 - workspace.rank) // workspace.world_size
    return (first.new_empty((share, first.shape[-1])),)


def _share_by_index(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    return _share(first, workspace, arguments["expanded_idx_to_permuted_idx"].shape[0])


def _share_of_rows(first: Any, workspace: int, arguments: dict[str, Any]) -> _Tensors:
    return _share(first, workspace, first.shape[0])


_RESULTS = ("residual_out", "norm_out")
_ALL = (*_RESULTS, "quant_out", "scale_out")
_OPERATORS = (
    _Operator(
        "moe_finalize_allreduce_fusion",
        moe_finalize_allreduce_fusion,
        "allreduce_in",
        f"{_ROUTES}, {_RESIDUAL_NORM}",
        _ALLREDUCE,
        _RESULTS,
        _rows_by_index,
        needed=("rms_gamma",),
        all_outputs=("allreduce_out", *_ALL),
    ),
    _Operator(
        "moe_reduction_allreduce_fusion",
        moe_reduction_allreduce_fusion,
        "moe_reduction_active_experts_token_input",
        "Tensor moe_reduction_scale_input, Tensor? moe_reduction_token_input=None, "
        + _RESIDUAL_NORM,
        _ALLREDUCE,
        _RESULTS,
        _last_two,
        needed=("rms_gamma",),
        all_outputs=("moe_allreduce_out", *_ALL),
    ),
    _Operator(
        "allreduce_fusion",
        allreduce_fusion,
        "allreduce_in",
        _RESIDUAL_NORM,
        _ALLREDUCE,
        _RESULTS,
        _last_two,
        needed=("rms_gamma",),
        all_outputs=("allreduce_out", *_ALL),
    ),
    _Operator(
        "allreduce",
        allreduce_fusion,
        "allreduce_in",
        "",
        _ALLREDUCE,
        ("allreduce_out",),
        _one_of_last_two,
    ),
    _Operator(
        "moe_finalize_reduce_scatter",
        moe_finalize_reduce_scatter,
        "allreduce_in",
        _ROUTES,
        _WIRE,
        ("reduce_scatter_out",),
        _share_by_index,
        all_outputs=("reduce_scatter_out",),
    ),
    _Operator(
        "reduce_scatter",
        reduce_scatter,
        "allreduce_in",
        "",
        _WIRE,
        ("reduce_scatter_out",),
        _share_of_rows,
        all_outputs=("reduce_scatter_out",),
    ),
    _Operator(
        "allgather_residual_rmsnorm",
        allgather_residual_rmsnorm,
        "allgather_in",
        _RESIDUAL_NORM,
        _PDL,
        _RESULTS,
        _like_residual,
        needed=("residual_in", "rms_gamma"),
        all_outputs=("allgather_out", *_ALL),
    ),
)

_library = torch.library.Library("cupy_moe_ar", "DEF")
# The kernels want rows without gaps; a compiler may otherwise pad what it computes itself.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _add(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cupy_moe_ar::{name}", fake, lib=_library)


def _nothing(*args: Any, **arguments: Any) -> None:
    """Stand in for an operator that returns nothing."""


for _operator in _OPERATORS:
    _add(_operator.name, _operator.functional_schema, _operator.run, _operator.fake)
    if _operator.all_outputs:
        for _name, _schema in _operator.out_schemas.items():
            _add(_name, _schema, _operator.run_out, _nothing)
