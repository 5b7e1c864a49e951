"""Tensors of PyTorch for the ranks of `cases`; imports PyTorch, so import it after importorskip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import Array, Case, Rank, Ranks, backend, mpi_world

from cupy_moe_ar import Workspace

Tensors = dict[str, Any]


@contextlib.contextmanager
def torch_stream(rank: Rank) -> Iterator[None]:
    """Let PyTorch work on the rank's device and stream."""
    if rank.stream is None:
        yield
        return
    stream = torch.cuda.ExternalStream(rank.stream.ptr, device=rank.device)
    with torch.cuda.device(rank.device), torch.cuda.stream(stream):
        yield


def with_workspace(ranks: Ranks, case: Case, **options: Any) -> Callable[..., None]:
    """As `Ranks.with_workspace`, with every operation and on PyTorch's stream.

    PyTorch allocates between launches, which ranks of one process must not do on a GPU.
    """
    if backend() == "cuda" and mpi_world() is None:
        pytest.skip("on GPUs under mpirun only")

    def decorate(body: Callable[[Rank, Workspace], None]) -> None:
        def on_rank(rank: Rank, workspace: Workspace) -> None:
            with torch_stream(rank):
                body(rank, workspace)

        ranks.with_workspace(case, operations=None, **options)(on_rank)

    return decorate


def tensor(rank: Rank | None, host: Array) -> Any:
    """Copy an array into a tensor on the rank's device; without a rank, of the host."""
    if host.dtype == ml_dtypes.bfloat16:
        made = torch.from_numpy(host.view(np.int16).copy()).view(torch.bfloat16)
    else:
        made = torch.from_numpy(host.copy())
    return made if rank is None or rank.stream is None else made.cuda()


def tensors(rank: Rank | None, arrays: Mapping[str, Array]) -> Tensors:
    return {name: tensor(rank, host) for name, host in arrays.items()}


def array(found: Any) -> Array:
    """Copy a tensor back, waiting for it."""
    host = found.detach().cpu()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    copied: Array = host.numpy()
    return copied
