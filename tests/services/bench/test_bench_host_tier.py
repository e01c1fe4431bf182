import json

import pytest
from bench.engine import bench_host_tier


@pytest.mark.parametrize("beside", [0, 1])
def test_prompts_are_computed_found_and_brought_back(beside, tmp_path, capsys):
    path = tmp_path / "figures.json"
    flags = ["--executor", "sim", "--tokens", "64", "--tokens", "96", "--repeat", "1", "--beside", str(beside)]
    assert bench_host_tier.main([*flags, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "host faster x" in out
    document = json.loads(path.read_text())
    assert [row["num_tokens"] for row in document["rows"]] == [64, 96]
    for row in document["rows"]:
        assert set(row["seconds"]) == {"computed", "device", "host"}
        assert row["restored_bytes"] > 0
        assert bool(row["gaps"]["host"]) == bool(beside)


def test_too_small_host_memory_is_reported(capsys):
    flags = ["--executor", "sim", "--tokens", "512", "--repeat", "1", "--host-cache-gb", "0.01"]
    assert bench_host_tier.main(flags) == 1
    assert "did not reach host memory" in capsys.readouterr().err


def test_prompts_must_be_some_blocks_long(capsys):
    assert bench_host_tier.main(["--executor", "sim", "--tokens", "16"]) == 1
    assert "--tokens must be at least two blocks of 16" in capsys.readouterr().err
