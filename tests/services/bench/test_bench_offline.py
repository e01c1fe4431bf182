"""The benchmarks of the engine in this process, and grids of them: small, so that they take seconds."""

from __future__ import annotations

import json

import pytest

from baton.services.bench.offline import latency, startup, throughput
from baton.services.bench.sweep import command as sweep

ENGINE = ("--executor", "sim", "--set", "sim_slowness=0", "--set", "num_blocks=512")


def test_latency_of_batches(tmp_path, capsys):
    path = tmp_path / "latency.json"
    flags = ["--batch-size", "3", "--input-len", "8", "--output-len", "4", "--num-iters", "5", "--json", str(path)]
    assert latency.main([*ENGINE, *flags]) == 0
    assert "3 x 8/4, n=1, 5 batches" in capsys.readouterr().out
    found = json.loads(path.read_text())["latency"]
    assert len(found["seconds"]) == 5
    assert min(found["seconds"]) <= found["p50"] <= found["p99"] <= max(found["seconds"])


def test_latency_of_beam_searches_and_several_outputs(capsys):
    flags = ["--set", "threads=1", "--batch-size", "1", "--input-len", "8", "--output-len", "3", "--num-iters", "1"]
    for more in (["--use-beam-search", "--n", "2"], ["--n", "3"]):
        assert latency.main(["--executor", "cpu", *flags, "--num-iters-warmup", "0", *more]) == 0
    assert "n=3" in capsys.readouterr().out


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition", "custom"])
def test_throughput_counts_tokens(dataset, tmp_path, capsys):
    path, lines = tmp_path / "throughput.json", tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "Once upon a time", "output_tokens": 6}\n')
    flags = {
        "random": ["--input-len", "20", "--output-len", "6"],
        "prefix_repetition": ["--prefix-repetition-prefix-len", "16", "--prefix-repetition-suffix-len", "4",
                              "--output-len", "6"],
        "custom": ["--dataset-path", str(lines)],
    }[dataset]  # fmt: skip
    words = [*ENGINE, "--num-prompts", "7", "--dataset-name", dataset, *flags, "--json", str(path)]
    assert throughput.main(words) == 0
    assert "7 prompts" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["num_output_tokens"]) == (7, 42)
    if dataset != "custom":
        assert found["num_prompt_tokens"] == 140
    assert found["output_tokens_per_second"] == pytest.approx(42 / found["seconds"])


def test_startup_has_the_stages_of_a_new_process(tmp_path, capsys):
    path = tmp_path / "startup.json"
    assert startup.main([*ENGINE, "--num-iters", "1", "--json", str(path)]) == 0
    assert "first token again" in capsys.readouterr().out
    stages = {name: one["mean"] for name, one in json.loads(path.read_text())["stages"].items()}
    parts = ("process", "import", "engine", "first token")
    assert stages["in total"] == pytest.approx(sum(stages[name] for name in parts), abs=0.01)
    assert all(seconds > 0 for seconds in stages.values())


def test_a_sweep_runs_every_point(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    grid = ["--vary", "set.max_num_seqs=2,4", "--vary", "output-len=3,5"]
    flags = ["--num-prompts", "4", "--input-len", "8"]
    assert sweep.main(["throughput", *grid, "--json", str(path), "--", *ENGINE, *flags]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [tuple(row.split()[:2]) for row in rows] == [("2", "3"), ("2", "5"), ("4", "3"), ("4", "5")]
    points = json.loads(path.read_text())["points"]
    assert [one["result"]["num_output_tokens"] for one in points] == [12, 20, 12, 20]


def test_a_point_that_fails_is_shown_and_the_others_go_on(capsys):
    grid = ["--vary", "set.max_num_seqs=-3,4"]
    words = ["throughput", *grid, "--", *ENGINE, "--num-prompts", "2", "--input-len", "8", "--output-len", "2"]
    assert sweep.main(words) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out.splitlines()[1]
    assert "failed" not in shown.out.splitlines()[2]
    assert "max_num_requests is -3" in shown.err


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        (latency.main, [*ENGINE, "--set", "max_num_sequences=3"], "did you mean max_num_seqs"),
        (latency.main, ["--set", "threads"], "write NAME=VALUE"),
        (throughput.main, ["--dataset-name", "custom"], "needs --dataset-path"),
        (startup.main, ["--set", "threads"], "write NAME=VALUE"),
        (sweep.main, ["throughput", "--vary", "output-len"], "write FLAG=VALUE,VALUE"),
        (sweep.main, ["throughput", "--vary-serve", "threads=1"], "needs --serve COMMAND"),
        (sweep.main, ["throughput", "--serve", "baton serve"], "is for `baton bench sweep serve`"),
    ],
)
def test_wrong_flags_are_named(run, flags, message, capsys):
    assert run(flags) == 2
    assert message in capsys.readouterr().err


def test_a_process_that_does_not_start_is_reported(capsys):
    assert startup.main(["--model", "nowhere", "--num-iters", "1"]) == 1
    assert "nowhere" in capsys.readouterr().err
