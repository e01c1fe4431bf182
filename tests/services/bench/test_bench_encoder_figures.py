"""`baton bench encoder_figures` prints all that is wanted of embeddings on a GPU; here over tiny models on the CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from bench.engine import bench_encoder_figures as bench

from baton.services.bench.datasets.source import BenchFailed

_SMALL = ("--executor", "cpu", "--small", "--dtype", "float32", "--passes", "1")


def test_batches_are_embedded_and_their_products_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    threads = torch.get_num_threads()
    assert bench.main([*_SMALL, "--part", "qwen3", "--part", "bert-large", "--json", str(path)]) == 0
    torch.set_num_threads(threads)
    tokens, share = json.loads(path.read_text())["figures"]
    assert tokens["value"] > 0
    assert not tokens["reached"]  # 380,000 tokens a second on a CPU
    assert 0 < share["value"] < 1  # the engine cannot be faster than the products alone
    printed = capsys.readouterr().out
    assert ">= 380,000 tok/s" in printed
    assert "products alone of it" in printed
    assert " s in all" in printed


@pytest.mark.timeout(180)
def test_services_are_loaded_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    words = ("--part", "http", "--gateways", "1", "--seconds", "0.5", "--clients", "4", "--json", str(path))
    assert bench.main([*_SMALL, *words]) == 0
    (found,) = json.loads(path.read_text())["figures"]
    assert found["value"] > 0
    assert "gateway processes: 1" in capsys.readouterr().out


def test_a_part_that_fails_is_named_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> list[bench.Figure]:
        raise BenchFailed("no worker")

    monkeypatch.setitem(bench.PARTS, "http", fail)
    threads = torch.get_num_threads()
    assert bench.main([*_SMALL, "--part", "http", "--part", "bert-large"]) == 1
    torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert "http: BenchFailed: no worker" in said.err
    assert "products alone of it" in said.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_machine_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 1
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "word"), [(0.7, "reached"), (0.69, "MISSED")])
def test_a_figure_says_whether_it_is_reached(value: float, word: str) -> None:
    cells = bench.Figure("share", value, 0.70, note="1.3 s").cells()
    assert cells == ("share", f"{value:.2f}", ">= 0.70", f"{word}; 1.3 s")
