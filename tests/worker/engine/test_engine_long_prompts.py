"""Long prompts from another worker: their cost is spread over steps, without loss."""

from __future__ import annotations

from support.engine.engine_harness import (
    BLOCK_SIZE,
    Rig,
    check_all,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    receive,
    submit_remote,
)

from baton.worker.core import Request


def receive_long(rig: Rig, max_tokens: int, num_blocks: int = 1200) -> Request:
    """A transferred prompt of which not all blocks are findable yet."""
    prompt = prompt_of(num_blocks * BLOCK_SIZE + 1)
    request = submit_remote(rig, prompt, max_tokens)
    receive(rig, request)
    rig.engine.accept_first_token(request.request_id, expected_tokens(prompt, 1)[0])
    rig.engine.finish_transfer(request.request_id)
    rig.step()
    assert 0 < len(rig.engine.cached_hashes()) < num_blocks * 16
    return request


def make_long_rig(num_blocks: int = 3000, **values: object) -> Rig:
    return make_rig(make_executor(num_blocks=num_blocks, max_model_len=8192), **values)


def test_a_long_prompt_is_cached_in_parts():
    rig = make_long_rig()
    request = receive_long(rig, 9)
    found = []
    while rig.engine.has_work():
        rig.step()
        rig.engine.audit()
        found.append(len(rig.engine.cached_hashes()) // 16)
    assert found == sorted(found)
    assert found[-1] == 1200 + (1 + 8) // BLOCK_SIZE
    again = make_request(list(request.token_ids), 2)
    rig.run(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == found[-1] * BLOCK_SIZE
    rig.assert_nothing_held()


def test_a_long_prompt_whose_request_ends_is_findable_whole():
    rig = make_long_rig()
    request = receive_long(rig, 50)
    rig.engine.abort(request.request_id)
    rig.drain()
    rig.assert_nothing_held()
    assert len(rig.engine.cached_hashes()) == 1200 * 16


def test_a_request_that_waits_for_a_long_prompt_continues_when_its_blocks_are_cached():
    rig = make_long_rig()
    prompt = prompt_of(1200 * BLOCK_SIZE + 1)
    request, other = submit_remote(rig, prompt, 4), make_request(prompt, 4, remote_prefill=True)
    rig.submit(other)
    receive(rig, request)
    rig.engine.accept_first_token(request.request_id, expected_tokens(prompt, 1)[0])
    rig.engine.finish_transfer(request.request_id)
    rig.drain()
    check_all(rig, [request, other])
    assert rig.seen.finishes[other.request_id].num_cached_tokens == 1200 * BLOCK_SIZE


def test_a_reset_while_a_long_prompt_is_stored_leaves_nothing_of_it():
    rig = make_long_rig()
    request = receive_long(rig, 9)
    rig.engine.reset_prefix_cache()
    rig.drain()
    assert rig.engine.cached_hashes() == b""
    check_all(rig, [request])


def test_preempting_a_long_prompt_while_it_is_stored_loses_nothing():
    rig = make_long_rig(num_blocks=1210, max_num_requests=1)
    request = receive_long(rig, 9)
    urgent = make_request(prompt_of(20, 7), 2, priority=-1)
    rig.submit(urgent)
    rig.drain()
    check_all(rig, [urgent, request])
    assert rig.seen.finishes[request.request_id].num_preemptions == 1


def test_blocks_for_a_lease_are_evicted_while_its_prompt_is_computed():
    rig = make_long_rig(num_blocks=1024)
    rig.run(*(make_request(prompt_of(1000, salt), 1) for salt in range(5)))
    assert rig.engine.load().num_free_blocks == 1024
    assert rig.engine.count_blocks().num_empty_blocks == 0
    wanted = submit_remote(rig, prompt_of(2000, 9), 2)
    others = make_request(prompt_of(8, 11), 6)
    rig.run(others)
    assert rig.engine.count_blocks().num_empty_blocks >= 500
    receive(rig, wanted)
    rig.engine.finish_transfer(wanted.request_id)
    rig.drain()
    check_all(rig, [wanted, others])
