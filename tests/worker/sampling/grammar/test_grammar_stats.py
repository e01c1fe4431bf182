"""What the grammars of an engine count, and how that reaches the worker's metrics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.sampling.grammar_rig import (
    SAMPLE_MODEL,
    Run,
    json_schema,
    make_engine,
    make_request,
    make_sim_executor,
    regex,
    wait_for,
    write_byte_tokenizer,
)

from baton.v1 import control_pb2
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.front.metrics.worker import metrics_of
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.sampling.grammar.stats import GrammarStats

MODEL = ModelSpec(bytes(16), 4096, 512, (2,))
SMALL = json_schema({"type": "object", "properties": {"name": {"type": "string"}}})


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: SAMPLE_MODEL, MODEL, 1)
    yield made
    made.close()


def opened(grammars: Grammars, constraint: Constraint) -> GrammarMatch:
    return wait_for(grammars, grammars.open(make_request(constraint=constraint), None))


def test_compilations_hits_trials_and_refusals_are_counted(grammars: Grammars) -> None:
    assert grammars.stats() == GrammarStats()
    matches = [opened(grammars, SMALL), opened(grammars, SMALL)]
    stats = grammars.stats()
    assert (stats.num_compiled, stats.num_cache_hits, stats.num_tried) == (1, 1, 0)
    assert 0 < stats.num_cache_bytes < stats.num_live_bytes
    matches.append(opened(grammars, regex("[a-z]+x")))
    stats = grammars.stats()
    assert (stats.num_compiled, stats.num_tried, stats.num_killed, stats.num_refused) == (2, 1, 0, 0)
    opened(grammars, regex("("))
    opened(grammars, regex("(a{1000}){1000}"))
    stats = grammars.stats()
    assert (stats.num_compiled, stats.num_killed, stats.num_refused) == (2, 0, 2)
    patterns = {"type": "object", "patternProperties": {f"^a{index}_.*x{index}$": {} for index in range(120)}}
    opened(grammars, json_schema({"type": "object", "properties": {f"k{index}": patterns for index in range(20)}}))
    stats = grammars.stats()
    assert (stats.num_killed, stats.num_refused, stats.num_waiting, stats.num_ended) == (1, 3, 0, 0)
    for match in matches:
        grammars.end(match)
    assert grammars.stats().num_live_bytes == 0


def test_requests_that_end_for_their_masks_are_counted(grammars: Grammars) -> None:
    match = opened(grammars, Constraint(ConstraintForm.GRAMMAR, 'start: start start | "a" | "b"'))
    while match.error is None:
        bits = np.unpackbits(match.mask.view(np.uint8), bitorder="little")
        bits[2] = 0
        grammars.advance(match, int(np.flatnonzero(bits)[0]))
        wait_for(grammars, match)
    assert (grammars.stats().num_ended, grammars.stats().num_refused) == (1, 0)


def test_an_engine_holds_nothing_for_requests_that_ended(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    engine, grammars = make_engine(make_sim_executor(), folder)
    run = Run(engine)
    run.run(*(make_request(constraint=SMALL, seed=seed, max_tokens=40) for seed in range(1, 4)))
    stats = engine.grammar_stats()
    grammars.close()
    assert stats.num_compiled + stats.num_cache_hits == 3  # equal ones may compile side by side
    assert stats.num_live_bytes == 0


def test_each_count_is_a_metric() -> None:
    stats = GrammarStats(1, 2, 3, 4, 5, 6, 7, 8, 9)
    answer = control_pb2.GetStatsResponse(counters=control_pb2.WorkerCounters(constraints=stats.message()))
    shown = {
        sample.name: sample.value
        for metric in metrics_of(answer, "m")
        for sample in metric.samples
        if "_constraint" in sample.name
    }
    prefix = "baton_worker_constraint"
    totals = ("compiled", "cached", "tried", "killed", "refused", "ended")
    expected = {f"{prefix}s_{name}_total": float(value) for value, name in enumerate(totals, 1)}
    now = {f"{prefix}s_waiting": 7.0, f"{prefix}_cache_bytes": 8.0, f"{prefix}_live_bytes": 9.0}
    assert shown == {**expected, **now}
