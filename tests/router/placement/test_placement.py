"""Decisions over tables of fleets, tenants and limits, and invariants of all decisions."""

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleet.fleet_node import state
from support.fleet.placer_world import World
from support.fleet.router_views import BOTH, DECODE, PREFILL, RATES, demand, snapshot

from baton.router.placement import costs
from baton.router.placement.decision import Asked, candidates, decide
from baton.router.placement.fair_share import exceeds_share, fullness, queue_bound
from baton.router.placement.policy import rank
from baton.router.placement.worker_snapshot import Demand, Traffic
from baton.router.requests.in_flight import PendingLoad, TenantLoad
from baton.rpc.errors import NoCapacity, ServiceError
from baton.v1 import router_pb2, types_pb2

MODEL = types_pb2.ModelInfo(name="m", block_size=16)


def asked(num_prompt_tokens=4000, **fields):
    return Asked(MODEL, demand(num_prompt_tokens), **fields)


def choose(snapshots, tenants=None, max_queue_depth=64, **fields):
    how_full = fullness([one for one in snapshots if one.view.can_decode], max_queue_depth)
    return decide(asked(**fields), snapshots, tenants or {}, max_queue_depth, how_full=how_full)[0]


# Deadlines, priorities, queues.


def test_an_option_that_is_in_time_goes_before_a_cheaper_one_that_is_late():
    soon = snapshot("soon", num_running=30)  # stalls its batch, but begins at once
    late = snapshot("late", num_pending_prefill_tokens=60_000)
    assert choose([soon, late]).decode.view.worker_id == "late"
    assert choose([soon, late], timeout_seconds=3.0).decode.view.worker_id == "soon"
    with pytest.raises(NoCapacity, match=r"0\.40 s, longer than the time limit of 200 ms"):
        choose([soon, late], timeout_seconds=0.2)


@pytest.mark.parametrize(("priority", "bound"), [(-5, 64), (0, 64), (1, 32), (9, 32)])
def test_less_urgent_requests_leave_half_of_each_queue_to_the_others(priority, bound):
    assert queue_bound(64, priority) == bound
    full = snapshot(num_running=64, queue_depth=bound)
    with pytest.raises(NoCapacity, match=f"has {bound} requests waiting"):
        choose([full], priority=priority)
    assert choose([snapshot(num_running=64, queue_depth=bound - 1)], priority=priority)


def test_no_request_is_refused_because_of_what_it_overtakes():
    full = snapshot(num_running=64, queue_depth=80)
    with pytest.raises(NoCapacity, match="64 requests waiting"):
        choose([full])
    assert choose([full._replace(num_behind=70.0)])
    with pytest.raises(NoCapacity, match="64 requests waiting"):
        choose([full._replace(num_behind=10.0)])


def test_a_tenant_that_fills_the_queues_has_no_newcomer_refused():
    """Beyond the queues' bound there is room for those below their share, and a bound of that."""
    tenants = {"flood": TenantLoad(1.0, 64 * 4000, 64)}
    full = snapshot(num_running=64, queue_depth=64)
    with pytest.raises(NoCapacity, match="64 requests waiting"):
        choose([full], tenants, tenant="flood")
    assert choose([full], tenants, tenant="new")
    tenants["new"] = TenantLoad(1.0, 4000, 1)
    assert choose([snapshot(num_running=64, queue_depth=79)], tenants, tenant="new")
    with pytest.raises(NoCapacity, match="80 requests waiting"):
        choose([snapshot(num_running=64, queue_depth=80)], tenants, tenant="new")
    tenants["new"] = TenantLoad(1.0, 65 * 4000, 65)
    with pytest.raises(NoCapacity):
        choose([full], tenants, tenant="new")


def test_without_tenants_the_bound_of_the_queue_is_shared():
    full = snapshot(num_running=64, queue_depth=64)
    with pytest.raises(NoCapacity):
        choose([full], {"": TenantLoad(1.0, 64 * 4000, 64)})


def test_an_urgent_request_does_not_wait_for_those_it_overtakes():
    behind = costs.local(
        snapshot(num_pending_prefill_tokens=10_000), demand(), costs.decode_alone(snapshot(), demand(), 0.02)
    )
    assert behind.queue == pytest.approx(1.0)
    world = World(state("a"), state("b"))
    for number in range(8):
        world.place(4000, [number], request_id=f"r{number}", priority=5)
    placed = world.place(4000, [99], priority=-1)
    chosen = world.explain(placed).candidates[0]
    queue = [cost.seconds for cost in chosen.costs if cost.kind == router_pb2.COST_KIND_QUEUE]
    assert sum(queue) == 0
    later = [cost.seconds for cost in chosen.costs if cost.kind == router_pb2.COST_KIND_LATER]
    assert sum(later) > 0, "those it overtakes wait for it"


# Sessions, adapters, tiers.


def test_a_session_stays_where_it_was_when_nothing_speaks_against_it():
    world = World(*(state(f"w{number}") for number in range(5)))
    first = world.place(session_id="s").decode.worker_id
    for number in range(5):
        world.now += 5
        for name in range(5):
            world.update(state(f"w{name}"))
        assert world.place(request_id=f"r{number}", session_id="s").decode.worker_id == first
    others = {world.place(request_id=f"o{number}").decode.worker_id for number in range(10)}
    assert len(others) == 5


def test_without_an_index_a_session_s_last_prompt_is_taken_to_be_where_it_was():
    world = World(*(state(f"w{number}") for number in range(3)))
    first = world.place(1600, range(100), session_id="s")
    world.placer.report(router_pb2.PlacementOutcome(placement_id=first.placement_id))
    again = world.place(3200, range(200), session_id="s")
    assert again.decode.worker_id == first.decode.worker_id
    assert again.decode_cached_tokens == 1600
    world.update(state(first.decode.worker_id, epoch=2))
    assert world.place(3200, range(200), session_id="s").decode_cached_tokens == 0, "it started anew since"


def test_a_session_leaves_a_busy_worker():
    world = World(state("a"), state("b"))
    first = world.place(session_id="s").decode.worker_id
    world.update(state(first, num_running=60, num_pending_prefill_tokens=50_000))
    assert world.place(session_id="s").decode.worker_id != first


def test_an_adapter_goes_where_it_is_loaded_unless_that_is_busy():
    loaded = state("b")
    loaded.adapters.append("lora")
    world = World(state("a"), loaded, state("c"))
    assert {world.place(100, request_id=f"r{n}", adapter="lora").decode.worker_id for n in range(3)} == {"b"}
    busy = state("b", num_running=60, num_pending_prefill_tokens=50_000)
    busy.adapters.append("lora")
    world.update(busy)
    first = world.place(adapter="lora").decode.worker_id
    assert first != "b"
    assert world.place(100, adapter="lora").decode.worker_id == first, "it is being loaded there"


def test_blocks_in_host_memory_cost_their_way_back():
    cost = costs.local(snapshot(cached=3200, host=1600), demand(), costs.decode_alone(snapshot(), demand(), 0.02))
    assert cost.restore == pytest.approx(1600 * 131_072 / RATES.restore_bytes_per_second)
    assert cost.prefill == pytest.approx(0.08)
    on_device, in_host = snapshot("device", cached=3200), snapshot("host", cached=3200, host=3200)
    assert rank([in_host, on_device], (), demand())[0].decode.view.worker_id == "device"
    nothing = snapshot("nothing")
    assert rank([nothing, in_host], (), demand())[0].decode.view.worker_id == "host"


# Tenants.


def tenants(**tokens):
    return {name: TenantLoad(1.0, count, 1) for name, count in tokens.items()}


@pytest.mark.parametrize(
    ("why", "held", "weight", "how_full", "refused"),
    [
        ("queues are empty", {"t": 10_000, "u": 10}, 1.0, 0.0, False),
        ("it is alone", {"t": 10_000}, 1.0, 1.0, False),
        ("it is new", {"u": 10_000}, 1.0, 1.0, False),
        ("it has less than its half", {"t": 1000, "u": 10_000}, 1.0, 0.8, False),
        ("it has more than its half", {"t": 10_000, "u": 1000}, 1.0, 0.8, True),
        ("there is room yet", {"t": 10_000, "u": 1000}, 1.0, 0.4, False),
        ("its weight is four", {"t": 30_000, "u": 10_000}, 4.0, 0.8, False),
        ("three parts are too much for a weight of two", {"t": 30_000, "u": 10_000}, 2.0, 0.8, True),
    ],
)
def test_in_full_queues_a_tenant_has_its_share_and_no_more(why, held, weight, how_full, refused):
    assert exceeds_share(tenants(**held), "t", weight, 100, how_full) == refused, why


def test_a_greedy_tenant_gets_a_retry_delay_and_the_other_is_served():
    crowded = [snapshot(f"w{number}", num_running=64, queue_depth=56) for number in range(2)]
    with pytest.raises(NoCapacity, match="tenant 'greedy' has 90000 tokens") as error:
        choose(crowded, tenants(greedy=90_000, modest=9000), tenant="greedy")
    assert error.value.retry_after_ms >= 100
    assert choose(crowded, tenants(greedy=90_000, modest=9000), tenant="modest")


def test_queues_that_empty_at_once_are_not_open_to_whoever_asks_first():
    """When many requests end together, each tenant still has only its share for a second or two."""
    full, empty = ({"num_running": 64, "queue_depth": depth, "max_num_requests": 64} for depth in (64, 10))
    world = World(state("w", **empty))
    for tenant in (*["greedy"] * 4, "modest"):
        world.place(tenant=tenant)
    world.update(state("w", **full))
    with pytest.raises(NoCapacity):
        world.place(tenant="greedy")
    world.update(state("w", **empty))
    with pytest.raises(NoCapacity, match=r"share of a fleet whose queues are 100% full"):
        world.place(tenant="greedy")
    world.place(tenant="modest")
    world.now += 2.0
    world.update(state("w", **empty))
    assert world.place(tenant="greedy")


@settings(max_examples=25, deadline=None)
@given(
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    seed=st.integers(0, 1000),
)
def test_served_tokens_converge_to_the_weights_when_both_ask_for_too_much(weights, sizes, seed):
    """A queue served in order, 50 s of it: each tenant is refused often, and gets its part of the tokens."""
    draw = random.Random(seed)
    queue, held, served = collections.deque(), {}, [0, 0]
    capacity = 200  # requests in the queue
    for step in range(6000):
        for tenant in draw.sample((0, 1), 2):
            tokens = sizes[tenant] * 100
            own = held.setdefault(tenant, TenantLoad(float(weights[tenant])))
            present = {name: load for name, load in held.items() if load.num_placements}
            fullness = len(queue) / capacity
            if fullness < 1 and not exceeds_share(present, tenant, float(weights[tenant]), tokens, fullness):
                queue.append((tenant, tokens))
                own.num_tokens += tokens
                own.num_placements += 1
        if queue and step % 2:
            tenant, tokens = queue.popleft()
            held[tenant].num_tokens -= tokens
            held[tenant].num_placements -= 1
            if step > 2000:
                served[tenant] += tokens
    share = served[0] / sum(served)
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.12)


@pytest.mark.parametrize("role", [PREFILL, BOTH])
def test_where_workers_for_prompts_alone_stand_by_a_second_is_a_second(role):
    world = World(state("d", DECODE, num_running=10), state("p", role, num_running=10))
    placed = world.place(1600)
    assert placed.HasField("prefill") == (role == PREFILL)
    explained = world.placer.decisions.explain(router_pb2.ExplainRequest(placement_id=placed.placement_id))
    local = next(
        one for one in explained.response.candidates if (one.decode_worker_id, one.prefill_worker_id) == ("d", "")
    )
    stalled = next(cost.seconds for cost in local.costs if cost.kind == router_pb2.COST_KIND_DECODE)
    assert (stalled >= 10 * 0.16) == (role == PREFILL)


def test_an_unknown_link_is_tried():
    unknown = {"transfer_bytes_per_second": 0}
    world = World(state("d", DECODE, num_running=4, **unknown), state("p", PREFILL, **unknown))
    assert world.place(16_000).HasField("prefill")


# What holds of every decision.

loads = st.fixed_dictionaries(
    {
        "num_running": st.integers(0, 80),
        "queue_depth": st.integers(0, 10),
        "num_pending_prefill_tokens": st.integers(0, 200_000),
        "num_free_blocks": st.integers(0, 10_000),
        "num_context_tokens": st.integers(0, 500_000),
        "prefill_tokens_per_second": st.sampled_from([0.0, 1000.0, 10_000.0, 50_000.0]),
        "decode_step_seconds": st.sampled_from([0.0, 0.005, 0.05]),
        "transfer_bytes_per_second": st.sampled_from([0.0, 1e8, 1e10]),
    }
)
roles = st.sampled_from([PREFILL, DECODE, BOTH])
snapshots = st.lists(
    st.builds(
        lambda number, role, cached, host, load, n: snapshot(
            f"w{number}", role, cached, PendingLoad(n, n * 100, n, n), host=min(host, cached), **load
        ),
        st.integers(0, 10**6), roles, st.integers(0, 4000), st.integers(0, 4000), loads, st.integers(0, 50),
    ),
    min_size=1, max_size=12, unique_by=lambda one: one.view.worker_id,
)  # fmt: skip
traffics = st.builds(Traffic, st.floats(0, 100), st.floats(0.25, 4), st.floats(0.25, 4))
demands = st.builds(
    Demand, st.integers(1, 50_000), st.floats(1, 2000), st.just(""), st.floats(0.05, 1), st.sampled_from([0.0, 0.05])
)


@given(snapshots, demands, traffics, st.integers(0, 100))
@settings(deadline=None)
def test_the_quick_pass_agrees_with_the_costs_in_full(fleet, wanted, traffic, rotation):
    floor = min(one.rates.step.seconds(1) for one in fleet)
    screened = costs.screen(fleet, wanted, floor, traffic)
    for one, total, queued_there, alone_there, stall in zip(fleet, *screened, strict=True):
        alone = costs.decode_alone(one, wanted, floor)
        assert total == pytest.approx(sum(costs.local(one, wanted, alone, traffic)))
        there = sum(alone) + costs.least_transfer(one, wanted)
        assert alone_there == pytest.approx(there - alone.queue, abs=1e-12 * there)  # what a long queue leaves of it
        assert queued_there == pytest.approx(there)
        (queued,), (work,), (seconds,) = costs.remote_bounds([one], wanted, traffic)
        if one.view.mixes_phases:
            known = costs.remote_bounds([one], wanted, traffic, [stall])
            assert (known.queued, known.work) == (pytest.approx([queued]), pytest.approx([work]))
        for other in fleet:
            if other is not one:
                base = costs.decode_alone(other, wanted, floor)
                pair = costs.remote(other, one, wanted, base, traffic)
                there = sum(base) + costs.least_transfer(other, wanted)
                moving = costs.moving_seconds(other, wanted)
                shown = costs.not_hidden(other, moving, one.backlog_seconds, seconds)
                assert sum(pair) * (1 + 1e-9) >= queued + there - base.queue + shown - 1e-9
                assert sum(pair) * (1 + 1e-9) >= work + there - 1e-9


@given(snapshots, demands, traffics, st.integers(0, 100))
@settings(deadline=None)
def test_the_choice_is_the_best_of_all_candidates(fleet, wanted, traffic, rotation):
    decodes = [one for one in fleet if one.view.can_decode]
    prefills = [one for one in fleet if one.view.can_prefill_for_others]
    if not decodes:
        return
    quick = rank(decodes, prefills, wanted, rotation, traffic)
    whole = candidates(Asked(MODEL, wanted), fleet, rotation, traffic)
    alone = rank(decodes, decodes if prefills == decodes else prefills, wanted, rotation, traffic, spare=False)
    assert quick[0].total == pytest.approx(whole[0].total)
    assert alone[0].total == pytest.approx(whole[0].total)
    assert [option.total for option in quick] == sorted(option.total for option in quick)
    assert all(one.prefill is None or one.prefill.view.worker_id != one.decode.view.worker_id for one in whole)


@given(demands, loads, st.integers(0, 4000), st.integers(1, 60), traffics)
@settings(deadline=None)
def test_more_load_never_costs_less(wanted, load, cached, more, traffic):
    floor = 0.001

    def total(cached=cached, **changed):
        one = snapshot("w", BOTH, cached, **{**load, **changed})
        return sum(costs.local(one, wanted, costs.decode_alone(one, wanted, floor), traffic))

    before = total() - 1e-9
    assert total(num_running=load["num_running"] + more) >= before
    assert total(queue_depth=load["queue_depth"] + more) >= before
    assert total(num_pending_prefill_tokens=load["num_pending_prefill_tokens"] + 1000 * more) >= before
    assert total(num_free_blocks=max(0, load["num_free_blocks"] - 100 * more)) >= before
    assert total(num_context_tokens=load["num_context_tokens"] + 1000 * more) >= before
    assert total(cached=max(0, cached - 16 * more)) >= before


fates = st.sampled_from(["live", "cordoned", "draining", "dead", "excluded"])


@given(st.lists(st.tuples(fates, roles), min_size=1, max_size=8), st.lists(st.integers(0, 20), max_size=12))
@settings(deadline=None)
def test_a_cordoned_draining_dead_or_excluded_worker_is_never_picked(fleet, prompt):
    world = World()
    for number, (fate, role) in enumerate(fleet):
        world.update(state(f"w{number}", role, draining=fate == "draining"))
        if fate == "cordoned":
            world.fleet.cordon(f"w{number}", True)
        if fate == "dead":
            world.fleet.lose(f"w{number}", "killed")
    fates_of = {f"w{number}": fate for number, (fate, _) in enumerate(fleet)}
    excluded = [name for name, fate in fates_of.items() if fate == "excluded"]
    for number in range(6):
        try:
            placed = world.place(1600, prompt, request_id=f"r{number}", excluded_worker_ids=excluded)
        except ServiceError:
            assert not any(f == "live" and role != PREFILL for f, role in fleet)
            return
        assert fates_of[placed.decode.worker_id] == "live"
        if placed.HasField("prefill"):
            assert fates_of[placed.prefill.worker_id] == "live"


@given(st.integers(2, 8), st.integers(1, 100), st.booleans(), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_burst_with_one_prefix_does_not_herd(num_workers, num_shared, is_cached, seed):
    world = World(*(state(f"w{number}") for number in range(num_workers)))
    if is_cached:
        world.cache("w0", *range(num_shared))
    counts = collections.Counter()
    for number in range(num_workers * 16):
        prompt = [*range(num_shared), *(10_000 + number * 200 + n for n in range(120 - num_shared))]
        counts[world.place(1920, prompt, request_id=f"r{number}").decode.worker_id] += 1
    assert len(counts) == num_workers
    assert max(counts.values()) <= 3 * 16


def test_explains_every_candidate_and_each_workers_evidence():
    world = World(state("d", DECODE, num_running=20), state("p", PREFILL), state("gone", DECODE, draining=True))
    world.cache("d", *range(20))
    placed = world.place(8000, range(30), request_id="q")
    explained = world.placer.decisions.explain(router_pb2.ExplainRequest(request_id="q"))
    pairs = {(one.decode_worker_id, one.prefill_worker_id) for one in explained.response.candidates}
    assert pairs == {("d", ""), ("d", "p")}
    evidence = {one.worker_id: one for one in explained.evidence}
    assert evidence["d"].num_cached_tokens == 320
    assert evidence["d"].num_requests == 20
    assert evidence["p"].prefill_tokens_per_second == 10_000
    assert evidence["gone"].refusal == "drains"
    assert explained.expected_output_tokens == 100
    assert explained.response.decode == placed.decode
