"""Routers that exchange their placements."""

import asyncio
import contextlib

import grpc
import pytest
from support.fleet.fleet_node import state
from support.fleet.kvstore_node import blocks, eventually
from support.network.byte_proxy import ByteProxy
from support.processes import ports

from baton.router.fleet.fleet import Cordon, Fleet
from baton.router.peers.news import PeerNews
from baton.router.peers.peers import Peers
from baton.router.requests import in_flight
from baton.router.requests.in_flight import InFlight, Placed, Share
from baton.router.requests.prompt_sketch import sketch_of
from baton.v1 import router_pb2


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Half:
    """One router's share of the exchange, without a network."""

    def __init__(self, router_id):
        self.clock = Clock()
        self.in_flight = InFlight()
        self.fleet = Fleet(self.clock, wall_clock=self.clock)
        self.news = PeerNews(router_id, self.in_flight, self.fleet, self.clock)
        self.peers = Peers(router_id, self.in_flight, self.fleet, None, clock=self.clock)
        self.reader = self.news.join(lambda: None)

    def place(self, placement_id, *prompt, **fields):
        placed = Placed(placement_id, (Share("w", 1, 160, 10),), sketch_of(blocks(*prompt)), num_tokens=100, **fields)
        self.in_flight.begin(placed, self.clock.now)
        self.news.on_placed(placed)

    def end(self, placement_id):
        assert self.in_flight.end(placement_id)
        self.news.on_ended(placement_id)

    def send(self, other):
        other.peers.take(self.news.take(self.reader))

    def send_all(self, other):
        for part in self.news.snapshot():
            other.peers.take(part)


def requests(half):
    return half.in_flight.load("w").num_requests


def test_a_placement_counts_there_until_it_ends():
    one, other = Half(1), Half(2)
    one.place(7, 1, 2, 3, tenant="t", weight=2.0, priority=3)
    one.send(other)
    assert requests(other) == 1
    assert other.in_flight.tenants["t"].num_tokens == 100
    assert other.in_flight.tenants["t"].weight == 2.0
    assert other.in_flight.expected_prefixes(blocks(1, 2, 9)) == {"w": 2}
    assert other.in_flight.share_ahead("w", 0) == 0.0
    one.end(7)
    one.send(other)
    assert requests(other) == 0
    assert other.in_flight.tenants == {}


def test_an_end_that_arrives_before_the_placement_counts():
    one, again = Half(1), Half(2)
    one.place(7)
    again.in_flight.end(7)
    again.news.on_ended(7)
    again.send(one)
    assert requests(one) == 0
    one.send(again)  # of the placement, which has ended everywhere
    assert requests(again) == 0


def test_a_missed_end_is_sent_to_a_returning_peer():
    one, other = Half(1), Half(2)
    one.place(7)
    one.place(8)
    one.send(other)
    other.end(7)
    other.news.take(other.reader)  # lost: the stream to `one` does not stand
    other.send_all(one)
    assert requests(one) == 1
    one.send_all(other)
    assert requests(other) == 1, "what has ended does not begin again"


def test_a_router_that_was_cut_off_keeps_what_still_runs():
    one, other = Half(1), Half(2)
    one.place(7)
    one.send(other)
    other.clock.now += 1.1
    other.peers.forget_silent()
    assert requests(other) == 0
    other.send_all(one)
    assert requests(one) == 1, "nobody reported on it"
    one.send_all(other)
    assert requests(other) == 1


def test_a_placements_age_is_sent_so_that_it_settles_at_the_same_time():
    one, other = Half(1), Half(2)
    one.place(7)
    one.clock.now += 0.2
    one.send(other)
    other.in_flight.on_state("w", other.clock.now + 0.04)
    assert requests(other) == 1
    other.in_flight.on_state("w", other.clock.now + 0.06)
    assert requests(other) == 0


def test_a_report_to_another_router_ends_it_everywhere():
    one, other = Half(1), Half(2)
    one.place(7)
    one.send(other)
    other.end(7)
    other.send(one)
    assert requests(one) == 0


def test_a_restarted_router_gets_everything_back_its_own_former_placements_too():
    one, other = Half(1), Half(2)
    one.place(7)
    other.place(8)
    one.send(other)
    again = Half(3)
    other.send_all(again)
    assert requests(again) == 2
    other.send_all(again)
    assert requests(again) == 2, "what is known is not counted twice"


def test_a_silent_router_s_placements_end_after_a_second():
    one, other = Half(1), Half(2)
    one.place(7)
    one.send(other)
    other.clock.now += 0.9
    other.peers.forget_silent()
    assert requests(other) == 1
    other.clock.now += 0.2
    other.peers.forget_silent()
    assert requests(other) == 0
    one.place(9)
    one.send(other)
    assert requests(other) == 1


def test_a_router_that_was_gone_before_this_one_began_is_silent_too():
    one, other, again = Half(1), Half(2), Half(3)
    one.place(7)  # the answer is lost with the router: nobody will report on it
    one.send(other)
    other.place(8)
    other.send_all(again)
    assert requests(again) == 2
    again.clock.now += 0.6
    other.send(again)
    again.clock.now += 0.6
    again.peers.forget_silent()
    assert requests(again) == 1, "the one that is heard keeps what it placed"


def test_a_snapshot_of_many_comes_in_parts():
    one, other = Half(1), Half(2)
    for number in range(1200):
        one.place(number)
    parts = list(one.news.snapshot())
    assert [len(part.placements) for part in parts] == [500, 500, 200, 0]
    assert [part.complete for part in parts] == [False, False, False, True]
    one.send_all(other)
    assert requests(other) == 1200
    for number in range(600):
        one.end(number)
    lengths = [(len(part.placements), len(part.ends)) for part in one.news.snapshot()]
    assert lengths == [(500, 0), (100, 0), (0, 500), (0, 100), (0, 0)]
    one.send_all(other)
    assert requests(other) == 600


def test_a_far_lagging_reader_must_restart():
    one = Half(1)
    for number in range(20_001):
        one.news.on_ended(number)
    assert one.reader.lags


def test_a_long_prompt_is_sent_in_part_and_still_recognised():
    one, other = Half(1), Half(2)
    one.place(7, *range(1000))
    one.send(other)
    found = other.in_flight.expected_prefixes(blocks(*range(1000)))["w"]
    assert found == 1000
    part = other.in_flight.expected_prefixes(blocks(*range(500), 7777))["w"]
    assert 480 <= part <= 500


def test_a_worker_lost_by_a_gateway_is_suspected_by_all_routers_until_its_next_state():
    one, other = Half(1), Half(2)
    other.fleet.add("w")
    other.fleet.update("w", state("w", epoch=5))
    one.news.on_suspected("w", 4)
    one.send(other)
    assert not other.fleet.alive()[0].stalled, "it was another life"
    one.news.on_suspected("w", 5)
    one.send(other)
    assert other.fleet.alive()[0].stalled
    one.send(other)
    other.fleet.update("w", state("w", epoch=5))
    assert not other.fleet.alive()[0].stalled
    one.send(other)
    assert not other.fleet.alive()[0].stalled, "it is told once"


def test_the_newest_cordon_wins_whatever_the_order():
    fleet = Fleet(Clock())
    fleet.take_cordon(Cordon("w", True, 20))
    fleet.take_cordon(Cordon("w", False, 10))
    assert fleet.is_cordoned("w")
    fleet.take_cordon(Cordon("w", False, 21))
    assert not fleet.is_cordoned("w")


# Over real gRPC.


@pytest.fixture
def unsettled(monkeypatch):
    """No worker's state shows a router any placement: those count until they are reported on."""
    monkeypatch.setattr(in_flight, "_SETTLE_SECONDS", 60.0)


@pytest.fixture
def two_routers(world, unsettled):
    """Starts two routers that follow each other, and may not be connected yet."""

    async def start(*workers):
        addresses = [f"127.0.0.1:{port}" for port in ports.free_ports(2)]
        return [await world.router(*workers, listen=address, peers=tuple(addresses)) for address in addresses]

    return start


async def until_in_flight(router, count):
    async def agrees():
        return sum(worker.num_in_flight for worker in (await router.workers()).values()) == count

    await eventually(agrees, f"{count} in flight")


async def test_replicas_share_placements_and_ends(world, two_routers):
    worker = await world.worker(state("w1"))
    one, other = await two_routers(worker)
    placed = await one.place(request_id="shared")
    await until_in_flight(other, 1)
    outcome = router_pb2.PlacementOutcome(placement_id=placed.placement_id)
    await other.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]))
    await until_in_flight(one, 0)


async def test_an_end_reaches_a_replica_that_missed_the_other(world, unsettled):
    worker = await world.worker(state("w1"))
    addresses = [f"127.0.0.1:{port}" for port in ports.free_ports(2)]
    with contextlib.closing(ByteProxy(("127.0.0.1", int(addresses[1].rpartition(":")[2])))) as way:
        way.refusing = True
        one = await world.router(worker, listen=addresses[0], peers=(way.address,))
        other = await world.router(worker, listen=addresses[1], peers=(addresses[0],))
        placed = await one.place(request_id="shared")
        await until_in_flight(other, 1)
        outcome = router_pb2.PlacementOutcome(placement_id=placed.placement_id)
        await other.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]))
        assert (await one.workers())["w1"].num_in_flight == 1, "it was not told"
        way.heal()
        await until_in_flight(one, 0)


async def test_a_burst_over_two_replicas_spreads_as_one_router_would(world, two_routers):
    workers = [await world.worker(state(f"w{number}")) for number in range(4)]
    routers = await two_routers(*workers)
    await until_peers_hear(*routers)
    counts = {}
    for number in range(16):
        placed = await routers[number % 2].place(8000, request_id=f"r{number}")
        name = placed.decode.worker_id
        counts[name] = counts.get(name, 0) + 1
        # What a gateway's next request comes after: longer than the staleness that is promised.
        await asyncio.sleep(0.05)
    assert len(counts) == 4
    assert max(counts.values()) <= 6, counts


async def test_explains_placements_of_another_replica(world, two_routers):
    one, other = await two_routers(await world.worker(state("w1")))
    placed = await one.place(request_id="why")
    await until_in_flight(other, 1)
    explained = await other.stub.Explain(router_pb2.ExplainRequest(request_id="why"))
    assert explained.response.placement_id == placed.placement_id
    assert [one.worker_id for one in explained.evidence] == ["w1"]
    mine = await one.stub.Explain(router_pb2.ExplainRequest(request_id="why"))
    assert mine.router_id == explained.router_id != 0
    for asked in ({"request_id": "nobody's"}, {"request_id": "why", "only_here": True}):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await other.stub.Explain(router_pb2.ExplainRequest(**asked))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_cordon_holds_on_every_replica_and_after_a_restart(world, two_routers):
    workers = [await world.worker(state(name)) for name in ("w1", "w2")]
    one, other = await two_routers(*workers)
    await one.stub.Cordon(router_pb2.CordonRequest(worker_id="w1"))

    async def told(router):
        return (await router.workers())["w1"].cordoned

    await eventually(lambda: told(other), "cordoned on the other replica")
    address, peers = one.address, (one.address, other.address)
    await one.end()
    again = await world.router(*workers, listen=address, peers=peers)
    await eventually(lambda: told(again), "cordoned after a restart")


async def test_a_restarted_replica_gets_the_placements_in_flight(world, two_routers):
    worker = await world.worker(state("w1"))
    one, other = await two_routers(worker)
    await until_peers_hear(one, other)
    for number in range(5):
        await other.place(request_id=f"r{number}")
    address, peers = one.address, (one.address, other.address)
    await one.end()
    again = await world.router(worker, listen=address, peers=peers)
    await until_in_flight(again, 5)


async def until_peers_hear(*routers):
    """Each router's first placement is known to all: the streams stand."""
    for router in routers:
        placed = await router.place(request_id="probe")
        for other in routers:
            await until_in_flight(other, 1)
        outcome = router_pb2.PlacementOutcome(placement_id=placed.placement_id)
        await router.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]))
        for other in routers:
            await until_in_flight(other, 0)
