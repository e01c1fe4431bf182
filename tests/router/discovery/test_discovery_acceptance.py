"""Routers that follow EndpointSlices: seconds until they are correct again after faults of an API server.

Each figure is printed beside what it must reach: `pytest -s tests/router/discovery/test_discovery_acceptance.py`.
"""

import asyncio
import contextlib
import time
import urllib.request

import pytest
from support.fleet.fleet_node import state
from support.fleet.kvstore_node import eventually
from support.kubernetes.api_server import ApiServer, endpoint, slice_of
from support.processes import ports
from support.processes.stack import metric

from baton.router.discovery.pace import Pace

SILENT_SECONDS = 90.0  # a silent connection: a new worker is seen
AGAIN_SECONDS = 10.0  # the server is back, whatever happened: right again
REMOVED_SECONDS = 15.0  # a removed worker is gone from every count


@pytest.fixture
async def api():
    server = await ApiServer(token=None, bookmark_seconds=1.0).start()
    yield server
    with contextlib.suppress(ConnectionError):
        await server.stop()


class Cluster:
    """A router over an API server, and scripted workers, each of which has a slice of its name."""

    def __init__(self, api, world):
        self.api = api
        self.world = world
        self.workers = {}

    async def start(self, *names, pace=None):
        for name in names:
            await self.add(name)
        self.metrics = f"127.0.0.1:{ports.free_ports(1)[0]}"
        self.router = await self.world.router(
            "k8s://ml/workers:grpc",
            kubernetes_api=f"http://127.0.0.1:{self.api.port}",
            metrics_listen=self.metrics,
            state_interval_ms=200,
            pace=pace,
        )
        await self.until(*names)
        await eventually(lambda: self.api.num_watches, "a watch")
        return self

    async def add(self, name):
        """A worker starts, and its slice appears."""
        self.workers[name] = await self.world.worker(state(name))
        self.api.put(self.slice(name))

    def slice(self, name):
        return slice_of(name, endpoint("127.0.0.1"), port=self.workers[name].port)

    async def until(self, *names, seconds=30.0):
        """Waits until the router has exactly these, all alive; returns how long that took."""
        began = time.monotonic()

        async def agrees():
            entries = await self.router.workers()
            return set(entries) == set(names) and all(one.alive for one in entries.values())

        await eventually(agrees, f"the router has {names}", seconds)
        return time.monotonic() - began

    async def scraped(self, name, **labels):
        """A metric as Prometheus reads it."""
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{self.metrics}/metrics", timeout=5) as answer:
            return metric(answer.read().decode(), name, **labels)

    async def counts(self):
        """Returns the numbers of known and live workers, which BatonWorkersMissing compares."""
        return await self.scraped("baton_router_workers"), await self.scraped("baton_router_workers_alive")

    async def age(self):
        return await self.scraped("baton_router_discovery_age_seconds", list="workers")


@pytest.fixture
def cluster(api, world):
    return Cluster(api, world)


def judge(what, seconds, must):
    print(f"\n{what:<70} {seconds:6.2f} s, must be {must:g} s at most")
    assert seconds <= must, what


async def test_a_silent_connection_hides_a_new_worker_for_ninety_seconds_at_most(cluster):
    """Uses a shorter timeout, and adds the difference to the result."""
    pace = Pace(silence=2.0)
    await cluster.start("a", pace=pace)
    cluster.api.fall_silent()
    await cluster.add("b")
    seconds = await cluster.until("a", "b")
    assert seconds > 1.0, "the connection was silent"
    judge("silent connection: new worker seen", seconds + Pace().silence - pace.silence, SILENT_SECONDS)


@pytest.mark.long
async def test_the_same_with_the_usual_patience(cluster):
    cluster.api.bookmark_seconds = 60.0
    await cluster.start("a")
    cluster.api.fall_silent()
    await cluster.add("b")
    judge("silent connection: new worker seen, measured", await cluster.until("a", "b", seconds=120.0), SILENT_SECONDS)


async def test_an_outage_ends_within_ten_seconds_of_the_servers_return(cluster):
    await cluster.start("a", "b")
    port = cluster.api.port
    await cluster.api.stop()
    await cluster.add("c")
    cluster.api.delete("a")
    await asyncio.sleep(4.0)  # the waits between attempts are at their longest
    assert set(await cluster.router.workers()) == {"a", "b"}, "what is known goes on"
    assert await cluster.age() > 3.0
    await cluster.api.start(port)
    judge("API server back after an outage: right again", await cluster.until("b", "c"), AGAIN_SECONDS)
    assert await cluster.age() < 3.0


async def test_a_server_that_answered_nothing_is_followed_within_ten_seconds(cluster):
    await cluster.start("a")
    cluster.api.delay = 3600.0
    cluster.api.cut()
    await cluster.add("b")
    await asyncio.sleep(2.0)  # an attempt waits for its answer, which never comes
    cluster.api.delay = 0.0
    judge("API server back after answering nothing: right again", await cluster.until("a", "b"), AGAIN_SECONDS)


async def test_a_compacted_history_is_listed_again_within_ten_seconds(cluster):
    await cluster.start("a", "b")
    cluster.api._objects.pop("a")  # the event is lost with the history
    cluster.api.compact()
    judge("compaction (410): right again", await cluster.until("b"), AGAIN_SECONDS)


async def test_a_restored_older_revision_is_followed_within_ten_seconds(cluster):
    await cluster.start("a", "b")
    await cluster.add("c")
    await cluster.until("a", "b", "c")
    cluster.api.restore(50, cluster.slice("b"))
    judge("restored revision: right again", await cluster.until("b"), AGAIN_SECONDS)
    await cluster.add("d")
    await cluster.until("b", "d", seconds=AGAIN_SECONDS)


async def test_a_removed_worker_is_gone_from_every_count_within_fifteen_seconds(cluster):
    await cluster.start("a", "b")
    await cluster.workers["a"].stop()
    cluster.api.delete("a")
    began = time.monotonic()
    await cluster.until("b")
    await eventually(lambda: _equals(cluster.counts(), (1, 1)), "the counts")
    judge("removed worker: gone from counts, console and alerts", time.monotonic() - began, REMOVED_SECONDS)


async def test_a_worker_that_crashed_and_stays_listed_is_missing(cluster):
    """The alert is not silenced: a pod that restarts in place is not ready, and its endpoint stays."""
    await cluster.start("a", "b")
    await cluster.workers["a"].stop()
    cluster.api.put({**cluster.slice("a"), "endpoints": [endpoint("127.0.0.1", ready=False, serving=False)]})
    await eventually(lambda: _equals(cluster.counts(), (2, 1)), "it is missing")
    await asyncio.sleep(0.5)
    assert await cluster.counts() == (2, 1)


@pytest.mark.parametrize("serving", [True, False])
async def test_a_draining_worker_is_kept_and_placed_upon_no_more(cluster, caplog, serving):
    await cluster.start("a", "b")
    cluster.api.drain("a", serving)

    async def drains():
        return (await cluster.router.workers())["a"].state.draining

    await eventually(drains, "the router has its end")
    for number in range(8):
        placed = await cluster.router.place(request_id=f"r{number}")
        assert placed.decode.worker_id == "b"
    assert await cluster.until("a", "b") < 1.0, "both are alive"
    await cluster.workers["a"].stop()  # its streams have ended
    await cluster.until("b")
    await eventually(lambda: _equals(cluster.counts(), (1, 1)), "the counts")
    cluster.api.delete("a")
    await asyncio.sleep(0.3)
    assert await cluster.counts() == (1, 1)
    loud = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert not [text for text in loud if "worker" in text]


async def _equals(awaitable, expected):
    return await awaitable == expected
