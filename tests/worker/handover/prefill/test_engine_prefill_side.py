"""The engine's part in a hand-over that it sends."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import (
    DEPTHS,
    check_all,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
)

from baton.worker.core import FinishReason, StepPlan
from baton.worker.requests.outputs import EngineListener, PrefillStarted


@DEPTHS
def test_a_prefill_for_another_worker_holds_its_blocks_until_freed(depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32)
    prompt = prompt_of(70)
    request = make_request(prompt, 20, prefill_only=True)
    rig.submit(request)
    started = []
    while not rig.seen.first_tokens:
        started += rig.step().prefill_started
    rig.drain()
    assert [(s.request, s.num_cached_tokens, len(s.block_ids)) for s in started] == [(request, 0, 18)]
    assert rig.seen.progress[request.request_id] == [32, 64, 70]
    assert rig.seen.first_tokens[request.request_id] == expected_tokens(prompt, 1)[0]
    assert rig.seen.finishes == {}
    assert started[0].block_ids == rig.engine.block_ids(request.request_id)
    assert rig.engine.audit().num_held_blocks == 18
    rig.engine.free_prefill(request.request_id)
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


@DEPTHS
def test_a_prefill_of_one_output_token_reports_its_progress(depth: int):
    """All but the last token of a moved request may be cached: its KV is still to be pushed."""
    rig = make_rig(make_executor(depth=depth))
    token_ids = prompt_of(17)
    rig.run(make_request(token_ids, 1))
    request = make_request(token_ids, 20, prefill_only=True, num_prompt_tokens=9)
    rig.submit(request)
    rig.drain()
    assert rig.seen.progress[request.request_id] == [17]
    assert rig.seen.first_tokens[request.request_id] == expected_tokens(token_ids, 1)[0]
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_an_abort_of_a_prefill_frees_its_blocks(steps: int, depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32)
    request = make_request(prompt_of(70), prefill_only=True)
    rig.submit(request)
    for _ in range(steps):
        rig.step()
    rig.engine.abort(request.request_id)
    rig.drain()
    assert rig.seen.finishes[request.request_id].reason is FinishReason.ABORT
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


def test_the_listener_is_called_before_a_prefill_is_launched():
    rig = make_rig()
    told: list[tuple[str, int]] = []

    class Starts(EngineListener):
        def on_prefill_started(self, started: PrefillStarted) -> None:
            told.append((started.request.request_id, started.row))

    rig.engine.listen(Starts())
    launched: list[int] = []
    launch = rig.executor.launch

    def launch_after_telling(plan: StepPlan) -> None:
        launched.append(len(told))
        launch(plan)

    rig.executor.launch = launch_after_telling  # type: ignore[method-assign]
    request = make_request(prompt_of(9), prefill_only=True)
    rig.submit(request)
    rig.step()
    assert told == [(request.request_id, 0)]
    assert launched == [1]


def test_prefills_for_others_are_never_preempted():
    rig = make_rig(make_executor(num_blocks=20))
    prefill = make_request(prompt_of(30), prefill_only=True, priority=9)
    running = [make_request(prompt_of(8, salt=1 + i), 30) for i in range(3)]
    rig.submit(prefill, *running)
    rig.drain()
    assert rig.seen.started == [prefill.request_id]
    held = rig.engine.block_ids(prefill.request_id)
    words = b"".join(bytes(rig.executor.read_blocks(layer, held)) for layer in range(2))
    fresh = make_rig()
    other = make_request(prompt_of(30), prefill_only=True)
    fresh.run(other)
    held = fresh.engine.block_ids(other.request_id)
    # The last block has two unused slots.
    for layer in range(2):
        ours = words[layer * len(words) // 2 :][: 30 * 8]
        assert ours == bytes(fresh.executor.read_blocks(layer, held))[: 30 * 8]
    rig.engine.free_prefill(prefill.request_id)
    check_all(rig, running)
