"""An engine that is stopped at any step, and loses blocks and memory: every request still gets its own tokens."""

from __future__ import annotations

import random

import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    DEPTHS,
    Clock,
    Rig,
    check_all,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    receive,
    submit_remote,
)

from baton.worker.core import SamplingParams


def settle(rig: Rig) -> None:
    """Frozen, with nothing in flight."""
    rig.engine.frozen = True
    for _ in range(200):
        rig.step()
        if rig.engine.settled:
            return
    raise AssertionError("it does not settle")


def take_memory(rig: Rig) -> None:
    """What a sleep and a wake-up do to the engine and to the device."""
    rig.engine.recompute_all()
    epoch = rig.engine.epoch
    assert rig.engine.reset_prefix_cache() > epoch
    audit = rig.engine.audit()
    assert audit.num_empty_blocks == rig.executor.num_blocks
    assert rig.executor.sleep(1) > 0
    assert rig.executor.sleep(1) == 0
    rig.executor.wake(None)


@DEPTHS
@pytest.mark.parametrize("seed", range(6))
def test_memory_taken_at_random_steps_changes_no_token(depth: int, seed: int) -> None:
    chance = random.Random(seed)
    clock = Clock()
    host = {"num_host_blocks": 60} if seed % 2 else {}
    rig = make_rig(make_executor(clock, depth=depth, num_blocks=60, **host), clock)
    shared = prompt_of(40)
    requests = [
        make_request(
            [*shared[: chance.choice((0, 12, 40))], *prompt_of(chance.randrange(3, 60), salt)],
            chance.randrange(2, 40),
            sampling=SamplingParams(temperature=chance.choice((0.0, 0.8)), seed=salt),
        )
        for salt in range(1, 15)
    ]
    waiting = list(requests)
    while waiting or rig.engine.has_work():
        if waiting and chance.random() < 0.4:
            rig.submit(waiting.pop())
        rig.step()
        if chance.random() < 0.08:
            settle(rig)
            take_memory(rig)
            rig.engine.frozen = False
    check_all(rig, requests)


def test_a_frozen_engine_computes_nothing_and_asks_for_no_step() -> None:
    rig = make_rig()
    request = make_request(prompt_of(30), 20)
    rig.submit(request)
    rig.step()
    settle(rig)
    before = list(rig.seen.tokens[request.request_id])
    assert not rig.engine.has_work()
    rig.step()
    assert rig.seen.tokens[request.request_id] == before
    rig.engine.frozen = False
    assert rig.engine.has_work()
    rig.drain()
    check_all(rig, [request])


def test_a_request_that_had_its_prompt_from_elsewhere_computes_it_here_afterwards() -> None:
    rig = make_rig()
    request = submit_remote(rig, prompt_of(10 * BLOCK_SIZE), 6)
    receive(rig, request)
    rig.engine.finish_transfer(request.request_id)
    rig.engine.frozen = True
    settle(rig)
    take_memory(rig)
    rig.engine.frozen = False
    rig.drain()
    check_all(rig, [request])


def test_an_abort_while_frozen_ends_the_request() -> None:
    rig = make_rig()
    request = make_request(prompt_of(30), 20)
    rig.submit(request)
    rig.step()
    settle(rig)
    rig.engine.abort(request.request_id)
    rig.step()
    assert request.request_id in rig.seen.finishes
    rig.assert_nothing_held()
