"""Engines with host memory: tokens are the same, prefixes are restored, and other requests do not wait for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    Clock,
    Rig,
    expected_for,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    write_remote_kv,
)
from support.engine.tiny_models import make_model

from baton.rpc.errors import InvalidRequest
from baton.v1 import control_pb2, worker_pb2
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HostSlot, Request, StepPlan, Tier
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import RestoreCopy
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.factory import sim_settings
from baton.worker.executors.host.cache import HostMemory
from baton.worker.executors.sim.executor import SimExecutor, SimSpeed
from baton.worker.front.metrics.worker import metrics_of
from baton.worker.kv.cache_events import StoredEvent
from baton.worker.process.state_reporter import host_cache_message, load_message
from baton.worker.requests.state import Phase
from baton.worker.scheduling.settings import EngineSettings

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def make_host_rig(
    clock: Clock | None = None, num_blocks: int = 40, num_host_blocks: int = 100, **values: object
) -> Rig:
    executor_keys = ("depth", "host_staging_blocks", "speed")
    device = {key: values.pop(key) for key in executor_keys if key in values}
    executor = make_executor(clock, num_blocks=num_blocks, num_host_blocks=num_host_blocks, **device)
    return make_rig(executor, clock, **{"min_host_hit_tokens": 0, "max_num_batched_tokens": 256, **values})


def evict_everything(rig: Rig, clock: Clock | None = None) -> None:
    """Other prompts pass through the whole pool. Whatever was cached is in host memory then."""
    num_tokens = (rig.executor.num_blocks - 2) * BLOCK_SIZE
    for salt in (1000, 1001):
        rig.run(make_request(prompt_of(num_tokens, salt), 1))
        if clock is not None:
            clock.sleep(10)
    rig.step()


def check(rig: Rig, *requests: Request) -> None:
    for request in requests:
        assert rig.seen.tokens[request.request_id] == expected_for(request)
    rig.assert_nothing_held()


def hashes_of(packed: bytes) -> set[bytes]:
    return {packed[start : start + 16] for start in range(0, len(packed), 16)}


@DEPTHS
def test_an_evicted_prefix_is_restored_and_counts_as_cached(depth: int):
    rig = make_host_rig(depth=depth)
    prompt = prompt_of(81)
    first, second = make_request(prompt), make_request(prompt)
    rig.run(first)
    evict_everything(rig)
    assert not hashes_of(rig.engine.cached_hashes(Tier.HOST)).isdisjoint(first_hashes(prompt))
    rig.run(second)
    check(rig, first, second)
    assert rig.seen.finishes[second.request_id].num_cached_tokens == 80
    counters = rig.engine.counters()
    assert counters.num_host_hit_tokens == 80
    assert counters.num_restored_blocks == 20
    assert counters.num_restored_bytes == 20 * rig.executor.kv_spec.bytes_per_block
    assert counters.num_offloaded_blocks >= 20


@pytest.mark.parametrize(("policy", "num_cached_tokens"), [("lru", 0), ("arc", 80)])
def test_arc_restores_a_prompt_that_returns_behind_more_texts_than_host_memory_holds(
    policy: str, num_cached_tokens: int
):
    rig = make_host_rig(num_host_blocks=60, host_eviction_policy=policy)
    returning = prompt_of(81)
    rig.run(make_request(returning, 1))
    rig.run(make_request(prompt_of(152, salt=1000), 1))
    rig.run(make_request(returning, 1))
    for salt in range(2000, 2004):
        rig.run(make_request(prompt_of(152, salt), 1))
    again = make_request(returning)
    rig.run(again)
    check(rig, again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == num_cached_tokens


def first_hashes(prompt: list[int]) -> set[bytes]:
    rig = make_rig()
    rig.run(make_request(prompt, 1))
    return hashes_of(rig.engine.cached_hashes())


@DEPTHS
def test_the_part_on_the_device_is_not_restored(depth: int):
    rig = make_host_rig(depth=depth)
    prompt = prompt_of(121)
    rig.run(make_request(prompt, 1))
    rig.run(make_request(prompt_of(60, salt=5), 1))
    on_device = len(rig.engine._scheduler.pool.lookup(rig_hashes(prompt)))
    assert 0 < on_device < 30
    again = make_request(prompt)
    rig.run(again)
    check(rig, again)
    assert rig.engine.counters().num_restored_blocks == 30 - on_device
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 120


def rig_hashes(prompt: list[int]) -> list:
    from baton.worker.requests.state import RequestState

    state = RequestState(make_request(prompt), (0, 0.0, 0), 10**6, frozenset(), 0.0)
    state.hash_up_to(len(prompt), BLOCK_SIZE)
    return state.block_hashes


def test_a_hit_that_does_not_pay_is_not_taken():
    rig = make_host_rig(min_host_hit_tokens=256)
    prompt = prompt_of(81)
    rig.run(make_request(prompt))
    evict_everything(rig)
    again = make_request(prompt)
    rig.run(again)
    check(rig, again)
    assert rig.engine.counters().num_host_hit_tokens == 0
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0


def test_without_host_memory_nothing_changes():
    rig = make_host_rig(num_host_blocks=0)
    prompt = prompt_of(81)
    rig.run(make_request(prompt))
    evict_everything(rig)
    again = make_request(prompt)
    rig.run(again)
    check(rig, again)
    assert rig.engine.counters().num_offloaded_blocks == 0
    assert rig.engine.load().num_host_blocks == 0


def test_other_requests_continue_while_a_prefix_is_restored():
    clock = Clock()
    rig = make_host_rig(clock, speed=SimSpeed(per_copied_token=1e-3))
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    other = make_request(prompt_of(8, salt=9), 60)
    rig.submit(other)
    rig.step()
    again = make_request(prompt)
    rig.submit(again)
    began = clock.now
    while rig.seen.tokens.get(again.request_id) is None:
        rig.step()
    assert clock.now - began >= 80e-3
    assert len(rig.seen.tokens[other.request_id]) > 10
    rig.drain()
    check(rig, other, again)


def test_an_idle_engine_waits_for_the_copy_and_no_longer():
    clock = Clock()
    rig = make_host_rig(clock, speed=SimSpeed(per_copied_token=1e-3))
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    again = make_request(prompt, 1)
    rig.submit(again)
    began = clock.now
    rig.drain()
    assert 80e-3 <= clock.now - began <= 80e-3 + 2 * 4.5e-3
    check(rig, again)


def test_requests_with_one_prefix_wait_for_one_copy():
    clock = Clock()
    rig = make_host_rig(clock)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    requests = [make_request([*prompt, 7, number], 4) for number in range(4)]
    rig.submit(*requests)
    rig.step()
    phases = sorted(state.phase.value for state in rig.engine._states.values())
    assert phases == ["parked", "parked", "parked", "restoring"]
    assert rig.engine.load().queue_depth == 4
    rig.drain()
    check(rig, *requests)
    assert rig.engine.counters().num_restored_blocks == 20


def test_a_prefix_is_restored_to_blocks_that_a_step_in_flight_still_writes():
    clock = Clock()
    rig = make_host_rig(clock, num_blocks=12, depth=2)
    prompt = prompt_of(41)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    low = make_request(prompt_of(40, salt=3), 4, priority=1)
    high = make_request(prompt, 4, priority=0)
    rig.submit(low)
    rig.step()
    rig.submit(high)
    rig.step()
    assert rig.engine._states[low.request_id].phase is Phase.WAITING
    assert rig.engine._states[high.request_id].phase is Phase.RESTORING
    rig.drain()
    check(rig, low, high)
    assert rig.engine.counters().num_host_hit_tokens >= 40


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_ends_during_its_restore_leaves_the_prefix_cached(how: str):
    clock = Clock()
    rig = make_host_rig(clock, speed=SimSpeed(per_copied_token=1e-3))
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    ends = make_request(prompt, deadline=clock.now + 0.01 if how == "deadline" else None)
    waits = make_request([*prompt[:60], 9, 9], 4)
    rig.submit(ends, waits)
    rig.step()
    assert rig.engine._states[ends.request_id].phase is Phase.RESTORING
    assert rig.engine._states[waits.request_id].phase is Phase.PARKED
    if how == "abort":
        rig.engine.abort(ends.request_id)
    rig.drain()
    assert ends.request_id not in rig.engine._states
    assert (ends.request_id in rig.seen.failures) == (how == "deadline")
    check(rig, waits)
    again = make_request(prompt, 1)
    rig.run(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 80


def test_a_reset_drops_host_memory_and_restores_in_progress():
    clock = Clock()
    rig = make_host_rig(clock)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    again = make_request(prompt)
    rig.submit(again)
    rig.step()
    assert rig.engine._states[again.request_id].phase is Phase.RESTORING
    rig.engine.reset_prefix_cache()
    assert rig.engine.cached_hashes(Tier.HOST) == b""
    assert rig.engine.take_events() == []
    rig.engine.audit()
    rig.drain()
    check(rig, again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0


@DEPTHS
def test_replayed_events_give_the_blocks_of_each_tier(depth: int):
    rig = make_host_rig(num_blocks=24, num_host_blocks=30, depth=depth)
    known: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    for number in range(14):
        rig.run(make_request(prompt_of(30, salt=number % 5), 10))
        for event in rig.engine.take_events():
            hashes = hashes_of(event.block_hashes)
            if isinstance(event, StoredEvent):
                known[event.tier] |= hashes
            else:
                known[event.tier] -= hashes
    assert known[Tier.HOST]
    for tier in Tier:
        assert known[tier] == hashes_of(rig.engine.cached_hashes(tier))


def test_a_remote_prefill_begins_after_the_prefix_restored_from_host_memory():
    clock = Clock()
    rig = make_host_rig(clock, min_remote_prefill_tokens=4)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    request = make_request([*prompt[:60], *prompt_of(40, salt=77)], 6, remote_prefill=True)
    rig.submit(request)
    rig.drain()
    assert rig.seen.num_wanted[request.request_id] == 60
    leased = rig.engine.reserve_blocks(request.request_id)
    assert leased is not None
    write_remote_kv(rig.executor, request.token_ids, 15, leased)
    rig.engine.finish_transfer(request.request_id)
    rig.drain()
    check(rig, request)


def test_a_prefill_for_another_worker_takes_its_prefix_from_host_memory():
    clock = Clock()
    rig = make_host_rig(clock)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig, clock)
    request = make_request(prompt, prefill_only=True)
    rig.submit(request)
    rig.drain()
    assert rig.seen.first_tokens[request.request_id] == expected_for(request)[0]
    assert rig.engine.counters().num_host_hit_tokens == 80
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


def test_a_copy_that_cannot_be_started_costs_a_computation(monkeypatch: pytest.MonkeyPatch):
    rig = make_host_rig()
    host = rig.executor.host
    assert host is not None
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    evict_everything(rig)

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(host, "restore", refuse)
    monkeypatch.setattr(host, "offload", refuse)
    again = make_request(prompt)
    rig.run(again)
    check(rig, again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0


def test_blocks_without_staging_memory_are_dropped_and_counted():
    clock = Clock()
    rig = make_host_rig(clock, host_staging_blocks=1)
    requests = [make_request(prompt_of(81, salt=number % 3), 4) for number in range(9)]
    for request in requests:
        rig.run(request)
    check(rig, *requests)
    assert rig.engine.counters().num_dropped_blocks > 0


def test_counters_and_load_reach_the_metrics():
    clock = Clock()
    rig = make_host_rig(clock)
    prompt = prompt_of(81)
    rig.run(make_request(prompt))
    evict_everything(rig, clock)
    rig.run(make_request(prompt))
    layout = rig.executor.kv_spec
    empty = control_pb2.Histogram(counts=[0])
    transfers = control_pb2.TransferCounters(transfer_seconds=empty, exposed_seconds=empty, tail_seconds=empty)
    stats = control_pb2.GetStatsResponse(
        state=worker_pb2.WorkerState(load=load_message(rig.engine.load(), layout, 0.0)),
        counters=control_pb2.WorkerCounters(host_cache=host_cache_message(rig.engine.counters()), transfers=transfers),
    )
    values = {sample.name: sample.value for metric in metrics_of(stats, "m") for sample in metric.samples}
    assert values["baton_worker_host_cache_hit_tokens_total"] == 80
    assert values["baton_worker_host_cache_restored_bytes_total"] == 20 * layout.bytes_per_block
    assert values["baton_worker_host_cache_restore_seconds_total"] == pytest.approx(80 * 2.6e-6)
    assert values["baton_worker_host_cache_offloaded_blocks_total"] >= 20
    assert values["baton_worker_restore_bytes_per_second"] > 0
    assert values["baton_worker_host_blocks"] == 100
    assert values["baton_worker_cached_host_blocks"] == rig.engine.load().num_cached_host_blocks > 0


def test_a_simulated_copy_is_ordered_with_steps_as_a_devices_is():
    executor = make_executor(num_host_blocks=4)
    host = executor.host
    assert host is not None
    size = executor.kv_spec.layer_bytes(0)

    def write(value: int) -> None:
        for layer in range(executor.kv_spec.num_layers):
            executor.write_blocks(layer, [BlockId(0)], memoryview(bytes([value]) * size))

    write(1)
    host.offload([(BlockId(0), HostSlot(0))])
    executor.launch(StepPlan(1))
    executor.collect()
    write(2)
    assert host.poll().slots == [0]
    executor.launch(StepPlan(2))
    host.restore(RestoreCopy(1, ((HostSlot(0), BlockId(0)),), fenced=True))
    assert host.poll().restores == []
    assert executor.read_blocks(0, [BlockId(0)]) == bytes([2]) * size
    executor.collect()
    assert host.poll().restores == [(1, 0.0)]
    assert executor.read_blocks(0, [BlockId(0)]) == bytes([1]) * size


# The CPU executor.


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama", folder)
    return folder


def make_cpu(folder: Path, **values: object) -> CpuExecutor:
    defaults: dict[str, object] = {"threads": 1, "block_size": 8, "num_blocks": 24, "max_num_requests": 4}
    return CpuExecutor(WorkerConfig(model=str(folder), **{**defaults, **values}))  # type: ignore[arg-type]


def run_cpu(executor: CpuExecutor, requests: list[Request]) -> Engine:
    engine = Engine(executor, EngineSettings(4, 64, min_host_hit_tokens=0), 1)
    for request in requests:
        engine.submit(request)
        while engine.has_work():
            outputs = engine.step()
            assert not outputs.failures
        engine.audit()
    return engine


def test_tokens_on_the_cpu_are_the_same_with_and_without_host_memory(model_folder: Path):
    def requests() -> list[Request]:
        prompts = [[token_id % 150 + 3 for token_id in prompt_of(100, salt)] for salt in (0, 1, 2)]
        return [make_request(prompt, 12) for prompt in 3 * prompts]

    with_host, without = requests(), requests()
    engine = run_cpu(make_cpu(model_folder, host_cache_gb=0.01), with_host)
    run_cpu(make_cpu(model_folder), without)
    assert [request.token_ids for request in with_host] == [request.token_ids for request in without]
    counters = engine.counters()
    assert counters.num_host_hit_tokens >= 6 * 88
    assert counters.restore_seconds > 0
    assert engine.load().restore_bytes_per_second > 0
    audit = engine.audit()
    assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0)


def test_blocks_on_the_cpu_are_restored_unchanged(model_folder: Path):
    executor = make_cpu(model_folder, host_cache_gb=0.001)
    host = executor.host
    assert isinstance(host, HostMemory)
    size = executor.kv_spec.layer_bytes(0)
    for layer in range(executor.kv_spec.num_layers):
        executor.write_blocks(
            layer, [BlockId(3), BlockId(5)], memoryview(bytes([layer + 1]) * size + bytes([99]) * size)
        )
    host.offload([(BlockId(5), HostSlot(2)), (BlockId(3), HostSlot(0))])
    host.restore(RestoreCopy(7, ((HostSlot(0), BlockId(8)), (HostSlot(2), BlockId(9))), fenced=False))
    landed = host.poll()
    assert landed.slots == [2, 0]
    assert [restore_id for restore_id, _ in landed.restores] == [7]
    for layer in range(executor.kv_spec.num_layers):
        expected = executor.read_blocks(layer, [BlockId(3), BlockId(5)])
        assert executor.read_blocks(layer, [BlockId(8), BlockId(9)]) == expected
    assert not host.poll().slots


# Settings.


def test_the_size_of_host_memory_is_checked(model_folder: Path):
    with pytest.raises(
        InvalidRequest, match=r"host_cache_gb=1e-06 holds no block: it must be at least 6\.144e-06, or 0"
    ):
        make_cpu(model_folder, host_cache_gb=1e-6)
    with pytest.raises(InvalidRequest, match=r"host_cache_gb=6\d{4}\.\d is more than this machine's"):
        make_cpu(model_folder, host_cache_gb=65000.0)


def test_the_simulators_host_memory_is_an_8b_models():
    settings = sim_settings(WorkerConfig(executor="sim", model="nowhere", host_cache_gb=1.0))
    assert settings.num_host_blocks == 10**9 // (131072 * 16)
    assert isinstance(SimExecutor(settings).host, object)
