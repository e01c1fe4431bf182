"""The benchmark of a tandem against one worker: it runs, and its figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.transfer import bench_tandem


def test_percentiles_are_values_that_occurred():
    assert bench_tandem.percentile([], 99) == 0
    assert bench_tandem.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert bench_tandem.percentile([3.0, 1.0, 2.0], 99) == 3.0


@pytest.mark.timeout(180)
def test_both_deployments_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "tandem.json"
    flags = ["--lengths", "300", "--prompts", "2", "--neighbours", "2", "--seconds", "0.3", "--json", str(path)]
    assert bench_tandem.main(flags) == 0
    pair, both = json.loads(path.read_text())["figures"]
    assert (pair["deployment"], both["deployment"]) == ("1P1D", "both")
    assert pair["num_local"] == 0
    assert 0 <= pair["exposed"] < pair["second_token"]
    assert pair["num_bytes"] == 19 * 16 * 8 * 2
    assert both["exposed"] is None
    for row in (pair, both):
        assert row["ttft"] > 0
        assert 0 < row["itl_p50_alone"] <= row["itl_p99_alone"]
        assert row["output_tokens_per_second"] > 0
    assert "2nd token" in capsys.readouterr().out
