from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    Clock,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
)

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.core import BlockId, SamplingParams, StepPlan
from baton.worker.executors.sim.executor import SimSettings, SimSpeed
from baton.worker.executors.sim.kv import SimKv


def test_torch_is_not_imported():
    code = (
        "import sys, baton.worker.executors.sim.executor, baton.worker.engine.engine; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_decoding_word_by_word_equals_one_prefill():
    tokens = np.array(prompt_of(40), np.uint64)
    table = np.arange(10, dtype=np.int32)
    whole, stepwise = SimKv(2, 10, BLOCK_SIZE), SimKv(2, 10, BLOCK_SIZE)
    digest = whole.prefill(table, 0, tokens)
    other = stepwise.prefill(table, 0, tokens[:1])
    for position in range(1, 40):
        added = stepwise.decode(table[None, :], np.array([0]), np.array([position]), tokens[position : position + 1])
        other = (np.array([other]) + added)[0]
    assert (whole.words == stepwise.words).all()
    assert digest == other == whole.digest(table, 40)


@pytest.mark.parametrize("block", [0, 3, 9])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_corrupt_block_anywhere_in_a_reused_prefix_changes_the_output(block: int, layer: int):
    rig = make_rig()
    prompt = prompt_of(42)
    first = make_request(prompt, 1)
    rig.submit(first)
    while not rig.seen.tokens:
        rig.step()
    rig.drain()
    again = make_request(prompt, 8)
    rig.submit(again)
    hit = rig.engine._scheduler.pool.lookup(rig.engine._states[again.request_id].block_hashes)
    assert len(hit) == 10
    data = rig.executor.read_blocks(layer, [hit[block]])
    data[5] ^= 1
    rig.executor.write_blocks(layer, [hit[block]], memoryview(data))
    rig.drain()
    assert rig.seen.tokens[again.request_id] != expected_tokens(prompt, 8)


def test_swapped_blocks_change_the_output():
    executor = make_executor()
    kv = executor._kv
    table = np.arange(5, dtype=np.int32)
    kv.prefill(table, 0, np.array(prompt_of(20), np.uint64))
    swapped = np.array([0, 2, 1, 3, 4], np.int32)
    assert kv.digest(table, 20) != kv.digest(swapped, 20)


def test_a_seed_matters_only_above_temperature_zero():
    prompt = prompt_of(9)
    assert expected_tokens(prompt, 8, 0.0, 1) == expected_tokens(prompt, 8, 0.0, 2)
    assert expected_tokens(prompt, 8, 0.7, 1) != expected_tokens(prompt, 8, 0.7, 2)
    assert expected_tokens(prompt, 8, 0.7, 1) != expected_tokens(prompt, 8, 0.0, 1)


def test_special_tokens_are_never_generated():
    rig = make_rig(make_executor(vocab_size=24, first_token_id=5, eos_token_ids=(2, 9), max_model_len=512))
    prompt = [6] * 7
    (tokens,) = rig.run(make_request(prompt, 400))
    assert set(tokens) == set(range(5, 24)) - {9}


def test_end_of_sequence_comes_where_it_is_asked_for():
    rig = make_rig(make_executor(eos_every=4))
    request = make_request(prompt_of(5), 200, eos_token_ids=frozenset({2}))
    (tokens,) = rig.run(request)
    assert tokens[-1] == 2
    assert 2 not in tokens[:-1]


def test_suppressed_tokens_wait_for_min_tokens():
    rig = make_rig(make_executor(eos_every=2))
    eos = frozenset({2})
    sampling = SamplingParams(temperature=0.0, min_tokens=20, suppressed_token_ids=(2,))
    request = make_request(prompt_of(5), 200, min_tokens=20, eos_token_ids=eos, sampling=sampling)
    (tokens,) = rig.run(request)
    assert 2 not in tokens[:20]
    assert tokens[-1] == 2


def test_only_allowed_tokens_are_drawn():
    rig = make_rig()
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(100, 200))
    (tokens,) = rig.run(make_request(prompt_of(5), 30, sampling=sampling))
    assert set(tokens) == {100, 200}


def test_logprobs_are_deterministic_and_begin_with_the_drawn_token():
    seen = []
    for _ in range(2):
        rig = make_rig()
        rig.submit(make_request(prompt_of(5), 3, sampling=SamplingParams(temperature=0.0, logprobs=4)))
        found = []
        while rig.engine.has_work():
            found += [(token, logprobs) for _, token, logprobs in rig.step().tokens()]
        seen.append(found)
    assert seen[0] == seen[1]
    for token, logprobs in seen[0]:
        assert logprobs is not None
        assert logprobs.top_token_ids[0] == token
        assert len(set(logprobs.top_token_ids)) == 4
        assert list(logprobs.top_logprobs) == sorted(logprobs.top_logprobs, reverse=True)
        assert sum(np.exp(logprobs.top_logprobs)) <= 1.5
        assert logprobs.top_logprobs[0] == logprobs.logprob


def test_a_step_takes_the_time_of_its_load():
    clock = Clock()
    speed = SimSpeed(base=1.0, per_prefill_token=0.1, per_decode_request=0.01, per_context_token=0.001)
    rig = make_rig(make_executor(clock, speed=speed), clock)
    rig.submit(make_request(prompt_of(10), 3))
    before = clock.now
    rig.step()
    assert clock.now - before == pytest.approx(2.0)
    before = clock.now
    rig.step()
    assert clock.now - before == pytest.approx(1.0 + 0.01 + 0.010)


def test_factor_zero_takes_no_time():
    executor = make_executor()
    started = time.monotonic()
    for step in range(100):
        executor.launch(StepPlan(step))
        executor.collect()
    assert time.monotonic() - started < 1.0
    assert SimSpeed(factor=0).step_seconds(StepPlan(0)) == 0


def test_steps_in_flight_queue_up_on_the_device():
    clock = Clock()
    executor = make_executor(clock, depth=2, speed=SimSpeed(base=1.0))
    executor.launch(StepPlan(1))
    executor.launch(StepPlan(2))
    before = clock.now
    executor.collect()
    executor.collect()
    assert clock.now - before == pytest.approx(2.0)


def test_the_layer_hook_is_called_for_each_layer_during_the_step():
    clock = Clock()
    executor = make_executor(clock, num_layers=4, speed=SimSpeed(base=1.0, per_prefill_token=0.0))
    told: list[tuple[int, float]] = []
    executor.watch_layers(lambda plan, layer: told.append((layer, clock.now - start)))
    rig = make_rig(executor, clock)
    start = clock.now
    rig.submit(make_request(prompt_of(10), 1))
    rig.step()
    assert told == [(layer, pytest.approx((layer + 1) / 4)) for layer in range(4)]


def test_blocks_go_out_and_in_byte_for_byte():
    source, target = make_executor(), make_executor()
    table = np.arange(4, dtype=np.int32)
    source._kv.prefill(table, 0, np.array(prompt_of(16), np.uint64))
    for layer in range(2):
        data = source.read_blocks(layer, [BlockId(1), BlockId(3)])
        assert len(data) == 2 * source.kv_spec.layer_bytes(0)
        target.write_blocks(layer, [BlockId(7), BlockId(5)], memoryview(data))
        assert target.read_blocks(layer, [BlockId(7), BlockId(5)]) == data


def test_bytes_that_are_not_whole_blocks_are_refused():
    with pytest.raises(Mismatch, match="1 blocks of one layer are 32 bytes, not 3"):
        make_executor().write_blocks(0, [BlockId(0)], memoryview(b"abc"))


@pytest.mark.parametrize(
    ("values", "field"),
    [({"depth": 0}, "depth"), ({"vocab_size": 5}, "first_token_id"), ({"digest": b"short"}, "digest")],
)
def test_impossible_settings_are_named(values: dict[str, object], field: str):
    with pytest.raises(InvalidRequest) as caught:
        SimSettings(**values).validate()  # type: ignore[arg-type]
    assert caught.value.field == field
