"""Masks that follow their step's launch: constrained rows take every step, and get the tokens that they get without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.step_harness import Running, StepHarness
from support.sampling.grammar_rig import (
    Run,
    choices,
    json_schema,
    make_cpu_executor,
    make_engine,
    make_request,
    make_sim_executor,
    regex,
    write_byte_tokenizer,
    write_tiny_model,
)

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StepPlan, TokenMasks
from baton.worker.executors.base import Executor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.sim.executor import SimSpeed

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PENALIZED = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny_model(made)
    write_byte_tokenizer(made)
    return made


def mixed_requests() -> list[Request]:
    """Rows with and without constraints, penalties and log-probabilities, that end at different steps."""
    requests = [make_request([40, 41, i], json_schema(SCHEMA), max_tokens=60, seed=i) for i in range(5)]
    requests += [make_request([42, i], regex("[a-z]{3,9}-[0-9]{2,20}"), max_tokens=30, seed=i) for i in range(5)]
    requests += [make_request([43, i], choices("yes", "no", "perhaps"), seed=i) for i in range(3)]
    requests += [make_request([44, i], regex("[0-9]{25}"), sampling=PENALIZED) for i in range(3)]
    requests += [make_request([45, i], max_tokens=10 + 9 * i, seed=i, eos=frozenset()) for i in range(4)]
    requests += [make_request([46, i], max_tokens=30, sampling=PENALIZED, eos=frozenset()) for i in range(2)]
    return requests


def tokens_of(executor: Executor, folder: Path, **settings: object) -> tuple[list[list[int]], list[object], Run]:
    engine, grammars = make_engine(executor, folder, **settings)  # type: ignore[arg-type]
    run = Run(engine)
    requests = mixed_requests()
    tokens = run.run(*requests)
    assert run.failures == {}
    engine.audit()
    grammars.close()
    logprobs = [[entry.rank for entry in run.logprobs.get(each.request_id, [])] for each in requests]  # type: ignore[attr-defined]
    return tokens, [*logprobs], run


class DrawsOnce(CpuExecutor):
    """Fails at the first draw of its own."""

    failed = False

    def draw(self, masks: TokenMasks | None, undrawn: NDArray[np.int32]) -> None:
        if not self.failed and self._undrawn is not None and self._undrawn.plan.masks_follow:
            self.failed = True
            raise RuntimeError("no draw")
        super().draw(masks, undrawn)


def test_a_draw_that_fails_leaves_an_engine_that_works(folder: Path) -> None:
    executor = ahead(
        DrawsOnce(WorkerConfig(model=str(folder), threads=1, block_size=8, num_blocks=400, max_num_requests=32)), 2
    )
    engine, grammars = make_engine(executor, folder)
    run = Run(engine)
    requests = mixed_requests()
    run.run(*requests)
    # Steps that were launched behind it fail too, on this executor.
    assert engine.counters().num_failed_steps >= 1
    assert run.failures
    assert set(run.failures) | set(run.reasons) == {request.request_id for request in requests}
    (after,) = run.run(make_request([8], regex("[0-9]{9}"), seed=1))
    assert len(after) >= 9
    engine.audit()
    grammars.close()


def ahead(executor: CpuExecutor, depth: int) -> CpuExecutor:
    """The executor keeps sampled tokens itself, so that steps can be launched ahead."""
    executor.depth = depth
    return executor


@pytest.mark.parametrize("num_blocks", [400, 24], ids=["roomy", "preempting"])
def test_tokens_are_those_of_masks_at_the_launch(folder: Path, num_blocks: int) -> None:
    alone, ranks, _ = tokens_of(make_cpu_executor(folder, num_blocks), folder)
    for depth in (2, 3):
        tokens, told, run = tokens_of(ahead(make_cpu_executor(folder, num_blocks), depth), folder)
        assert tokens == alone
        assert told == ranks
    assert (run.engine.counters().num_preemptions > 0) == (num_blocks == 24)


@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["too slow", "in time"])
@pytest.mark.parametrize("num_blocks", [400, 24], ids=["roomy", "preempting"])
def test_late_grammars_cost_no_token(folder: Path, factor: float, num_blocks: int) -> None:
    """Steps that take no time wait for no grammar: all rows whose masks follow are left out."""
    alone, _, _ = tokens_of(make_sim_executor(num_blocks=num_blocks), folder)
    for depth in (2, 3):
        for most in (1, 3):
            speed = SimSpeed(factor=factor)
            executor = make_sim_executor(num_blocks=num_blocks, depth=depth, max_step_tokens=most, speed=speed)
            if most == 1:
                assert tokens_of(executor, folder)[0] == alone
            else:
                several = make_sim_executor(num_blocks=num_blocks, max_step_tokens=most)
                assert tokens_of(executor, folder)[0] == tokens_of(several, folder)[0]


def test_a_constrained_row_takes_every_step(folder: Path) -> None:
    executor = make_sim_executor(depth=2, speed=SimSpeed(factor=10.0))
    engine, grammars = make_engine(executor, folder)
    run = Run(engine)
    constrained, other = (
        make_request([8], regex("[0-9]{40}"), seed=1),
        make_request([7], max_tokens=900, eos=frozenset()),
    )
    engine.submit(constrained)
    engine.submit(other)
    run.drain(until=lambda: constrained.request_id in run.tokens)
    begun = engine.counters().num_steps
    run.drain(until=lambda: constrained.request_id in run.reasons)
    assert len(run.tokens[constrained.request_id]) >= 40
    # At every second step of the other request it would be 80.
    assert engine.counters().num_steps - begun < 60
    engine.abort(other.request_id)
    run.drain()
    grammars.close()


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_row_that_is_left_out_gets_its_token_later(folder: Path, kind: str) -> None:
    def harness() -> tuple[StepHarness, Running, Running]:
        made = StepHarness(make_cpu_executor(folder) if kind == "cpu" else make_sim_executor())
        return made, made.admit([50, 51, 52], PENALIZED), made.admit([60, 61], replace(PENALIZED, seed=9))

    expected, one, other = harness()
    for _ in range(5):
        expected.run_step()
    got, late, other_too = harness()
    got.run_step()
    plan = StepPlan(
        got.step,
        rows=np.array([late.row, other_too.row], np.int32),
        num_scheduled_tokens=np.ones(2, np.int32),
        num_computed_tokens=np.array([late.num_computed, other_too.num_computed], np.int32),
        samples=np.ones(2, np.bool_),
        num_decodes=2,
        masks_follow=True,
    )
    got.executor.launch(plan)
    got.executor.draw(None, np.zeros(1, np.int32))
    result = got.executor.collect()
    assert result.counts.tolist() == [0, 1]
    assert list(result.logprobs) == [0]
    other_too.token_ids += result.token_ids.tolist()
    other_too.num_computed += 1
    got.step += 1
    for _ in range(3):
        got.run_step()
    assert late.output == one.output[:4]
    assert other_too.output == other.output
