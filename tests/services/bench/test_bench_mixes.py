import json
from pathlib import Path

import pytest
from bench.engine import bench_mixes
from bench.engine.mixes import MIXES, arrivals

MODEL = str(Path(__file__).parents[3] / "models" / "storyteller-7m")


def test_an_unknown_mix_is_one_line(capsys):
    assert bench_mixes.main(["--executor", "cpu", "--model", MODEL, "--only", "nonsense"]) == 2
    shown = capsys.readouterr().err
    assert "no mix is named so; there are: long-tailed" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_equal_seeds_give_equal_requests(mix):
    def made(seed):
        found = arrivals(mix, 4096, 10.0, seed)
        return found.times, [request.token_ids for request in found.requests]

    assert made(1) == made(1)
    assert made(1) != made(2)
    times, prompts = made(1)
    assert times == sorted(times)
    assert len(prompts) == mix.num_requests
    assert max(map(len, prompts)) <= max(mix.longest, mix.prompt)


def test_mixes_run_on_the_cpu_and_are_written_down(tmp_path, capsys):
    path = tmp_path / "mixes.json"
    words = ["--executor", "cpu", "--model", MODEL, "--scale", "0.01", "--only", "80 %", "--only", "one token"]
    assert bench_mixes.main([*words, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    # The load is a share of what the first mix finds, which runs before it.
    assert [result["mix"]["name"] for result in results] == [MIXES[0].name, MIXES[2].name, MIXES[-1].name]
    for result in results:
        assert result["mix"]["name"] in shown
        assert result["num_output"] >= result["mix"]["num_requests"]
        assert 0 < result["ttft_p50"] <= result["ttft_p99"]
