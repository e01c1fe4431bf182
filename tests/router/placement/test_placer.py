"""Placement as a whole, without any network."""

import collections

import pytest
from support.fleet.fleet_node import BLOCK_SIZE, state
from support.fleet.placer_world import World
from support.fleet.router_views import BOTH, DECODE, PREFILL

from baton.rpc.errors import InvalidRequest, NoCapacity, NotFound, Unavailable
from baton.v1 import kv_pb2, router_pb2


def test_a_cached_prefix_is_found_and_predicted():
    world = World(state("a"), state("b"), state("c"))
    world.cache("b", *range(80))
    placed = world.place(prompt=range(100))
    assert placed.decode.worker_id == "b"
    assert placed.decode.address == "b"
    assert placed.decode_cached_tokens == 80 * BLOCK_SIZE
    assert not placed.HasField("prefill")


def test_a_whole_prompt_in_cache_leaves_its_last_block_to_compute():
    world = World(state("a"))
    world.cache("a", *range(100))
    assert world.place(prompt=range(100)).decode_cached_tokens == 99 * BLOCK_SIZE


def test_a_prefix_without_its_last_windows_is_not_predicted():
    """Workers with window groups hold 100 blocks; only "a" has the windows before block 70."""
    window = 3 * BLOCK_SIZE
    groups = [
        kv_pb2.KvGroup(kind=kv_pb2.KV_GROUP_KIND_FULL, layers=[1], num_kv_heads=8, head_dim=128),
        kv_pb2.KvGroup(kind=kv_pb2.KV_GROUP_KIND_WINDOW, layers=[0], num_kv_heads=8, head_dim=128, window=window),
    ]
    states = [state("a"), state("b")]
    for one in states:
        one.layout.CopyFrom(kv_pb2.KvLayout(model_digest=one.layout.model_digest, block_size=BLOCK_SIZE, groups=groups))
    world = World(*states)
    world.cache("a", *range(67, 70), last=False)
    world.cache("a", *range(67), *range(70, 100), groups=(0,), first=False)
    world.cache("b", *range(100), groups=(0,))
    placed = world.place(prompt=range(100))
    assert (placed.decode.worker_id, placed.decode_cached_tokens) == ("a", 70 * BLOCK_SIZE)


def test_entries_of_another_epoch_do_not_count():
    world = World(state("a"), state("b"))
    world.cache("a", *range(100))
    world.update(state("a", epoch=2))
    assert world.place(prompt=range(100)).decode_cached_tokens == 0
    assert world.index.num_blocks("a") == 0
    world.cache("a", *range(50), epoch=3)
    assert world.place(prompt=range(100)).decode_cached_tokens == 0, "the index may be ahead of the state"


def test_the_answer_carries_its_evidence_and_can_be_asked_for():
    world = World(state("a", num_running=5), state("b"))
    placed = world.place(request_id="q")
    assert not placed.candidates, "they are told to those who ask"
    for asked in ({"placement_id": placed.placement_id}, {"request_id": "q"}):
        explained = world.placer.decisions.explain(router_pb2.ExplainRequest(**asked))
        assert explained.response.decode == placed.decode
        told = explained.response.candidates
        assert len(told) == 4, "each alone, and each with the other"
        assert told[0].decode_worker_id == placed.decode.worker_id
        assert [one.total_seconds for one in told] == sorted(one.total_seconds for one in told)
        for one in told:
            assert one.total_seconds == pytest.approx(sum(cost.seconds for cost in one.costs))
        assert {one.worker_id for one in explained.evidence} == {"a", "b"}
        assert explained.request.request_id == "q"
        assert not explained.HasField("outcome")
    world.placer.report(router_pb2.PlacementOutcome(placement_id=placed.placement_id, num_output_tokens=7))
    explained = world.placer.decisions.explain(router_pb2.ExplainRequest(placement_id=placed.placement_id))
    assert explained.outcome.num_output_tokens == 7


def test_explanations_are_bounded():
    world = World(state("a"), explain_capacity=3)
    first = world.place(request_id="r0")
    for number in range(1, 5):
        world.place(request_id=f"r{number}")
    with pytest.raises(NotFound, match=str(first.placement_id)):
        world.placer.decisions.explain(router_pb2.ExplainRequest(placement_id=first.placement_id))
    with pytest.raises(NotFound, match="r0"):
        world.placer.decisions.explain(router_pb2.ExplainRequest(request_id="r0"))
    assert len(world.placer.decisions) == 3


def test_a_burst_with_one_prefix_spreads_and_still_shares():
    world = World(*(state(f"w{number}") for number in range(4)))
    world.cache("w0", *range(100))
    placed = [world.place(1700, range(106), request_id=f"r{number}") for number in range(64)]
    counts = collections.Counter(one.decode.worker_id for one in placed)
    assert len(counts) == 4, counts
    assert max(counts.values()) <= 32, counts
    assert sum(one.decode_cached_tokens > 0 for one in placed) >= 58, "all but the first on each worker share"


def test_a_cold_burst_with_one_prefix_computes_it_once_a_worker_at_most():
    world = World(*(state(f"w{number}") for number in range(4)))
    placed = [world.place(1700, range(106), request_id=f"r{number}") for number in range(64)]
    counts = collections.Counter(one.decode.worker_id for one in placed)
    assert max(counts.values()) <= 32, counts
    assert sum(one.decode_cached_tokens == 0 for one in placed) <= 4


def test_a_burst_of_different_prompts_is_even():
    world = World(*(state(f"w{number}") for number in range(4)))
    placed = [world.place(1700, range(n * 1000, n * 1000 + 106)) for n in range(64)]
    counts = collections.Counter(one.decode.worker_id for one in placed)
    assert set(counts.values()) == {16}


def test_placements_stop_counting_when_the_state_shows_them():
    world = World(state("a"))
    world.place()
    assert world.placer.in_flight.load("a").num_placements == 1
    world.now += 1
    world.update(state("a", num_running=1))
    assert world.placer.in_flight.load("a").num_placements == 0


def test_reports_end_placements_and_teach_the_output_length():
    world = World(state("a"))
    for _ in range(300):
        world.now += 0.01
        placed = world.place(max_tokens=0)
        outcome = router_pb2.PlacementOutcome(
            placement_id=placed.placement_id, num_output_tokens=1000, num_cached_tokens=16
        )
        assert world.placer.report(outcome).actual_tokens == 16
        assert world.placer.report(outcome) is None
    assert len(world.placer.in_flight) == 0
    assert world.placer.expected_output_tokens("m", 0) > 900
    assert world.placer.expected_output_tokens("m", 50) == 50
    assert world.placer.report(router_pb2.PlacementOutcome(placement_id=1)) is None


def test_a_report_on_an_unknown_placement_is_forwarded_to_other_routers():
    """A restarted router gets the report before its peers' state, and they still count the placement."""

    class Peers:
        def __init__(self):
            self.ended = []

        def on_placed(self, placed):
            pass

        def on_ended(self, placement_id):
            self.ended.append(placement_id)

    peers = Peers()
    world = World(state("a"), listener=peers)
    assert world.placer.report(router_pb2.PlacementOutcome(placement_id=1)) is None
    assert peers.ended == [1]


def test_a_busy_decode_worker_gets_a_prefill_worker():
    world = World(state("d", DECODE, num_running=20), state("p", PREFILL))
    placed = world.place(num_prompt_tokens=8000)
    assert (placed.decode.worker_id, placed.prefill.worker_id) == ("d", "p")
    assert world.placer.in_flight.load("p").num_prefill_tokens == 8000
    assert world.placer.in_flight.load("d").num_prefill_tokens == 0


@pytest.mark.parametrize("role", [PREFILL, BOTH])
def test_a_mismatched_pair_is_never_made(role):
    world = World(state("d", DECODE, num_running=60), state("p", role, digest=b"x" * 16))
    for _ in range(20):
        placed = world.place(num_prompt_tokens=8000)
        assert not placed.HasField("prefill")
        assert placed.decode.worker_id == "d"


def test_a_prefill_worker_with_other_blocks_and_dtype_is_paired():
    told = state("p", PREFILL)
    told.model.block_size = told.layout.block_size = 4 * told.layout.block_size
    told.layout.dtype = kv_pb2.KV_DTYPE_FLOAT32
    placed = World(state("d", DECODE, num_running=60), told).place(num_prompt_tokens=8000)
    assert (placed.decode.worker_id, placed.prefill.worker_id) == ("d", "p")


def test_draining_cordoned_and_excluded_workers_are_left_out():
    world = World(state("a", draining=True), state("b"), state("c"), state("d"))
    world.fleet.cordon("b", True)
    for _ in range(5):
        assert world.place(excluded_worker_ids=["c"]).decode.worker_id == "d"
    with pytest.raises(
        Unavailable, match="a drains; b is cordoned; c has just failed this request; d has just"
    ) as error:
        world.place(request_id="new", excluded_worker_ids=["c", "d"])
    assert error.value.retry_after_ms


def test_an_excluded_worker_is_used_again_after_a_restart():
    world = World(state("a"))
    world.place(request_id="q")
    with pytest.raises(Unavailable):
        world.place(request_id="q", excluded_worker_ids=["a"])
    world.now += 1
    world.fleet.lose("a", "killed")
    world.now += 1
    world.update(state("a", epoch=2))
    assert world.place(request_id="q", excluded_worker_ids=["a"]).decode.epoch == 2


def test_unknown_models_and_dead_workers_are_different_errors():
    with pytest.raises(Unavailable, match="no live worker decodes for model 'm'"):
        World().place()
    world = World(state("a"))
    with pytest.raises(NotFound, match="no model 'x'; served are: m"):
        world.place(model="x")
    world.update(state("b", name="x"))
    world.fleet.lose("a", "killed")
    with pytest.raises(Unavailable, match="no live worker decodes for model 'm'"):
        world.place()
    assert world.place(model="x").decode.worker_id == "b"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 200_000}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 31, "prompt": [1, 2]}, "block_hashes"),
    ],
)
def test_bad_values_are_named(fields, field):
    with pytest.raises(InvalidRequest) as error:
        World(state("a")).place(**fields)
    assert error.value.field == field


def test_a_prompt_that_no_pool_can_hold_is_refused():
    with pytest.raises(InvalidRequest, match="holds 160"):
        World(state("a", num_blocks=10)).place(num_prompt_tokens=160)


@pytest.mark.parametrize("num_blocks", [0, 10])
def test_texts_of_a_model_that_pools_may_be_longer_together_than_a_prompt_and_the_pool(num_blocks):
    pools = state("a", num_blocks=num_blocks, num_free_blocks=0)
    pools.model.max_model_len = 256
    pools.model.pooler.width = 8
    assert World(pools).place(num_prompt_tokens=20_000).decode.worker_id == "a"


def test_full_queues_are_refused_quickly_with_a_retry_delay():
    world = World(state("a", num_running=64, queue_depth=60), state("b", num_running=64, queue_depth=63))
    for _ in range(5):
        world.place()
    with pytest.raises(NoCapacity, match="64 requests waiting") as error:
        world.place()
    assert 100 <= error.value.retry_after_ms <= 10_000


def test_a_request_that_would_come_too_late_is_refused_when_that_is_measured():
    busy = state("a", num_running=1, num_pending_prefill_tokens=100_000)
    with pytest.raises(NoCapacity, match="longer than the time limit of 2000 ms") as error:
        World(busy).place(timeout_ms=2000)
    assert 8000 < error.value.retry_after_ms < 8500
    assert World(busy).place(timeout_ms=20_000).decode.worker_id == "a"
    unmeasured = state("a", num_pending_prefill_tokens=100_000, prefill_tokens_per_second=0, decode_step_seconds=0)
    assert World(unmeasured).place(timeout_ms=2000).decode.worker_id == "a"


def test_workers_that_know_no_rates_are_taken_to_be_like_the_others():
    known = state("a", num_running=1, prefill_tokens_per_second=100.0)
    new = state("b", prefill_tokens_per_second=0, decode_step_seconds=0, transfer_bytes_per_second=0)
    world = World(known, new)
    placed = world.place()
    assert placed.decode.worker_id == "b"
    prefill = next(
        cost for cost in world.explain(placed).candidates[0].costs if cost.kind == router_pb2.COST_KIND_PREFILL
    )
    assert prefill.seconds == pytest.approx(16.0)


def test_a_state_from_before_a_partition_keeps_the_new_epochs_index():
    world = World(state("a", epoch=1), state("b"))
    world.fleet.lose("a", "it is not heard")
    world.cache("a", 1, 2, epoch=2)
    world.update(state("a", epoch=1))
    world.update(state("a", epoch=2))
    assert world.place(4000, [1, 2]).decode_cached_tokens > 0


def test_a_worker_that_failed_a_gateway_is_avoided_until_its_next_state():
    world = World(state("a"), state("b"))
    placed = world.place()
    failed, other = placed.decode.worker_id, ({"a", "b"} - {placed.decode.worker_id}).pop()
    world.placer.report(router_pb2.PlacementOutcome(placement_id=placed.placement_id, worker_failed=True))
    assert {world.place(request_id=f"r{number}").decode.worker_id for number in range(8)} == {other}
    world.update(state(failed))
    assert failed in {world.place(request_id=f"s{number}").decode.worker_id for number in range(8)}


def test_where_every_worker_failed_a_gateway_they_are_taken_all_the_same():
    world = World(state("a"))
    placed = world.place()
    world.placer.report(router_pb2.PlacementOutcome(placement_id=placed.placement_id, worker_failed=True))
    assert world.place(request_id="s").decode.worker_id == "a"


def test_a_failure_of_an_earlier_epoch_is_ignored():
    world = World(state("a"), state("b"))
    placed = world.place()
    world.update(state(placed.decode.worker_id, epoch=2))
    world.placer.report(router_pb2.PlacementOutcome(placement_id=placed.placement_id, worker_failed=True))
    chosen = {world.place(request_id=f"r{number}").decode.worker_id for number in range(8)}
    assert placed.decode.worker_id in chosen


def test_unreported_placements_are_dropped_without_new_ones():
    world = World(state("a"))
    world.place()
    assert len(world.placer.in_flight) == 1
    world.now += 121
    world.update(state("a"))
    assert len(world.placer.in_flight) == 0


def test_every_choice_of_a_request_takes_a_place():
    world = World(state("a", max_num_requests=16), state("b", max_num_requests=16, num_running=1))
    placed = [world.place(request_id=f"r{number}", num_choices=8) for number in range(3)]
    counts = collections.Counter(one.decode.worker_id for one in placed)
    assert max(counts.values()) <= 2, counts
    for worker_id, count in counts.items():
        assert world.placer.in_flight.load(worker_id).num_requests == 8 * count
