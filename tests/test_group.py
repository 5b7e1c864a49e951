"""Groups of ranks: threads and MPI alike, and steps that fail on all ranks together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Rank, Ranks, current_rank, each_world

from cupy_moe_ar import sharing, workspace
from cupy_moe_ar.errors import ArgumentError, CompileError, UnsupportedError, WorkspaceError
from cupy_moe_ar.group import as_group, mixed_mpi, run_threads, staged
from cupy_moe_ar.sharing import Place
from cupy_moe_ar.symmetric import HostSlab, SymmetricMemory
from cupy_moe_ar.testing import run_ranks

# Only once MPI has started, which the other MPI's variables could confuse.
OTHER_MPI = "from mpi4py import MPI; import os; os.environ['OMPI_COMM_WORLD_SIZE'] = '4'"
ALONE = "4 processes were started together .*mpi4py sees 1 rank: mpirun is of another MPI"


@each_world(1, 2, 3, 16)
def test_collectives(ranks: Ranks) -> None:
    @ranks.run
    def body(rank: Rank) -> None:
        group, r = rank.group, rank.rank
        assert as_group(group) is group
        for i in range(20):
            assert group.allgather((r, i)) == [(other, i) for other in range(rank.size)]
            root = i % rank.size
            assert group.bcast(r if r == root else None, root=root) == root
        begin = time.monotonic()
        if r == rank.size - 1:
            time.sleep(0.1)
        group.barrier()
        assert time.monotonic() - begin > 0.09


@each_world(2, 3)
def test_c18_handles_that_end_in_nul_survive(ranks: Ranks) -> None:
    """A handle is 64 bytes of anything; NumPy's S64 would drop the last ones."""

    class Slab(HostSlab):
        def export(self) -> object:
            return str(super().export()).encode().ljust(64, b"\0")

        def open(self, exported: Any, *more: Any) -> int:
            assert isinstance(exported, bytes)
            assert (len(exported), exported[-2:]) == (64, b"\0\0")
            return super().open(exported.rstrip(b"\0").decode(), *more)

    @ranks.run
    def body(rank: Rank) -> None:
        here = replace(Place.here(), pid=1000 + rank.rank)  # as in processes of their own
        memory = SymmetricMemory(rank.group, lambda: Slab(2 << 20, here))
        assert len(set(memory.pointers)) == rank.size
        memory.close(10.0)


@each_world(2, 3)
def test_mapping_that_is_not_the_peers_memory_is_found(ranks: Ranks) -> None:
    elsewhere: list[HostSlab] = []

    class Slab(HostSlab):
        def open(self, exported: Any, *more: Any) -> int:
            if current_rank() != 1:
                return super().open(exported, *more)
            elsewhere.append(HostSlab(self.nbytes, self.place))
            return elsewhere[-1].pointer

    @ranks.run
    def body(rank: Rank) -> None:
        words = r"what ranks \[1\] wrote into the memory of rank 0 did not arrive"
        with pytest.raises(UnsupportedError, match=words) as caught:
            SymmetricMemory(rank.group, lambda: Slab(2 << 20, Place.here()))
        rank.same(str(caught.value))

    for slab in elsewhere:
        slab.free()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CompileError("log"), CompileError),
        (UnsupportedError("why"), UnsupportedError),
        (ArgumentError("f", ["fault"]), WorkspaceError),
        (MemoryError("memory"), WorkspaceError),
    ],
    ids=repr,
)
@each_world(2, 3, 4)
def test_staged_raises_the_same_everywhere(ranks: Ranks, error: Exception, kind: type) -> None:
    @ranks.run
    def body(rank: Rank) -> None:
        def fail() -> None:
            if rank.rank in (1, 3):
                raise error

        with pytest.raises(kind) as caught:
            staged(rank.group, "doing something", fail)
        who = "ranks 1, 3" if rank.size > 3 else "rank 1"
        assert str(caught.value) == f"doing something: {who}: {error}"
        assert (caught.value.__cause__ is error) == (rank.rank in (1, 3))
        assert staged(rank.group, "doing something", lambda: rank.rank) == rank.rank


def test_failing_thread_releases_the_others() -> None:
    def body(group: Any) -> None:
        if group.Get_rank() == 1:
            raise ZeroDivisionError
        group.barrier()

    with pytest.raises(ZeroDivisionError):
        run_threads(3, body)


def test_objects_without_the_methods_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"SimpleNamespace lacks Get_size, bcast, barrier"):
        as_group(SimpleNamespace(Get_rank=int, allgather=list, bcast=3))


@pytest.mark.parametrize(
    ("setting", "comm", "words"),
    [
        (OTHER_MPI, "None", ALONE),
        (OTHER_MPI, "MPI.COMM_WORLD", ALONE),
        (OTHER_MPI, "MPI.COMM_WORLD.Dup()", ALONE),
        (OTHER_MPI, "MPI.COMM_SELF", "^taken"),
        ("import sys; sys.modules['mpi4py'] = None", "None",
         "mpi4py is not usable: .* pip install 'cupy_moe_ar\\[mpi\\]'"),
    ],
    ids=["other MPI", "its world", "a copy of it", "alone on purpose", "no MPI"],
)  # fmt: skip
def test_mpi_problems_are_told(setting: str, comm: str, words: str) -> None:
    code = (
        f"{setting}\nfrom cupy_moe_ar.group import as_group\n"
        f"try: as_group({comm})\nexcept Exception as error: raise SystemExit(str(error))\n"
        "raise SystemExit('taken')"
    )
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("world", "environment", "told"),
    [
        (1, {"OMPI_COMM_WORLD_SIZE": "4"}, True),
        (1, {"PMI_SIZE": "2"}, True),
        (1, {"PMIX_SIZE": "2"}, True),
        (1, {"MV2_COMM_WORLD_SIZE": "16"}, True),
        (4, {"PMI_SIZE": "4"}, False),
        (1, {"PMI_SIZE": "1"}, False),
        (1, {"PMI_SIZE": ""}, False),
        (1, {}, False),
    ],
)
def test_launcher_of_another_mpi(world: int, environment: dict[str, str], told: bool) -> None:
    problem = mixed_mpi(world, environment, "MPICH 5")
    assert (problem is not None) == told
    if problem:
        ((name, size),) = environment.items()
        assert f"{size} processes were started together ({name})" in problem
        assert "another MPI than mpi4py's (MPICH 5). Start with that MPI's mpirun" in problem


def test_ranks_of_two_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sharing, workspace):
        monkeypatch.setattr(
            module, "host_identity", lambda: "host{0} boot{0}".format(current_rank() // 2)
        )

    def body(group: Any) -> None:
        with pytest.raises(
            UnsupportedError, match=r"rank 0 \(host host0\) and rank 2 .*host1.* different hosts"
        ):
            Rank(group).workspace()

    run_ranks(3, body)
