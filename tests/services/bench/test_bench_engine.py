import json
from pathlib import Path

import pytest
from bench.engine import bench_engine
from bench.engine.workloads import TABLES, VLLM_SECONDS, Workload, vllm_seconds

from baton.services.bench.report import render_table

MODEL = str(Path(__file__).parents[3] / "models" / "storyteller-7m")


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("256x512/256", Workload(256, 512, 256)),
        ("1 x 128/256", Workload(1, 128, 256)),
        ("256x(4096+64)/32", Workload(256, 64, 32, num_shared=4096)),
        ("256 x (4096 shared + 64)/32", Workload(256, 64, 32, num_shared=4096)),
        ("64x256/128~0.9", Workload(64, 256, 128, spread=0.9)),
    ],
)
def test_a_workload_is_read_as_it_is_written(text, workload):
    assert Workload.parse(text) == workload
    assert Workload.parse(str(workload)) == workload


@pytest.mark.parametrize(
    "text", ["256x512", "x512/256", "0x512/256", "4x0/2", "4x(64+0)/2", "4x8/0", "4x-1/2", "4x8/2~", ""]
)
def test_invalid_workloads_are_refused(text):
    with pytest.raises(ValueError, match=r"workload|must be 1 to"):
        Workload.parse(text)


def test_lengths_spread_around_their_medians():
    workload = Workload(400, 256, 128, num_shared=16, spread=0.9)
    lengths = workload.lengths
    assert lengths == workload.lengths
    for median, each in zip((256, 128), zip(*lengths, strict=True), strict=True):
        assert 0.8 * median < sorted(each)[200] < 1.25 * median
        assert max(each) == 4 * median
        assert min(each) < median / 4
    assert workload.num_total == 16 + 4 * (256 + 128)
    assert workload.all_prompts == 400 * 16 + sum(own for own, _ in lengths)
    assert Workload(3, 8, 2).lengths == [(8, 2)] * 3


def test_the_tables_hold_every_published_row():
    assert sum(len(VLLM_SECONDS[model]) for model in TABLES["all"]) == 14
    assert vllm_seconds("llama-3.1-8b", Workload.parse("512x1024/256")) == 21.14
    assert vllm_seconds("qwen3-0.6b", Workload.parse("512x1024/256")) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --workload or --preset-table"),
        (["--workload", "4x8"], "'4x8' is no workload"),
        (["--workload", "4x8/2", "--set", "blocks=3"], "a worker has no setting 'blocks'"),
        (["--workload", "4x8/2", "--set", "block_size=big"], "--set block_size: 'big' is not allowed"),
        (["--workload", "4x8/2", "--preset-table", "8b"], "leave --workload out"),
        (["--workload", "4x8/2", "--repeat", "0"], "--repeat must be at least 1"),
        (["--workload", "4x8/2", "--profile"], "--profile needs --executor cuda or cpu"),
    ],
)
def test_wrong_flags_are_one_line_with_the_allowed_values(flags, message, capsys):
    assert bench_engine.main(["--executor", "sim", *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("executor", ["sim", "cpu"])
def test_a_small_workload_runs_and_is_written_down(executor, tmp_path, capsys):
    path = tmp_path / "engine.json"
    flags = ["--executor", executor, "--model", MODEL, "--repeat", "2", "--json", str(path)]
    settings = ["--set", "sim_slowness=0", "--set", "threads=1", "--set", "kv_cache_memory=16777216"]
    assert bench_engine.main([*flags, *settings, "--workload", "3x20/4", "--workload", "4x(32+8)/2"]) == 0
    shown = capsys.readouterr()
    assert f"{MODEL}, 4 x (32 shared + 8)/2" in shown.out
    plain, shared = json.loads(path.read_text())["engines"][0]["rows"]
    assert (plain["workload"], len(plain["runs"]), plain["times_vllm"]) == ("3 x 20/4", 2, None)
    assert plain["output_tokens_per_second"] == pytest.approx(12 / plain["seconds"])
    assert [run["num_cached_tokens"] for run in plain["runs"]] == [0, 0]
    # The prefix is computed once within the pass, and found by the three other requests.
    assert [run["num_cached_tokens"] for run in shared["runs"]] == [3 * 32, 3 * 32]


def test_a_profile_names_the_kernels_of_steps_of_prompts_and_of_decodes(tmp_path, capsys):
    path = tmp_path / "engine.json"
    flags = ["--executor", "cpu", "--model", MODEL, "--repeat", "1", "--profile", "--json", str(path)]
    settings = ["--set", "threads=1", "--set", "kv_cache_memory=16777216"]
    assert bench_engine.main([*flags, *settings, "--workload", "3x20/12"]) == 0
    shown = capsys.readouterr().out
    prompts, decodes = json.loads(path.read_text())["engines"][0]["profiles"]
    assert f"{MODEL}, 3 x 20/12, first steps: {prompts['num_steps']} steps of " in shown
    assert f"decode of up to 3 requests: {decodes['num_steps']} steps of " in shown
    for one in (prompts, decodes):
        assert 1 <= one["num_steps"] <= 8
        busy = sum(kernel["microseconds"] for kernel in one["kernels"])
        assert 0 < busy <= 1e6 * one["seconds"] / one["num_steps"]
        products = next(kernel for kernel in one["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
        assert products["calls"] >= 8  # one a layer at least
        assert products["name"] in shown


def test_samplings_are_compared_with_the_first(tmp_path, capsys):
    path = tmp_path / "engine.json"
    flags = ["--executor", "cpu", "--model", MODEL, "--repeat", "1", "--json", str(path), "--workload", "2x20/4"]
    settings = ["--set", "threads=1", "--set", "kv_cache_memory=16777216"]
    assert bench_engine.main([*flags, *settings, "--sampling", "greedy", "--sampling", "qwen_rep"]) == 0
    shown = capsys.readouterr().out
    assert "x greedy" in shown
    assert "2 x 20/4, qwen_rep" in shown
    rows = json.loads(path.read_text())["engines"][0]["rows"]
    assert [row["sampling"] for row in rows] == ["greedy", "qwen_rep"]


def test_a_warm_prefix_is_cached_before_the_clock_starts(tmp_path):
    path = tmp_path / "engine.json"
    flags = ["--executor", "sim", "--set", "sim_slowness=0", "--warm-prefix", "--json", str(path)]
    assert bench_engine.main([*flags, "--repeat", "1", "--workload", "4x(32+8)/2"]) == 0
    (row,) = json.loads(path.read_text())["engines"][0]["rows"]
    assert row["runs"][0]["num_cached_tokens"] == 4 * 32


def test_a_pass_that_takes_too_long_is_an_error_with_the_numbers(capsys):
    flags = ["--executor", "sim", "--set", "sim_step_seconds=0.05", "--timeout", "0.1", "--warm-up", "0"]
    assert bench_engine.main([*flags, "--workload", "2x8/64"]) == 1
    assert "2 of 2 requests unfinished after 0.1 s" in capsys.readouterr().err


def test_tables_align_figures_to_the_right():
    assert render_table(("op", "us"), [("a", "1.0"), ("bb", "10.0")]) == "op    us\na    1.0\nbb  10.0"
    assert render_table(("op", "us"), [("a", "1.0")], markdown=True).splitlines()[1] == "| -- | --: |"
