"""Step traces: a line for each step, whatever the executor, and the table they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engine.engine_harness import Clock, make_executor, make_request, prompt_of

from baton.rpc.errors import InvalidRequest
from baton.worker.core import StepPlan
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.sim.executor import SimSpeed
from baton.worker.process.step_trace import COLUMNS, StepTrace, TracedExecutor, summary
from baton.worker.scheduling.settings import EngineSettings


def run(executor: Executor, path: Path, clock: Clock, num_requests: int = 3) -> list[dict[str, float]]:
    trace = StepTrace(str(path), clock)
    engine = Engine(TracedExecutor(executor, trace), EngineSettings(32, 64), 1, clock)
    for salt in range(num_requests):
        engine.submit(make_request(prompt_of(20, salt), max_tokens=4))
    while engine.has_work():
        trace.step(engine.step)
    trace.close()
    trace.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_has_a_line_whose_device_time_is_the_clocks(tmp_path: Path, depth: int) -> None:
    clock = Clock()
    speed = SimSpeed(base=1e-3, per_prefill_token=1e-5, per_decode_request=0.0, per_context_token=0.0)
    lines = run(make_executor(clock, speed=speed, depth=depth), tmp_path / "steps", clock)
    assert [line["step"] for line in lines] == list(range(lines[0]["step"], lines[0]["step"] + len(lines)))
    for line in lines:
        assert line["device_us"] == pytest.approx(1000 + 10 * line["num_prefill_tokens"])
    assert sum(line["num_prefill_tokens"] for line in lines) == 60
    assert lines[0]["gap_us"] is None
    assert all(line["gap_us"] == 0 for line in lines[1:])
    assert all(line["interval_us"] == pytest.approx(line["device_us"]) for line in lines[1:])


@pytest.mark.parametrize("acceptance", [None, 0.9])
def test_lines_have_the_guesses_of_their_steps(tmp_path: Path, acceptance: float | None) -> None:
    clock = Clock()
    executor = make_executor(clock, speed=SimSpeed(), max_step_tokens=4, acceptance=acceptance)
    trace = StepTrace(str(tmp_path / "steps"), clock)
    engine = Engine(TracedExecutor(executor, trace), EngineSettings(32, 64), 1, clock)
    for salt in range(3):
        engine.submit(make_request(prompt_of(20, salt), max_tokens=40))
    while engine.has_work():
        trace.step(engine.step)
    trace.close()
    lines, counters = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()], engine.counters()
    assert sum(line["num_draft_tokens"] for line in lines) == counters.num_draft_tokens
    assert sum(line["num_accepted_tokens"] for line in lines) == counters.num_accepted_tokens
    assert (counters.num_accepted_tokens > 0) is (acceptance is not None)


def test_a_failed_launch_leaves_no_line(tmp_path: Path) -> None:
    clock = Clock()
    executor = make_executor(clock)
    launch = executor.launch

    def fail_second(plan: StepPlan) -> None:
        if plan.step == second:
            raise RuntimeError("no")
        launch(plan)

    lines = run(executor, tmp_path / "whole", clock)
    second = lines[1]["step"]
    executor = make_executor(clock)
    launch = executor.launch
    executor.launch = fail_second  # type: ignore[method-assign]
    assert second not in {line["step"] for line in run(executor, tmp_path / "broken", clock)}


def test_the_summary_has_a_row_for_each_kind_of_step_and_every_column() -> None:
    def line(num_decodes: int, num_prefill_tokens: int, value: float, gap: float | None) -> dict[str, object]:
        times = dict.fromkeys(COLUMNS, value)
        return {"num_decodes": num_decodes, "num_prefill_tokens": num_prefill_tokens, **times, "gap_us": gap}

    head, *rows = summary([line(0, 8, 5.0, None), line(3, 8, 6.0, 1.0), line(3, 0, 7.0, 2.0), line(3, 0, 9.0, 2.0)])
    assert [row.split()[:2] for row in rows] == [["1", "prefill"], ["1", "mixed"], ["2", "decode"]]
    assert all(name.removesuffix("_us") in head for name in COLUMNS)
    assert "8 / 9" in rows[2]
    assert " - " in rows[0]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="trace_steps="):
        StepTrace(str(tmp_path / "no folder" / "file"))
