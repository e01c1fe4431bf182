import json

import pytest

from baton.services.cli import main

SMALL = ["simulate", "--workload", "poisson", "--workers", "2", "--seconds", "6", "--jobs", "1"]


def test_a_sweep_prints_a_line_a_load_and_writes_its_files(tmp_path, capsys):
    figures, picture = tmp_path / "s.json", tmp_path / "s.png"
    code = main([*SMALL, "--loads", "0.2,0.4", "--json", str(figures), "--plot", str(picture)], {})
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[:2] for line in lines[1:]] == [["baton", "0.20"], ["baton", "0.40"]]
    runs = json.loads(figures.read_text())["runs"]
    assert [run["load"] for run in runs] == [0.2, 0.4]
    assert all(run["good_share"] > 0.9 and run["num_unfinished"] == 0 for run in runs)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_flags_print_the_same_figures(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        main([*SMALL, "--loads", "0.5", "--seed", "5", "--json", str(file)], {})
    one, other = (json.loads(file.read_text())["runs"][0] for file in files)
    for run in (one, other):
        for name in ("cpu_seconds", "wall_seconds"):
            del run["extra"][name]
    assert one == other


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "nonsense"], "workload 'nonsense' is unknown; there are poisson"),
        (["--loads", "0.5,x"], "loads has 'x'"),
        (["--policies", "no.such:thing"], "policy 'no.such:thing' is unknown"),
        (["--calibration", "/no/such.json"], "/no/such.json is no output"),
        (["--max-num-batched-tokens", "100"], "--max-num-batched-tokens=100 must be at least"),
        (["--prefill-workers", "2"], "every worker only prefills"),
    ],
)
def test_errors_are_named_before_anything_runs(flags, message, capsys):
    assert main(["simulate", *flags], {}) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_is_wrong_is_one_line(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    trace.write_text("{}\n")
    assert main(["simulate", "--workload", str(trace), "--loads", "1", "--jobs", "1"], {}) == 1
    assert "line 1: KeyError" in capsys.readouterr().err
