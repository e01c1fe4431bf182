"""Prefixes that are being computed, and the engine's cache events."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import DEPTHS, check_all, make_executor, make_request, make_rig, prompt_of

from baton.rpc.errors import InvalidRequest
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.requests.outputs import EngineListener

# Prefixes that are being computed.


@DEPTHS
def test_with_dummy_kv_every_step_decodes(depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32, prefix_caching=False, dummy_kv=True)
    requests = [make_request(prompt_of(200 + i), 10) for i in range(3)]
    assert [len(tokens) for tokens in rig.run(*requests)] == [10, 10, 10]
    rig.assert_nothing_held()
    counters = rig.engine.counters()
    assert counters.num_cached_tokens == 0
    assert counters.num_steps <= 10 + depth


def test_dummy_kv_is_never_findable():
    with pytest.raises(InvalidRequest, match="needs prefix_caching=false"):
        make_rig(make_executor(), dummy_kv=True)


@DEPTHS
def test_a_burst_with_one_prefix_computes_it_once(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(200)
    requests = [make_request([*prompt, 50 + i], 4) for i in range(8)]
    rig.run(*requests)
    check_all(rig, requests)
    assert rig.engine.counters().num_cached_tokens == 7 * 200


@DEPTHS
def test_aborting_the_request_that_computes_a_prefix_wakes_the_waiting_ones(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(200)
    requests = [make_request([*prompt, 50 + i], 4) for i in range(4)]
    rig.submit(*requests)
    rig.step()
    rig.step()
    rig.engine.abort(requests[0].request_id)
    rig.engine.abort(requests[2].request_id)
    rig.drain()
    check_all(rig, [requests[1], requests[3]])


def test_preempting_the_request_that_computes_a_prefix_wakes_the_waiting_ones():
    rig = make_rig(make_executor(num_blocks=32), max_num_batched_tokens=32)
    prompt = prompt_of(100)
    low = [make_request([*prompt, 50 + i], 4, priority=5) for i in range(3)]
    rig.submit(*low)
    rig.step()
    high = make_request(prompt_of(90, salt=1), 4, priority=0)
    rig.submit(high)
    rig.drain()
    check_all(rig, [*low, high])
    assert rig.seen.finishes[low[0].request_id].num_preemptions >= 1


@DEPTHS
def test_equal_requests_that_fill_equal_blocks_in_the_same_steps_share_what_is_findable(depth: int):
    rig = make_rig(make_executor(depth=depth))
    requests = [make_request(prompt_of(3), 20) for _ in range(4)]
    rig.run(*requests)
    check_all(rig, requests)
    audit = rig.engine.audit()
    assert audit.num_cached_blocks == (3 + 20 - 1) // rig.executor.kv_spec.block_size
    assert audit.num_empty_blocks == audit.num_blocks - audit.num_cached_blocks


# Events.


def test_events_replayed_give_the_cached_hashes():
    rig = make_rig(make_executor(num_blocks=24))
    known: set[bytes] = set()
    for i in range(12):
        rig.run(make_request(prompt_of(30, salt=i), 10))
        for event in rig.engine.take_events():
            hashes = {event.block_hashes[j : j + 16] for j in range(0, len(event.block_hashes), 16)}
            known = known | hashes if isinstance(event, StoredEvent) else known - hashes
            assert isinstance(event, (StoredEvent, RemovedEvent))
    cached = rig.engine.cached_hashes()
    assert known == {cached[j : j + 16] for j in range(0, len(cached), 16)}
    assert rig.engine.counters().num_evicted_blocks > 0


@DEPTHS
def test_a_reset_drops_the_cache_and_affects_no_request(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(40)
    running = [make_request([*prompt, 9], 20), make_request([*prompt, 8], 20)]
    rig.submit(*running)
    for _ in range(4):
        rig.step()
    assert rig.engine.reset_prefix_cache() == 2
    assert rig.engine.epoch == 2
    assert rig.engine.cached_hashes() == b""
    rig.drain()
    assert rig.engine.take_events() == []
    again = make_request([*prompt, 7], 4)
    rig.run(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0
    check_all(rig, [*running, again])


def test_evictions_are_published_before_the_overwriting_step_ends():
    rig = make_rig(make_executor(num_blocks=16))
    told: list[tuple[int, int]] = []

    class Removals(EngineListener):
        def on_evicted(self) -> None:
            events = rig.engine.take_events()
            evicted = b"".join(event.block_hashes for event in events if isinstance(event, RemovedEvent))
            told.append((len(evicted) // 16, rig.engine.counters().num_steps))

    rig.engine.listen(Removals())
    first, second = make_request(prompt_of(40), 2), make_request(prompt_of(40, salt=1), 2)
    rig.run(first)
    assert told == []
    num_steps = rig.engine.counters().num_steps
    rig.submit(second)
    rig.step()
    assert [steps for _, steps in told] == [num_steps]
    assert told[0][0] == rig.engine.counters().num_evicted_blocks > 0
    rig.drain()


# No prefix cache.


@DEPTHS
def test_without_a_prefix_cache_nothing_is_found_reported_or_kept(depth: int):
    rig = make_rig(make_executor(depth=depth), prefix_caching=False)
    requests = [make_request(prompt_of(100), 20) for _ in range(3)]
    for request in requests:
        rig.run(request)
    check_all(rig, requests)
    assert rig.engine.counters().num_cached_tokens == 0
    assert rig.engine.take_events() == []
    assert rig.engine.cached_hashes() == b""
    assert rig.engine.audit().num_empty_blocks == rig.executor.num_blocks
