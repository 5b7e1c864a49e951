"""Every kernel once on small cases, for compute-sanitizer; see sanitize.sh.

    compute-sanitizer --tool memcheck python3 scripts/sanitize.py --ranks 2
    mpirun -n 2 compute-sanitizer --tool racecheck python3 scripts/sanitize.py

Exit status 0: every output was right; 3: a rank waited in vain for another, as where the tool runs
one kernel after the other.
"""

from __future__ import annotations

import argparse

import _checkout  # noqa: F401
import numpy as np
from _calls import CALLED, Arguments, make
from _ranks import Rank, choose_backend, parse, positive, start
from stress import OUTPUTS, Options, Spec

from cupy_moe_ar import DType, PeerTimeoutError, Workspace, reference
from cupy_moe_ar.compile import OPERATIONS
from cupy_moe_ar.group import Group
from cupy_moe_ar.plan import KERNELS, KernelLimits, launch_shapes
from cupy_moe_ar.selfcheck import NORM_ULPS

HIDDEN = 1032  # 129 vectors: a last group of one lane
CLUSTERS = 3  # of a launch; kernels that take rows in turn get seven
SERIAL = 3
PAYLOAD = Options(seed=5)


def specs() -> list[Spec]:
    """Every operation, protocol and kernel, each with the largest cluster that holds such rows."""
    found = []
    shapes = {shape.kernel: shape for shape in launch_shapes(HIDDEN // 8)}  # clusters ascend
    for operation, protocols in OPERATIONS.items():
        for protocol in protocols:
            one = {"use_oneshot": protocol == "oneshot"} if len(protocols) > 1 else {}
            for kernel in KERNELS:
                found.append(
                    Spec(
                        operation,
                        tokens=CLUSTERS if kernel in ("row", "row2") else 7,
                        hidden=HIDDEN,
                        dtype=DType.BFLOAT16,
                        comm_dtype=DType.BFLOAT16,
                        top_k=9,
                        scale=DType.FLOAT32,
                        gamma=DType.BFLOAT16,
                        residual=True,
                        in_place=False,
                        outputs=OUTPUTS,
                        numbers={
                            "weight_bias": 1.0,
                            "rms_eps": 1e-5,
                            "routed_scaling_factor": 2.0,
                        },
                        launch=one,
                        launch_shape=shapes[kernel],
                    )
                )
    return found


def sanitize(group: Group) -> int:
    """Run one rank; return its exit status."""
    workspace = Workspace(
        group,
        max_token_num=8,
        hidden_dim=HIDDEN,
        backend=choose_backend(group),
        timeout_s=5.0,
    )
    with workspace:
        rank = Rank(group, workspace)
        for variant, limits in workspace._limits.items():
            few = {shape: min(n, CLUSTERS) for shape, n in limits.resident_clusters.items()}
            workspace._limits[variant] = KernelLimits(few, limits.sm_count)
        wrong = 0
        try:
            for number, spec in enumerate(specs()):
                call = make(spec, PAYLOAD, number, rank.index, rank.size)
                wrong += launch(rank, workspace, spec, call)
        except PeerTimeoutError as error:
            rank.say(f"{error}: do kernels run side by side here?")
            return SERIAL
        rank.say(f"{len(specs())} launches on {rank.size} ranks, {rank.device_name}: {wrong} wrong")
    return 1 if wrong else 0


def launch(rank: Rank, workspace: Workspace, spec: Spec, call: Arguments) -> int:
    """Make a call; return 1 if an output is wrong."""
    dtype = reference.numpy_dtype(spec.dtype)
    inputs = {name: rank.put(x) for name, x in call.inputs.items()}
    outputs = {name: rank.put(np.full(x.shape, np.nan, dtype)) for name, x in call.outputs.items()}
    rank.meet()
    CALLED[spec.operation](
        workspace=workspace, **inputs, **outputs, **call.options, stream=rank.stream
    )
    rank.meet()
    workspace.check()
    for name, right in call.outputs.items():
        far = reference.ulp_distance(rank.get(outputs[name], dtype), right, spec.dtype)
        if (far > (NORM_ULPS[spec.dtype] if name == "norm_out" else 0)).any():
            print(f"rank {rank.index}: {name} is wrong: {spec}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, help="ranks as threads; default: mpirun's")
    start(sanitize, parse(parser).ranks)
