"""The scripts of examples/offline, which have the shape of vLLM's: each runs here as a program does."""

from __future__ import annotations

import gzip
import json
import re
import runpy
import subprocess
import sys

import pytest
from support.processes.stack import ROOT

EXAMPLES = ROOT / "examples" / "offline"
# As scripts for vLLM often are: the model lives until the interpreter exits.
GLOBAL_MODEL = f"""
from baton.llm import LLM, SamplingParams
llm = LLM({str(ROOT / "models" / "storyteller-7m")!r}, max_model_len=512)
print(len(llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a script in an empty folder. Returns what it printed, as lines, and what it wrote to standard error."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        shown = capsys.readouterr()
        return shown.out.splitlines(), shown.err

    return run


def test_every_script_is_run_here():
    text = (ROOT / "tests" / "llm" / "test_offline_examples.py").read_text()
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*re.findall(r'run\("(\w+)"', text), "answer"}


def test_scripts_import_nothing_else_than_a_script_for_vllm():
    for path in EXAMPLES.glob("*.py"):
        assert set(re.findall(r"^from (baton\S*)", path.read_text(), re.MULTILINE)) == {"baton.llm"}


def test_a_program_ends_whose_model_is_global(tmp_path):
    words = [sys.executable, "-c", GLOBAL_MODEL]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_basic(run):
    lines, bar = run("basic")
    assert [re.match(r"Prompt: '(.*?)', text: '..+'", line)[1] for line in lines] == [
        "Once upon a time", "The big dog", "Lily and her mom went to", "One day a cat saw"
    ]  # fmt: skip
    assert "4/4" in bar


def test_chat(run):
    lines, bar = run("chat")
    one, same, other, again = lines[1], lines[3], lines[4], lines[5]
    assert one == same == again != other
    assert int(lines[7].split()[0]) < int(other.split()[0])  # without the template's own tokens
    assert "3/3" in bar


def test_beam_search(run):
    lines, _ = run("beam_search")
    scores = [float(line.split()[0]) for line in lines]
    assert len(scores) == 6
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert all("Once upon a time" in line for line in lines[:3])


def test_structured_outputs(run):
    lines, _ = run("structured_outputs")
    texts = {name: json.loads(text) for name, _, text in (line.partition(": ") for line in lines)}
    assert texts["choice"] in ("happy", "sad")
    assert re.fullmatch(r"[a-z]{3,8}@[a-z]{3,8}\.com", texts["regex"])
    animal = json.loads(texts["json"])
    assert animal["kind"] in ("dog", "cat")
    assert len(animal["name"]) <= 12
    assert re.fullmatch(r"SELECT (name|age) from (dogs|cats)", texts["grammar"])


def test_prefix_caching(run):
    cold, warm, same, reset = run("prefix_caching")[0]
    first, *others = json.loads(cold.partition(":")[2])
    assert first == 0
    assert min(others) >= 32
    assert min(json.loads(warm.partition(":")[2])) >= 32
    assert same == "same: True"
    assert reset == "after the reset: 0"


def test_async_streaming(run):
    lines = sorted(run("async_streaming")[0])
    assert [line.partition(":")[0] for line in lines] == ["stream-1", "stream-2", "stream-3"]
    assert all(int(re.search(r"(\d+) deltas", line)[1]) > 1 for line in lines)


def test_logprobs(run):
    *rows, total = run("logprobs")[0]
    chosen = [line for line in rows if line.startswith("output")]
    assert len(chosen) == 6
    # Greedy tokens are the most likely ones, whose log-probabilities add up to the total.
    values = [float(re.search(r" of '.*?' (-?\d+\.\d+)", line)[1]) for line in chosen]
    assert float(total.split()[-1]) == pytest.approx(sum(values), abs=0.01)
    assert all("rank" in line for line in rows if line.startswith("prompt"))


def test_batch_of_prompts(run):
    (counts, *stories), bar = run("batch_of_prompts")
    assert json.loads(counts) == [4 + index % 5 for index in range(24)]
    names = [story.partition(" saw a")[0].split()[-1] for story in stories]
    assert names == ["Tom", "Lily", "Max", "Anna", "Ben", "Sue"]
    assert "24/24" in bar
    assert "output:" in bar


def test_sleep_mode(run):
    assert run("sleep_mode")[0] == [
        "level 1: sleeping True", "level 1: same text True", "level 2: sleeping True", "level 2: same text True"
    ]  # fmt: skip


def test_metrics(run):
    lines, _ = run("metrics")
    assert "vllm:generation_tokens (counter) = 16" in lines
    assert any(re.match(r"vllm:e2e_request_latency_seconds \(histogram\): .*, count = 2$", line) for line in lines)
    assert any(re.match(r"vllm:num_requests_running \(gauge\) = 0", line) for line in lines)


def test_profiling(run):
    (path,) = run("profiling")[0]
    with gzip.open(path) as file:
        assert json.load(file)["traceEvents"]


def test_weight_updates(run):
    assert run("weight_updates")[0] == ["changed: True, restored: True"]
