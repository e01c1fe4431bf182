"""Which worker wins, and why, over tables of fleets."""

import pytest
from support.fleet.fleet_node import layout, state
from support.fleet.router_views import BOTH, DECODE, PREFILL, RATES, demand, faster, snapshot

from baton.router.fleet.worker_view import view_of
from baton.router.placement import costs
from baton.router.placement.policy import rank
from baton.router.placement.worker_snapshot import snapshot_of
from baton.router.requests.in_flight import PendingLoad
from baton.v1 import kv_pb2


def choose(decodes, prefills=(), **asked):
    best = rank(decodes, prefills, demand(**asked))[0]
    return best.decode.view.worker_id, best.prefill.view.worker_id if best.prefill else None


@pytest.mark.parametrize(
    ("why", "one", "other", "winner"),
    [
        ("the one with the prefix", {"cached": 3000}, {}, "one"),
        ("the one with the longer prefix", {"cached": 1000}, {"cached": 3000}, "other"),
        ("the one with the shorter prompt queue", {"num_pending_prefill_tokens": 9000}, {}, "other"),
        ("the one with the smaller batch", {"num_running": 50}, {"num_running": 2}, "other"),
        ("the one with a free place", {"num_running": 64}, {"num_running": 63}, "other"),
        ("the one with memory", {"num_free_blocks": 10}, {}, "other"),
        ("the faster one", {"rates": faster(0.5)}, {}, "other"),
        ("the idle one before a hot prefix", {"cached": 500, "num_running": 60}, {"num_running": 1}, "other"),
        ("a long prefix before an idle one", {"cached": 3900, "num_running": 8}, {"num_running": 4}, "one"),
        ("what is in flight counts", {"pending": PendingLoad(40, 80_000, 5000, 40, num_open_requests=40)}, {}, "other"),
    ],
)
def test_between_two_workers_wins(why, one, other, winner):
    assert choose([snapshot("one", **one), snapshot("other", **other)])[0] == winner, why
    assert choose([snapshot("other", **other), snapshot("one", **one)])[0] == winner, why


@pytest.mark.parametrize(
    ("why", "decode", "prefill", "asked", "remote"),
    [
        ("an idle decode worker computes itself", {}, {}, {}, False),
        ("a busy batch is not stopped for a long prompt", {"num_running": 32}, {}, {}, True),
        ("a prompt that is almost cached stays", {"num_running": 8, "cached": 3995}, {}, {}, False),
        ("a long queue there", {"num_running": 1}, {"num_pending_prefill_tokens": 10**6}, {}, False),
        ("a prefill worker that holds the prefix", {}, {"cached": 3900}, {}, True),
        ("a queue of prompts here", {"num_pending_prefill_tokens": 50_000}, {}, {}, True),
        ("a slow link", {"num_running": 2, "rates": RATES.__class__(1e4, 1e6, RATES.step, True)}, {}, {}, False),
    ],
)  # fmt: skip
def test_disaggregates_only_where_it_is_estimated_to_be_faster(why, decode, prefill, asked, remote):
    decodes, prefills = [snapshot("d", DECODE, **decode)], [snapshot("p", PREFILL, **prefill)]
    assert (choose(decodes, prefills, **asked)[1] is not None) == remote, why


def test_never_costs_more_than_the_better_of_always_and_never():
    for num_running in (0, 1, 4, 16, 60):
        for prompt in (64, 500, 4000, 50_000):
            for backlog in (0, 5000, 500_000):
                decode = snapshot("d", DECODE, num_running=num_running)
                prefill = snapshot("p", PREFILL, num_pending_prefill_tokens=backlog)
                options = rank([decode], [prefill], demand(prompt), complete=True)
                assert len(options) == 2
                assert options[0].total == min(option.total for option in options)
                assert rank([decode], [prefill], demand(prompt))[0] == options[0]


def test_a_worker_never_prefills_for_itself():
    both = [snapshot("a", BOTH, num_running=30), snapshot("b", BOTH, num_running=30)]
    for option in rank(both, both, demand()):
        assert option.prefill is None or option.prefill.view.worker_id != option.decode.view.worker_id


@pytest.mark.parametrize(
    "other",
    [{"dtype": kv_pb2.KV_DTYPE_SIMULATED}, {"num_layers": 31}, {"num_kv_heads": 4}, {"head_dim": 64}, {"tp_size": 2}],
)
def test_workers_whose_layouts_cannot_be_converted_are_never_paired(other):
    told = state("p", PREFILL)
    told.layout.CopyFrom(layout(**other))
    prefill = snapshot_of(view_of(told, "host:p", False, 0.0, None), PendingLoad(), RATES, 4000)
    options = rank([snapshot("d", DECODE, num_running=60)], [prefill], demand())
    assert [option.prefill for option in options] == [None]


def test_workers_are_paired_only_where_their_groups_are_equal():
    def told(worker_id, role, window):
        full = kv_pb2.KvGroup(kind=kv_pb2.KV_GROUP_KIND_FULL, layers=[1], num_kv_heads=8, head_dim=128)
        last = kv_pb2.KvGroup(
            kind=kv_pb2.KV_GROUP_KIND_WINDOW, layers=[0, 2], num_kv_heads=8, head_dim=128, window=window
        )
        message = state(worker_id, role, num_running=60)
        message.layout.CopyFrom(kv_pb2.KvLayout(model_digest=b"m", block_size=16, groups=[full, last]))
        return snapshot_of(view_of(message, "host", False, 0.0, None), PendingLoad(), RATES, 4000)

    decode, alike, other = told("d", DECODE, 512), told("p", PREFILL, 512), told("q", PREFILL, 256)
    assert {option.prefill for option in rank([decode], [alike, other], demand())} == {None, alike}
    assert decode.view.num_layers == 3


@pytest.mark.parametrize("other", [{"dtype": kv_pb2.KV_DTYPE_FLOAT8_E4M3}, {"block_size": 32}, {"tp_size": 0}])
def test_workers_whose_layouts_can_be_converted_are_paired(other):
    told = state("p", PREFILL)
    told.layout.CopyFrom(layout(**other))
    prefill = snapshot_of(view_of(told, "host:p", False, 0.0, None), PendingLoad(), RATES, 4000)
    options = rank([snapshot("d", DECODE, num_running=60)], [prefill], demand())
    assert {option.prefill for option in options} == {None, prefill}


def test_equal_workers_are_used_in_turn():
    fleet = [snapshot(f"w{number}") for number in range(5)]
    winners = [rank(fleet, (), demand(), rotation)[0].decode.view.worker_id for rotation in range(10)]
    assert sorted(winners) == sorted(one.view.worker_id for one in fleet * 2)


def test_options_are_sorted_and_bounded_with_many_workers():
    decodes = [snapshot(f"d{number}", DECODE, num_running=number) for number in range(64)]
    prefills = [snapshot(f"p{number}", PREFILL, num_pending_prefill_tokens=number * 100) for number in range(64)]
    options = rank(decodes, prefills, demand())
    totals = [option.total for option in options]
    assert totals == sorted(totals)
    assert len(options) <= 64 + 16
    assert (options[0].decode.view.worker_id, options[0].prefill) == ("d0", None)


def test_the_pair_found_in_two_stages_is_the_best_of_all_pairs():
    decodes = [snapshot(f"d{n}", DECODE, num_running=10 + n % 7, cached=(n * 640) % 3200) for n in range(12)]
    prefills = [
        snapshot(f"p{n}", PREFILL, num_pending_prefill_tokens=(n * 977) % 5000, cached=n * 160) for n in range(12)
    ]
    asked = demand()
    floor = min(one.rates.step.seconds(1) for one in decodes)
    best = min(costs.remote(d, p, asked, costs.decode_alone(d, asked, floor)).total for d in decodes for p in prefills)
    found = next(option for option in rank(decodes, prefills, asked) if option.prefill is not None)
    assert found.total == pytest.approx(best)


def test_no_decode_worker_no_option():
    assert rank([], [snapshot("p", PREFILL)], demand()) == []


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        ({}, (210, 10)),
        ({"num_requests": 100, "num_open_requests": 215}, (215, 10)),  # the state shows most of the hundred
        (
            {"num_requests": 100, "num_unseen_requests": 100, "num_open_requests": 100},
            (310, 54),
        ),  # others are forgotten
        (
            {"num_requests": 200, "num_unseen_requests": 200, "num_ended_requests": 190, "num_open_requests": 220},
            (220, 0),
        ),
    ],
)
def test_requests_of_a_burst_are_counted_once(pending, expected):
    one = snapshot("w", BOTH, num_running=200, queue_depth=10, max_num_requests=256, pending=PendingLoad(**pending))
    assert (one.num_requests, one.num_waiting) == expected
