"""The console's view of routers' reports: rates, percentiles, flows, placements, and several routers merged."""

from __future__ import annotations

import pytest

from baton.gateway.console.explanation import explanation_of
from baton.gateway.console.fleet_view import MAX_PLACEMENTS, FleetView
from baton.gateway.console.percentiles import percentiles_of
from baton.gateway.console.routes import explain_request
from baton.gateway.console.samples import Sample, Samples, WorkerTotals
from baton.gateway.routers.client import RouterReply
from baton.rpc.errors import InvalidRequest
from baton.v1 import control_pb2, router_pb2, types_pb2, worker_pb2

BOUNDS = (0.01, 0.1, 1.0)


def worker(name="d", alive=True, role=types_pb2.WORKER_ROLE_DECODE, flows=(), **totals):
    state = worker_pb2.WorkerState(
        worker_id=name,
        epoch=2**63,
        role=role,
        load=worker_pb2.WorkerLoad(num_blocks=100, num_free_blocks=75, num_running=3, queue_depth=1),
        totals=worker_pb2.WorkerTotals(**totals),
        flows=[worker_pb2.KvFlow(sender_worker_id=s, num_bytes=b, num_transfers=t) for s, b, t in flows],
    )
    problem = "" if alive else "it ended the stream"
    return router_pb2.WorkerEntry(address=f"{name}:1", state=state, alive=alive, problem=problem)


def fleet(*workers, router_id=1, ttft=(), itl=(), placed=(), reported=(), **totals):
    told = router_pb2.PlacementTotals(
        ttft_seconds=control_pb2.Histogram(bounds=BOUNDS, counts=ttft or [0] * 4),
        itl_seconds=control_pb2.Histogram(bounds=BOUNDS, counts=itl or [0] * 4),
        **totals,
    )
    return router_pb2.GetFleetResponse(
        router_id=router_id, workers=workers, totals=told, placed=placed, reported=reported
    )


def words(*fleets):
    return [RouterReply(f"router-{at}:1", told) for at, told in enumerate(fleets)]


def summary(number, age_ms=0, outcome=None, **fields):
    return router_pb2.PlacementSummary(
        placement_id=2**60 + number, request_id=f"r{number}", age_ms=age_ms, outcome=outcome, **fields
    )


def shown(*rounds):
    """The last snapshot of rounds a second apart."""
    view = FleetView()
    for second, told in enumerate(rounds):
        snapshot = view.take(told, 100.0 + second, 1e9)
    return snapshot


def test_the_first_snapshot_is_marked_as_without_rates():
    snapshot = shown(words(fleet(worker(num_output_tokens=10**9))))
    assert snapshot.window == 0
    assert snapshot.workers[0].output_tokens_per_second is None
    assert snapshot.fleet.output_tokens_per_second is None
    assert snapshot.fleet.kv_usage == 0.25
    assert snapshot.fleet.ttft is None


def test_rates_are_the_growth_of_totals_in_the_last_seconds():
    snapshot = shown(
        *(words(fleet(worker(num_output_tokens=100 * s, num_prompt_tokens=200 * s, num_cached_tokens=50 * s)))
          for s in range(20))
    )  # fmt: skip
    (one,) = snapshot.workers
    assert one.output_tokens_per_second == pytest.approx(100)
    assert one.prompt_tokens_per_second == pytest.approx(200)
    assert one.hit_rate == pytest.approx(0.25)
    assert snapshot.window == pytest.approx(5)


@pytest.mark.parametrize(("reported", "expected"), [(0.0, None), (1.0, 1.0), (2.75, 2.75)])
def test_tokens_of_a_step_are_shown_as_the_worker_reports_them(reported, expected):
    entry = worker()
    entry.state.load.decode_tokens_per_step = reported
    assert shown(words(fleet(entry))).workers[0].tokens_per_step == expected


def test_adapters_are_those_on_the_device_of_its_slots():
    entry = worker()
    assert shown(words(fleet(entry))).workers[0].num_adapters is None, "without LoRA"
    entry.state.load.num_adapter_slots, entry.state.load.num_resident_adapters = 64, 39
    entry.state.adapters.extend(f"a{number}" for number in range(40))
    entry.state.model.adapters.add(name="b")
    (one,) = shown(words(fleet(entry))).workers
    assert (one.num_adapters, one.num_adapter_slots, one.num_served_adapters) == (39, 64, 1)
    assert one.adapters == [f"a{number}" for number in range(32)]


def test_no_more_is_kept_than_is_compared():
    samples = Samples()
    for second in range(300):
        samples.add(Sample(float(second), {"w": WorkerTotals(second, 0, 0, {})}, {}))
    assert (len(samples._workers), len(samples._routers)) == (6, 61)
    assert samples.worker_changes()["w"].prompt_tokens == 5
    samples.add(Sample(1000.0, {"w": WorkerTotals(9999, 0, 0, {})}, {}))  # nobody watched meanwhile
    assert samples.worker_changes() == {}
    assert samples.router_change(60.0) is None


def test_a_restarted_worker_causes_no_rate_spike():
    before, after = (words(fleet(worker(num_output_tokens=tokens))) for tokens in (10**6, 30))
    assert shown(before, after).workers[0].output_tokens_per_second == pytest.approx(30)


def test_a_worker_that_shows_up_late_is_measured_from_then_on():
    late = worker("late", num_output_tokens=10**9)
    snapshot = shown(words(fleet(worker())), words(fleet(worker(), late)))
    assert [one.output_tokens_per_second for one in snapshot.workers] == [0, None]


def test_flows_are_bytes_a_second_between_two_workers_and_the_largest_come_first():
    snapshot = shown(
        words(fleet(worker("d1", flows=[("p1", 100, 1), ("p2", 0, 0)]), worker("d2"))),
        words(fleet(worker("d1", flows=[("p1", 100, 1), ("p2", 500, 2)]), worker("d2", flows=[("p1", 900, 1)]))),
    )
    told = [(flow.sender, flow.receiver, flow.bytes_per_second, flow.transfers_per_second) for flow in snapshot.flows]
    assert told == [("p1", "d2", 900, 1), ("p2", "d1", 500, 2)]
    assert snapshot.fleet.transfer_bytes_per_second == 1400
    assert snapshot.workers[0].received_bytes_per_second == 500


def test_percentiles_cover_recent_requests_of_all_routers():
    first = words(fleet(ttft=[50, 0, 0, 0]), fleet(router_id=2))
    last = words(fleet(ttft=[50, 10, 0, 0]), fleet(router_id=2, ttft=[0, 0, 10, 0]))
    ttft = shown(first, last).fleet.ttft
    assert ttft is not None
    assert ttft.p50 == pytest.approx(0.1)
    assert 0.9 < ttft.p99 <= 1.0


def test_percentiles_of_no_samples_are_empty_and_overflows_are_the_last_bound():
    assert percentiles_of(BOUNDS, [0, 0, 0, 0]) is None
    above = percentiles_of(BOUNDS, [0, 0, 0, 5])
    assert above is not None
    assert above.p50 == above.p99 == 1.0


def test_the_hit_rate_is_that_of_requests_that_ended_lately():
    snapshot = shown(
        words(fleet(num_prompt_tokens=1000, num_cached_tokens=0)),
        words(fleet(num_prompt_tokens=2000, num_cached_tokens=750)),
    )
    assert snapshot.fleet.hit_rate == pytest.approx(0.75)


def test_a_worker_is_alive_if_any_router_is_connected_to_it():
    snapshot = shown(words(fleet(worker(alive=False)), fleet(worker(), router_id=2)))
    assert [(one.state, one.problem) for one in snapshot.workers] == [("serving", "")]
    dead = shown(words(fleet(worker(alive=False))))
    assert [(one.state, one.problem) for one in dead.workers] == [("dead", "it ended the stream")]
    assert (dead.fleet.num_workers, dead.fleet.num_alive, dead.fleet.kv_usage) == (1, 0, None)


def test_while_no_router_answers_the_last_fleet_stays_without_rates_and_with_its_age():
    silent = [RouterReply("router-0:1", None, "refused")]
    snapshot = shown(words(fleet(worker())), words(fleet(worker(num_output_tokens=5))), silent, silent)
    assert [one.worker_id for one in snapshot.workers] == ["d"]
    assert snapshot.workers[0].output_tokens_per_second is None
    assert snapshot.heard_age == pytest.approx(2)
    assert snapshot.routers[0].problem == "refused"
    nothing = shown(silent)
    assert (nothing.heard_age, nothing.workers) == (None, [])


def test_rates_continue_after_a_router_was_replaced():
    snapshot = shown(words(fleet(worker(), num_placed=10**6)), words(fleet(worker(), router_id=9, num_placed=10**5)))
    assert snapshot.fleet.placements_per_second == 0


def test_running_and_ended_placements_share_the_list():
    ended = router_pb2.PlacementOutcome(
        num_output_tokens=5,
        first_token_us=10_000,
        times=router_pb2.RequestTimes(place_us=2_000, decode_us=40_000, mean_itl_us=10_000),
    )
    failed = router_pb2.PlacementOutcome(worker_failed=True)
    told = fleet(
        placed=[summary(at, age_ms=at) for at in range(40)] + [summary(99, 7, ended)],
        reported=[summary(99, 7, ended), summary(98, 3, failed), *(summary(100 + at, 100, ended) for at in range(40))],
    )
    placements = shown(words(told)).placements
    assert len(placements) == MAX_PLACEMENTS
    assert len({one.placement_id for one in placements}) == MAX_PLACEMENTS
    assert [one.age for one in placements] == sorted(one.age for one in placements)
    states = [one.state for one in placements]
    assert (states.count("running"), states.count("failed")) == (20, 1)
    one = next(one for one in placements if one.request_id == "r99")
    assert one.placement_id == str(2**60 + 99)
    assert (one.ttft, one.itl, one.seconds) == (pytest.approx(0.012), pytest.approx(0.01), pytest.approx(0.052))


def test_an_explanation_has_times_candidates_and_evidence_but_no_prompt_hashes():
    told = router_pb2.ExplainResponse(
        request=router_pb2.PlaceRequest(request_id="r", model="m", num_prompt_tokens=7, block_hashes=b"x" * 16),
        response=router_pb2.PlaceResponse(
            placement_id=2**63,
            decode=types_pb2.Endpoint(worker_id="d"),
            prefill=types_pb2.Endpoint(worker_id="p"),
            candidates=[
                router_pb2.Candidate(
                    decode_worker_id="d",
                    prefill_worker_id="p",
                    total_seconds=0.5,
                    costs=[router_pb2.Cost(kind=router_pb2.COST_KIND_QUEUE, seconds=0.5)],
                )
            ],
        ),
        evidence=[router_pb2.Evidence(worker_id="x", refusal="it drains")],
    )
    running = explanation_of(told)
    assert (running.placement_id, running.result) == (str(2**63), None)
    assert [(way.prefill, way.decode, way.costs) for way in running.ways] == [("p", "d", {"queue": 0.5})]
    assert running.evidence[0].refusal == "it drains"
    told.outcome.num_output_tokens = 3
    told.outcome.first_token_us = 1_000
    told.outcome.times.place_us = 500
    result = explanation_of(told).result
    assert result is not None
    assert result.times is not None
    assert result.times.first_token == pytest.approx(0.0015)


@pytest.mark.parametrize(
    "query",
    [{}, {"placement_id": ["1"], "request_id": ["r"]}, {"placement_id": ["-1"]}, {"placement_id": ["1e3"]},
     {"placement_id": [str(2**64)]}, {"placement_id": ["²"]}, {"placement_id": [""]}],
)  # fmt: skip
def test_a_query_that_names_no_placement_is_refused(query):
    with pytest.raises(InvalidRequest) as refusal:
        explain_request(query)
    assert refusal.value.field == "placement_id"


def test_the_largest_placement_id_can_be_asked_for():
    assert explain_request({"placement_id": [str(2**64 - 1)]}).placement_id == 2**64 - 1
    assert explain_request({"request_id": ["r"]}).request_id == "r"
