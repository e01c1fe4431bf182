"""Steps that yield several tokens a row: a request's tokens, stops and blocks are those of one token a step."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    DEPTHS,
    Rig,
    check_all,
    expected_for,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    receive,
    submit_remote,
)

from baton.worker.core import FinishReason, Request, SamplingParams, StepPlan, StepResult
from baton.worker.executors.sim.executor import SimExecutor
from baton.worker.scheduling.steps.batch import Batch

WIDTHS = pytest.mark.parametrize("max_step_tokens", [2, 3, 9])


class WatchedExecutor(SimExecutor):
    """Records launched plans and their results."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self._plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        super().launch(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        self.steps.append((self._plans.pop(0), result))
        return result


def make_watched(max_step_tokens: int, depth: int = 1, num_blocks: int = 256) -> tuple[Rig, WatchedExecutor]:
    settings = make_executor(depth=depth, num_blocks=num_blocks, max_step_tokens=max_step_tokens)._settings
    executor = WatchedExecutor(settings)
    return make_rig(executor), executor


def run_audited(rig: Rig, *requests: Request) -> None:
    rig.submit(*requests)
    while rig.engine.has_work():
        rig.step()
        rig.engine.audit()


@DEPTHS
@WIDTHS
def test_requests_get_the_tokens_of_single_steps_in_fewer_steps(max_step_tokens: int, depth: int):
    rig, executor = make_watched(max_step_tokens, depth)
    requests = [make_request(prompt_of(3 + 7 * i, salt=i), 40 + i) for i in range(6)]
    requests.append(make_request(prompt_of(20), 30, sampling=SamplingParams(temperature=0.8, seed=7)))
    run_audited(rig, *requests)
    check_all(rig, requests)
    decodes = [result.counts[: plan.num_decodes] for plan, result in executor.steps]
    assert {int(count) for counts in decodes for count in counts} == set(range(1, max_step_tokens + 1))
    assert len(executor.steps) < 40
    counters = rig.engine.counters()
    assert counters.num_output_tokens == sum(request.stop.max_tokens for request in requests)


@DEPTHS
@WIDTHS
def test_no_step_computes_beyond_a_rows_blocks_or_limit(max_step_tokens: int, depth: int):
    rig, executor = make_watched(max_step_tokens, depth)
    requests = [make_request(prompt_of(5, salt=i), 3 + i) for i in range(12)]
    rig.run(*requests)
    for plan, result in executor.steps:
        scheduled, counts = plan.num_scheduled_tokens, result.counts
        assert plan.num_tokens <= 64
        assert (counts[: plan.num_decodes] >= 1).all()
        assert (counts[: plan.num_decodes] <= scheduled[: plan.num_decodes]).all()
        assert counts[plan.num_decodes :].tolist() == plan.samples[plan.num_decodes :].tolist()
        assert counts.sum() == len(result.token_ids)
    check_all(rig, requests)


@DEPTHS
@WIDTHS
def test_a_stop_token_within_a_step_ends_the_request_and_discards_later_tokens(max_step_tokens: int, depth: int):
    for place in range(12):
        rig, _ = make_watched(max_step_tokens, depth)
        tokens = expected_tokens(prompt_of(9), 40)
        request = make_request(prompt_of(9), 40, stop_token_ids=frozenset({tokens[place]}))
        other = make_request(prompt_of(6, salt=1), 30)
        run_audited(rig, request, other)
        assert rig.seen.tokens[request.request_id] == tokens[: place + 1]
        finish = rig.seen.finishes[request.request_id]
        assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, tokens[place])
        counters = rig.engine.counters()
        assert counters.num_output_tokens == place + 1 + 30
        check_all(rig, [other])


@WIDTHS
def test_min_tokens_count_within_a_step(max_step_tokens: int):
    rig, _ = make_watched(max_step_tokens)
    tokens = expected_tokens(prompt_of(9), 40)
    stops = frozenset(tokens[:10])
    (got,) = rig.run(make_request(prompt_of(9), 40, min_tokens=8, stop_token_ids=stops))
    assert got == tokens[:8]


@DEPTHS
@WIDTHS
def test_log_probabilities_stay_with_their_tokens(max_step_tokens: int, depth: int):
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    found = []
    for width in (1, max_step_tokens):
        rig, _ = make_watched(width, depth)
        asking, plain = make_request(prompt_of(9), 25, sampling=sampling), make_request(prompt_of(4, salt=2), 25)
        rig.submit(plain, asking)
        seen: list[tuple[int, object]] = []
        while rig.engine.has_work():
            tokens = list(rig.step().tokens())
            assert all((logprobs is None) == (request is plain) for request, _, logprobs in tokens)
            seen += [(token_id, logprobs) for request, token_id, logprobs in tokens if request is asking]
        found.append(seen)
    assert len(found[0]) == 25
    assert found[0] == found[1]


@DEPTHS
@WIDTHS
def test_requests_that_are_preempted_between_such_steps_lose_nothing(max_step_tokens: int, depth: int):
    rig, _ = make_watched(max_step_tokens, depth, num_blocks=24)
    requests = [make_request(prompt_of(12, salt=i), 50, arrival=float(i)) for i in range(5)]
    run_audited(rig, *requests)
    assert rig.engine.counters().num_preemptions > 0
    check_all(rig, requests)


@DEPTHS
@WIDTHS
def test_blocks_that_such_steps_fill_are_found_again(max_step_tokens: int, depth: int):
    rig, _ = make_watched(max_step_tokens, depth)
    prompt = prompt_of(10)
    (tokens,) = rig.run(make_request(prompt, 31))
    again = make_request([*prompt, *tokens], 5)
    run_audited(rig, again)
    # All that was computed: the last token's KV never was.
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 40 // BLOCK_SIZE * BLOCK_SIZE
    assert rig.seen.tokens[again.request_id] == expected_tokens([*prompt, *tokens], 5)


@DEPTHS
@WIDTHS
def test_a_resumed_request_and_a_remote_prefill_continue_as_usual(max_step_tokens: int, depth: int):
    rig, _ = make_watched(max_step_tokens, depth)
    whole = expected_tokens(prompt_of(9), 30)
    resumed = make_request([*prompt_of(9), *whole[:11]], 30, num_prompt_tokens=9)
    remote = submit_remote(rig, prompt_of(21, salt=3), 20)
    rig.submit(resumed)
    receive(rig, remote)
    rig.engine.accept_first_token(remote.request_id, expected_for(remote)[0])
    rig.engine.finish_transfer(remote.request_id)
    rig.drain()
    assert rig.seen.tokens[resumed.request_id] == whole[11:]
    assert rig.seen.tokens[remote.request_id] == expected_for(remote)
    rig.assert_nothing_held()


@DEPTHS
def test_an_abort_between_such_steps_frees_everything(depth: int):
    rig, _ = make_watched(4, depth)
    request, other = make_request(prompt_of(9), 60), make_request(prompt_of(5, salt=1), 60)
    rig.submit(request, other)
    for _ in range(5):
        rig.step()
    rig.engine.abort(request.request_id)
    rig.drain()
    assert rig.seen.finishes[request.request_id].reason is FinishReason.ABORT
    check_all(rig, [other])


def test_only_the_remaining_budget_is_spent_on_further_tokens():
    rig, executor = make_watched(8)
    decoding = [make_request(prompt_of(4, salt=i), 60) for i in range(4)]
    rig.submit(*decoding)
    for _ in range(4):
        rig.step()
    rig.submit(make_request(prompt_of(300, salt=9), 5))
    rig.drain()
    check_all(rig, decoding)
    crowded = [plan for plan, _ in executor.steps if plan.num_decodes == 4 and plan.num_prefill_tokens]
    assert any(plan.num_prefill_tokens == 60 for plan in crowded)
    for plan in crowded:
        assert plan.num_tokens <= 64
        if plan.num_prefill_tokens == 60:
            assert plan.num_scheduled_tokens[:4].tolist() == [1] * 4


def make_batch(
    num_computed: list[int], capacity: list[int], limit: list[int], decode_span: int = 0
) -> tuple[Batch, np.ndarray]:
    batch = Batch(len(num_computed), max_step_tokens=4, decode_span=decode_span)
    batch.num_computed[:], batch.capacity[:] = num_computed, capacity
    batch.max_computed[:] = [each - 1 for each in limit]
    return batch, np.arange(len(num_computed), dtype=np.int32)


def test_a_row_computes_as_many_tokens_as_fit_its_blocks_and_its_limit():
    batch, rows = make_batch([10, 10, 10, 10], [12, 16, 16, 11], [99, 13, 99, 99])
    assert batch.step_tokens(rows, 100).tolist() == [2, 2, 4, 1]
    assert batch.step_tokens(rows, 7).tolist() == [2, 2, 2, 1]
    assert batch.step_tokens(rows, 3).tolist() == [1, 1, 1, 1]
    batch.constrained[2], batch.num_constrained = True, 1
    assert batch.step_tokens(rows, 100).tolist() == [2, 2, 1, 1]


def test_rows_with_states_compute_no_token_behind_the_block_that_they_are_in():
    batch, rows = make_batch([10, 14, 15, 16], [48, 48, 16, 16], [99, 99, 99, 99], decode_span=16)
    assert batch.step_tokens(rows[:3], 100).tolist() == [4, 2, 1]
    assert batch.short_rows(rows).tolist() == [3]


def test_a_row_is_short_of_blocks_where_they_end_before_its_step():
    batch, rows = make_batch([10, 10, 10, 12], [12, 12, 16, 12], [99, 13, 99, 14])
    assert batch.short_rows(rows).tolist() == [0, 3]
