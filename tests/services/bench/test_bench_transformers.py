"""`baton bench transformers` times the three ways to run one model, in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.engine import bench_transformers
from support.engine.tiny_models import make_model
from support.engine.tiny_transformers_models import save_tiny


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name, run, options, workloads):
        return bench_transformers.Way(name, run(options, workloads))

    monkeypatch.setattr(bench_transformers, "_apart", here)


def run(folder: Path, *more: str) -> int:
    words = ["--executor", "cpu", "--model", str(folder), "--repeat", "2", "--threads", "1"]
    return bench_transformers.main([*words, "--workload", "2x8/4", "3x6/3~0.9", *more])


@pytest.mark.usefixtures("in_this_process")
def test_three_ways_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama", tmp_path)
    assert run(tmp_path, "--json", str(tmp_path / "out.json")) == 0
    workloads = json.loads((tmp_path / "out.json").read_text())["workloads"]
    assert [found["spread"] for found in workloads] == [0, 0.9]
    for found in workloads:
        assert [way["name"].split()[-1] for way in found["ways"]] == ["generate", "transformers", "baton"]
        assert all(len(way["seconds"]) == 2 and min(way["seconds"]) > 0 for way in found["ways"])
    table = capsys.readouterr().out
    assert "x generate  x baton" in table


@pytest.mark.usefixtures("in_this_process")
def test_an_architecture_without_a_family_has_two_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, "arcee")
    assert run(tmp_path) == 0
    assert "model-impl baton" not in capsys.readouterr().out


def test_what_cannot_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere") == 1
    assert "no such folder" in capsys.readouterr().err
