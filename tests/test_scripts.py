"""The scripts, as a user starts them; and what they assume."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import ROOT, mpirun, run

from cupy_moe_ar import DType, reference
from cupy_moe_ar.testing import run_ranks

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _baselines  # noqa: E402
import _plot  # noqa: E402
import _workload  # noqa: E402
import bench  # noqa: E402
import demo  # noqa: E402
import moe_layer  # noqa: E402
import sweep  # noqa: E402

BF16 = DType.BFLOAT16
SMALL = ("--hidden", "512", "--tokens", "1", "3")


@pytest.fixture(autouse=True, scope="module")
def import_path() -> Iterator[None]:
    yield
    sys.path.remove(str(SCRIPTS))


def case(tokens: int = 64, top_k: int = 8, dtype: DType = BF16, **model: Any) -> _workload.Case:
    layer = _workload.Preset(64, top_k, shared=True, factor=2.5, **model)
    return _workload.Case(tokens, layer, dtype, dtype)


# ---- data ----------------------------------------------------------------------------------------


def test_presets_are_the_models_of_the_issue() -> None:
    told = {
        name: (model.hidden, model.top_k, model.shared, model.factor, model.scales)
        for name, model in _workload.PRESETS.items()
        if model.weight_bias == 0
    }
    assert told == {
        "deepseek-v3": (7168, 8, True, 2.5, True),
        "kimi-k2": (7168, 8, True, 2.827, True),
        "glm-5": (6144, 8, True, 2.5, True),
        "minimax-m2": (3072, 8, False, 1.0, True),
        "qwen3-235b": (4096, 8, False, 1.0, True),
        "qwen3-30b": (2048, 8, False, 1.0, True),
        "gpt-oss-120b": (2880, 4, False, 1.0, True),
        "llama4-maverick": (5120, 1, True, 1.0, False),
    }
    assert any(model.weight_bias == 1 for model in _workload.PRESETS.values())


def test_benchmark_data_route_every_token_to_rows_of_its_own() -> None:
    shape = case()
    first, second = (_workload.OPERATIONS["moe_finalize"].inputs(shape, rank) for rank in (0, 1))
    assert first["allreduce_in"].shape == (2 * 64 * 8 + 8, 64)
    index = first["expanded_idx_to_permuted_idx"]
    assert index.shape == (64, 8)
    assert index.dtype == np.int32
    assert len(np.unique(index)) == index.size
    assert index.min() >= 0
    assert index.max() < len(first["allreduce_in"])
    scales = first["expert_scale_factor"]
    assert scales.dtype == reference.numpy_dtype(BF16)
    np.testing.assert_allclose(scales.astype(float).sum(axis=1), 1, atol=0.02)
    for name, array in first.items():
        assert not np.array_equal(array, second[name]), name
    assert first["allreduce_in"].astype(float).std() == pytest.approx(0.5, rel=0.02)
    common = _workload.common_inputs(shape)
    assert common["residual_in"].astype(float).std() == pytest.approx(4, rel=0.05)
    assert common["rms_gamma"].astype(float).std() == pytest.approx(0.1, rel=0.3)
    assert common["rms_gamma"].astype(float).mean() == pytest.approx(1, abs=0.05)


def test_weight_bias_goes_with_a_gamma_near_zero() -> None:
    gamma = _workload.common_inputs(case(weight_bias=1.0))["rms_gamma"]
    assert abs(gamma.astype(float).mean()) < 0.05


def test_demo_data_have_the_layout_of_a_grouped_gemm() -> None:
    shape = case(tokens=300)
    absent = np.zeros((300, 8), int)
    for rank in range(4):
        inputs = _workload.expert_parallel_inputs(shape, rank, experts=64)
        rows, index = inputs["allreduce_in"], inputs["expanded_idx_to_permuted_idx"]
        read = np.sort(index[index >= 0])
        assert len(np.unique(read)) == len(read)
        padding = np.isnan(rows.astype(np.float32)).all(axis=1)
        assert len(rows) % 8 == 0
        assert padding.sum() > 0
        assert np.array_equal(np.flatnonzero(~padding), read)
        assert (index < 0).mean() == pytest.approx(0.25, abs=0.05)
        assert np.isfinite(_workload.OPERATIONS["moe_finalize"].partial(shape, inputs)).all()
        absent += index < 0
    assert (absent == 1).all()  # each expert is missing on one of four ranks


# ---- demo ----------------------------------------------------------------------------------------


def test_demo_in_process() -> None:
    done = run(sys.executable, SCRIPTS / "demo.py", "--in-process", 2)
    assert "all held" in done.stdout
    assert done.stdout.count("allreduce_out") >= 4
    assert not done.stderr


def test_demo_under_mpirun() -> None:
    done = run(*mpirun(4), sys.executable, SCRIPTS / "demo.py", *SMALL)
    assert done.stdout.count("all held") == 1
    assert "rank 3 of 4" in done.stdout


@pytest.mark.parametrize("wrong", ["values", "ranks"])
def test_demo_sees_what_is_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.OPERATION

    def partial(shape: _workload.Case, inputs: Any) -> Any:
        return right.partial(shape, inputs) * 1.02

    def same_bits(rank: Any, *arrays: Any) -> bool:
        rank.group.barrier()
        return rank.index > 0

    if wrong == "values":
        monkeypatch.setattr(demo, "OPERATION", dataclasses.replace(right, partial=partial))
    else:
        monkeypatch.setattr(demo.Rank, "same_bits", same_bits)
    options = demo.arguments().parse_args(SMALL)
    assert run_ranks(2, lambda group: demo.demo(group, options)) == [1, 1]
    assert "NOT all held" in capsys.readouterr().out


# ---- MoE layer -----------------------------------------------------------------------------------


def test_moe_layer_in_process() -> None:
    done = run(sys.executable, SCRIPTS / "moe_layer.py", "--in-process", 2)
    assert "all held" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moe_layer_under_mpirun(dtype: str) -> None:
    words = ("--tokens", 3, "--hidden", 128, "--dtype", dtype)
    done = run(*mpirun(3), sys.executable, SCRIPTS / "moe_layer.py", *words)
    assert done.stdout.count("all held") == 1
    assert "rank 2 of 3" in done.stdout


def layer_options(*words: str) -> argparse.Namespace:
    options = moe_layer.arguments().parse_args(["--hidden", "64", "--tokens", "2", *words])
    options.intermediate = 32
    return options


def test_moe_layer_is_the_layer() -> None:
    """Permutation, routes and slices: against every expert applied to every token, in float64."""
    options = layer_options("--experts", "5", "--top-k", "3")
    rank = argparse.Namespace(size=2, index=1)
    layer = moe_layer.Layer(rank, np, options)
    x = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    given = layer(x)
    told = reference.moe_finalize(
        given["allreduce_in"],
        given["expanded_idx_to_permuted_idx"],
        given["expert_scale_factor"],
    )
    logits = (x @ layer.router).astype(np.float64)
    kept = logits >= np.sort(logits, axis=1)[:, [-3]]
    weights = np.where(kept, np.exp(logits), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    expected = sum(weights[:, [e]] * expert(np, x) for e, expert in enumerate(layer.experts))
    np.testing.assert_allclose(told, expected, atol=2e-3)
    assert sorted(given["expanded_idx_to_permuted_idx"].ravel()) == list(range(21))


@pytest.mark.parametrize("wrong", ["factor", "ranks"])
def test_moe_layer_sees_what_is_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = moe_layer.moe_finalize_allreduce_fusion

    def twice(**arguments: Any) -> None:
        right(**arguments | {"routed_scaling_factor": 5.0})

    def same_bits(rank: Any, *arrays: Any) -> bool:
        rank.group.barrier()
        return rank.index > 0

    if wrong == "factor":
        monkeypatch.setattr(moe_layer, "moe_finalize_allreduce_fusion", twice)
    else:
        monkeypatch.setattr(moe_layer.Rank, "same_bits", same_bits)
    options = layer_options()
    assert run_ranks(2, lambda group: moe_layer.moe_layer(group, options)) == [1, 1]
    assert "NOT all held" in capsys.readouterr().out


FAILING = """
import _ranks
def body(group):
    if group.Get_rank() == 1:
        raise ValueError("on purpose")
    group.barrier()
    return 0
_ranks.start(body, {in_process})
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_failing_rank_ends_the_job(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(in_process=3 if kind == "threads" else None))
    launcher = mpirun(3) if kind == "processes" else []
    path = os.pathsep.join((str(ROOT), str(SCRIPTS)))
    done = run(*launcher, sys.executable, script, status=1, PYTHONPATH=path)
    assert "[rank 1] Traceback" in done.stderr
    assert "ValueError: on purpose" in done.stderr


def test_only_the_first_rank_complains() -> None:
    done = run(*mpirun(3), sys.executable, SCRIPTS / "demo.py", "--no-such-option", status=1)
    assert done.stderr.count("unrecognized arguments") == 1


# ---- bench ---------------------------------------------------------------------------------------

ROW_KEYS = (
    *("op", "protocol", "world", "hidden", "top_k", "tokens", "dtype", "comm_dtype", "quant"),
    *("us", "floor_us", "ar_fusion_us", "nccl_us", "empty_us", "link_us", "memory_us"),
    *("residual_mean_abs_error", "residual_max_abs_error", "residual_rounding_floor"),
    *("norm_mean_abs_error", "norm_max_abs_error", "gpu", "driver", "commit"),
)


def test_bench_writes_rows_and_a_log(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = (sys.executable, SCRIPTS / "bench.py", out, "--in-process", 2, "--replays", 2)
    run(*command, *SMALL, "--shapes", "--host")
    rows = json.loads(out.read_text())
    assert [row["tokens"] for row in rows] == [1, 3]
    for row in rows:
        assert set(ROW_KEYS) <= set(row)
        assert (row["world"], row["hidden"], row["top_k"]) == (2, 512, 8)
        assert row["us"] > 0
        assert row["bits_equal"]
        assert row["residual_rounding_floor"] < row["residual_mean_abs_error"]
        assert row["residual_mean_abs_error"] < 1.18 * row["residual_rounding_floor"]
        assert sum(shape["chosen"] for shape in row["shapes"]) == 1
        assert row["host_describe_us"] > 0
    log = out.with_suffix(".log").read_text()
    assert all(word in log for word in ("date ", "command ", "commit ", "rank 1 "))

    run(*command, "--preset", "llama4-maverick", "--tokens", 2, "--comm-dtype", "float32",
        "--append")  # fmt: skip
    row = json.loads(out.read_text())[2]
    assert (row["preset"], row["hidden"], row["top_k"]) == ("llama4-maverick", 5120, 1)
    assert row["residual_mean_abs_error"] < 1.01 * row["residual_rounding_floor"]


@pytest.mark.parametrize(
    ("operation", "protocol"), [("allreduce", "twoshot"), ("moe_reduction", "auto")]
)
def test_bench_runs_every_operation_and_protocol(
    tmp_path: Path, operation: str, protocol: str
) -> None:
    out = tmp_path / "rows.json"
    command = (sys.executable, SCRIPTS / "bench.py", out, "--in-process", 2, "--replays", 1)
    run(*command, *SMALL, "--op", operation, "--protocol", protocol, "--shapes", "--host",
        "--prefill", 5)  # fmt: skip
    for row in json.loads(out.read_text()):
        assert isinstance(row["after_prefill_us"], float)
        assert (row["op"], row["protocol"], row["bits_equal"]) == (operation, protocol, True)
        assert row["served_by"] == ("oneshot" if protocol == "auto" else protocol)
        assert row["residual_mean_abs_error"] < 1.18 * row["residual_rounding_floor"]
        assert sum(shape["chosen"] for shape in row["shapes"]) == 1


def test_bench_measures_quantised_outputs_beside_plain_ones(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = (sys.executable, SCRIPTS / "bench.py", out, "--in-process", 2, "--replays", 1)
    run(*command, *SMALL, "--quant", "nvfp4", "fp8_static", "--shapes", "--host")
    rows = json.loads(out.read_text())
    assert [row["quant"] for row in rows] == [None, "nvfp4", "fp8_static"] * 2
    for row in rows:
        assert set(ROW_KEYS) <= set(row)
        if row["quant"] is not None:
            assert row["quant_exact"]
            assert row["us_over_plain"] == pytest.approx(row["us"] / row["plain_us"], rel=1e-3)


def test_cliffs_are_told_with_the_counts_they_rest_on() -> None:
    smooth = {tokens: 3 + 0.05 * tokens for tokens in range(1, 41)}
    assert sweep.cliffs(smooth) == {}
    found = sweep.cliffs(smooth | {20: 5.5})
    assert set(found.values()) == {(19, 20), (20, 21)}
    assert "20 tokens take 5.50 us, 21 take 4.05" in found
    assert (10, 20) in sweep.cliffs(smooth | dict.fromkeys(range(20, 41), 8.0)).values()


def test_a_sweep_times_doubtful_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def time_us(self: sweep.Sweep, tokens: int) -> float:
        timed.append(tokens)
        return 9.0 if tokens == 4 and timed.count(4) == 1 else 3 + 0.05 * tokens

    monkeypatch.setattr(sweep.Sweep, "time_us", time_us)
    one = sweep.Sweep.__new__(sweep.Sweep)
    one.options = argparse.Namespace(most=10)
    row = one.run()
    assert (row["cliffs"], row["us"][3]) == ([], 3.2)
    assert timed[10:] == row["timed_again"] == [2, 3, 4, 5]


def test_sweep(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    command = (sys.executable, SCRIPTS / "sweep.py", out, "--in-process", "2", "--most", "3",
               "--hidden", "64", "256", "--replays", "1")  # fmt: skip
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=150,
        capture_output=True,
        check=False,
    )
    rows = json.loads(out.read_text())
    assert [(row["hidden"], len(row["us"])) for row in rows] == [(64, 3), (256, 3)]
    assert (done.returncode == 0) == (not any(row["cliffs"] for row in rows))


def test_accuracy_compares_with_16_bit_accumulation(tmp_path: Path) -> None:
    out = tmp_path / "accuracy.json"
    run(sys.executable, SCRIPTS / "accuracy.py", out)
    found = json.loads(out.read_text())
    for row in (*found["one_layer"].values(), *found["layers"]):
        assert row["rounding"] < row["ours"] < 0.95 * row["in_16_bits"]
        assert row["rounding"] <= 1.0001 * row["ours_float32_wire"] < row["ours"]
    for row in found["one_layer"].values():  # only the last rounding is left
        assert row["ours_float32_wire"] < 1.001 * row["rounding"]
    assert found["workspace_mib"]["8"][-3] == 114


@pytest.mark.parametrize("more", [("--hidden", "512"), ("--top-k", "4")])
def test_presets_have_sizes_of_their_own(more: tuple[str, str]) -> None:
    options = bench.arguments().parse_args(["x.json", "--preset", "glm-5", *more])
    with pytest.raises(ValueError, match="of its own"):
        bench.models(options)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--preset", "gpt-2"], ["--op", "sum"], ["--dtype", "int8"], ["--tokens", "0"]):
        with pytest.raises(SystemExit):
            bench.arguments().parse_args(["x.json", *words])
    assert "invalid choice: 'gpt-2'" in capsys.readouterr().err


def test_memory_limit_counts_every_byte() -> None:
    floors = _baselines.Floors.__new__(_baselines.Floors)
    floors._rank = argparse.Namespace(size=2)
    floors.copy_bandwidth = 1e6  # a microsecond a byte
    floors.store_bandwidth = 1e6
    shape = case(tokens=1)
    row_bytes = 64 * 2
    read = _workload.OPERATIONS["moe_finalize"].bytes_read(shape)
    assert read == 9 * row_bytes
    for protocol in ("oneshot", "twoshot"):  # two ranks send the same by either
        expected = pytest.approx((9 + 1 + 2 + 3) * row_bytes)
        assert floors.memory_us(shape, read, 2, protocol) == expected
        assert floors.link_us(shape, protocol) == pytest.approx(row_bytes)
    floors._rank.size = 8
    assert floors.link_us(shape, "oneshot") == pytest.approx(7 * row_bytes)
    assert floors.link_us(shape, "twoshot") == pytest.approx(7 / 4 * row_bytes)


def test_plot_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "op": "moe_finalize", "protocol": "oneshot", "world": 2, "hidden": 7168, "top_k": 8,
        "dtype": "bfloat16", "comm_dtype": "bfloat16", "preset": None, "us": 4.0, "floor_us": 2.0,
        "nccl_us": None, "gpu": "a GPU", "commit": "0",
    }  # fmt: skip
    png = tmp_path / "picture.png"
    _plot.plot([{**row, "tokens": tokens} for tokens in (1, 4)], png)
    assert png.read_bytes().startswith(b"\x89PNG")


PARAMETERS = ("Exchange", "Store", "Finalize", "ResidualNorm")


@pytest.mark.parametrize("name", PARAMETERS)
def test_baseline_parameters_are_mirrored(name: str) -> None:
    text = re.search(rf"struct {name} {{(.*?)}};", _baselines.SOURCE.read_text(), re.DOTALL)
    assert text
    types = {"u32": "c_uint", "i32": "c_int", "u64": "c_ulong", "float": "c_float"}
    told = []
    for kind, star, field, count in re.findall(
        r"^  (?:const )?(\w+)(\*?) (\w+)(\[\w+\])?;", text[1], re.MULTILINE
    ):
        element = "c_ulong" if star else types[kind]
        told.append((field, f"{element}_Array_16" if count else element))
    mirror = getattr(_baselines, f"_{name}")._fields_
    assert [(field, kind.__name__) for field, kind in mirror] == told


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_baseline_compiles(
    arch: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    sizes = {name: ctypes.sizeof(getattr(_baselines, f"_{name}")) for name in PARAMETERS}
    checks = (f"static_assert(sizeof(moe_ar::{name}) == {size});" for name, size in sizes.items())
    source = tmp_path / "baseline.cu"
    source.write_text("\n".join((_baselines.SOURCE.read_text(), *checks)))
    monkeypatch.setattr(_baselines, "SOURCE", source)
    monkeypatch.setenv("MOE_AR_CACHE_DIR", str(tmp_path))
    assert _baselines.compile_baseline(arch, BF16, world_size).stat().st_size > 0


@pytest.mark.gpu
def test_bench_floor_on_gpus(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = (sys.executable, SCRIPTS / "bench.py", out, "--in-process", 2, "--replays", 5)
    run(*command, *SMALL, "--floor", "--host", MOE_AR_BACKEND="cuda")
    for row in json.loads(out.read_text()):
        assert row["floor_us"] > row["empty_us"] > 0
        assert row["host_call_us"] > row["host_launch_us"] > 0
