"""Endpoints followed over the real watch protocol, against a small API server."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleet.kvstore_node import eventually
from support.kubernetes.api_server import ApiServer, endpoint, slice_of

from baton.router.discovery.endpoints import EndpointState
from baton.router.discovery.kubernetes_api import ApiError, KubernetesApi, UnexpectedAnswer
from baton.router.discovery.kubernetes_discovery import KubernetesDiscovery
from baton.router.discovery.pace import Pace

RECORDED = {
    "addressType": "IPv4",
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {
        "name": "workers-x7f2k",
        "generateName": "workers-",
        "namespace": "ml",
        "uid": "6f1c2c1e-3a0b-4b57-9b6e-0d8a4f1f6a11",
        "generation": 12,
        "creationTimestamp": "2026-11-20T09:14:03Z",
        "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-20T09:15:41Z"},
        "labels": {
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            "kubernetes.io/service-name": "workers",
            "service.kubernetes.io/headless": "",
        },
        "ownerReferences": [
            {"apiVersion": "v1", "blockOwnerDeletion": True, "controller": True, "kind": "Service", "name": "workers",
             "uid": "0a3b7c55-8d7e-4f0e-a1f4-55b9d2f4b1aa"}
        ],
    },
    "endpoints": [
        {
            "addresses": ["10.244.1.7"],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "hostname": "workers-0",
            "nodeName": "node-a",
            "targetRef": {"kind": "Pod", "name": "workers-0", "namespace": "ml",
                          "uid": "b2b8a7de-1f7e-4a53-8a34-9df1f1f36b0e"},
            "zone": "eu-1a",
            "hints": {"forZones": [{"name": "eu-1a"}]},
        },
        {"addresses": ["10.244.2.9"], "conditions": {"ready": False, "serving": True, "terminating": True}},
        {"addresses": ["10.244.2.10"], "conditions": {"ready": False, "serving": False, "terminating": True}},
    ],
    "ports": [
        {"appProtocol": "kubernetes.io/h2c", "name": "grpc", "port": 8300, "protocol": "TCP"},
        {"name": "metrics", "port": 9000, "protocol": "TCP"},
    ],
    "fieldOfALaterRelease": {"of": ["any", "shape"]},
}  # fmt: skip


SERVING, TERMINATING, NOT_READY = EndpointState.SERVING, EndpointState.TERMINATING, EndpointState.NOT_READY
PACE = Pace(min_backoff=0.01)


class Follower:
    """Keeps the last report of a discovery."""

    def __init__(self, discovery):
        self.discovery = discovery
        self.found = None
        self.count = 0
        self.task = asyncio.create_task(self._follow(discovery))

    async def _follow(self, discovery):
        async for found in discovery.watch():
            self.found = dict(found)
            self.count += 1

    async def until(self, *addresses):
        """Waits for exactly these, in service."""
        await self.until_states(dict.fromkeys(addresses, SERVING))

    async def until_states(self, states, seconds=10.0):
        await eventually(lambda: self.found == states, f"{states}, not {self.found}", seconds)


@pytest.fixture
async def api(tmp_path):
    server = await ApiServer().start()
    (tmp_path / "token").write_text("secret\n")
    server.client = KubernetesApi(f"http://127.0.0.1:{server.port}", str(tmp_path / "token"), "")
    server.token_path = tmp_path / "token"
    yield server
    await server.stop()


@pytest.fixture
async def follow(api):
    followers = []

    def start(port="grpc", **pace):
        paced = replace(PACE, **pace)
        followers.append(Follower(KubernetesDiscovery(api.client, "ml", "workers", port, paced)))
        return followers[-1]

    yield start
    for follower in followers:
        follower.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower.task


async def test_lists_in_pages_and_follows_every_change(api, follow):
    for number in range(5):
        api.put(slice_of(f"s{number}", endpoint(f"10.0.0.{number}")))
    api.put(slice_of("other", endpoint("10.9.9.9"), service="gateway"))
    follower = follow()
    await follower.until(*(f"10.0.0.{number}:8300" for number in range(5)))
    api.delete("s0")
    api.put(slice_of("s1", endpoint("10.0.0.1"), endpoint("10.0.0.11")))
    api.put(slice_of("s9", endpoint("10.0.0.9")))
    await follower.until("10.0.0.1:8300", "10.0.0.11:8300", *(f"10.0.0.{n}:8300" for n in (2, 3, 4, 9)))
    path, query = api.requests[0]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices"
    assert query["labelSelector"] == "kubernetes.io/service-name=workers"
    assert api.num_watches == 1


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, SERVING),
        ({"ready": True, "serving": True}, SERVING),
        ({"ready": True, "serving": False}, SERVING),  # of a Service that publishes addresses before they are ready
        ({"ready": False, "serving": True, "terminating": True}, TERMINATING),
        ({"ready": False, "serving": False, "terminating": True}, TERMINATING),
        ({"ready": True, "serving": True, "terminating": True}, TERMINATING),
        ({"ready": False, "serving": False}, NOT_READY),
        ({"ready": False}, NOT_READY),
        ({"ready": None}, SERVING),
        ({"serving": False}, NOT_READY),
    ],
)
async def test_conditions_decide_whether_an_endpoint_serves(api, follow, conditions, state):
    api.put(slice_of("s", endpoint("10.0.0.1", **conditions), endpoint("10.0.0.2")))
    await follow().until_states({"10.0.0.1:8300": state, "10.0.0.2:8300": SERVING})


async def test_an_endpoint_of_two_slices_serves_if_it_serves_in_one(api, follow):
    """While slices are rebalanced an endpoint may be in two of them."""
    api.put(slice_of("a", endpoint("10.0.0.1", terminating=True)))
    api.put(slice_of("b", endpoint("10.0.0.1")))
    await follow().until("10.0.0.1:8300")


async def test_ports_by_name_and_number_and_ipv6(api, follow):
    api.put(slice_of("six", endpoint("fd00::1"), address_type="IPv6"))
    api.put(slice_of("fqdn", endpoint("example.test"), address_type="FQDN"))
    await follow("8300").until("[fd00::1]:8300")
    await follow("metrics").until("[fd00::1]:9000")
    await follow("nothing").until()


async def test_a_broken_watch_begins_with_a_list(api, follow):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: api.num_watches == 1, "a watch")
    api.cut()
    await eventually(lambda: api.num_watches == 2, "another watch")
    assert api.num_lists == 2
    assert follower.count == 1, "nothing changed"


async def test_a_watch_that_the_server_ends_begins_with_a_list(api, follow, caplog):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow(watch=1)
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: api.num_watches == 2, "another watch")
    assert api.num_lists == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_restored_older_state_is_followed(api, follow):
    """Versions do not matter, because those of a restored cluster continue from an older one."""
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: api.num_watches == 1, "a watch")
    api.restore(7, slice_of("b", endpoint("10.0.0.2")))
    await follower.until("10.0.0.2:8300")
    api.put(slice_of("c", endpoint("10.0.0.3")))
    await follower.until("10.0.0.2:8300", "10.0.0.3:8300")


async def test_a_version_that_goes_back_within_a_watch_begins_with_a_list(api, follow):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: api.num_watches == 1, "a watch")
    api._objects = {"b": slice_of("b", endpoint("10.0.0.2"))}
    api._marked = lambda _: {"metadata": {"resourceVersion": "7"}}
    api.bookmark_seconds = 0.05
    api.bookmark()  # wakes the watch, whose next bookmark is an older one
    await follower.until("10.0.0.2:8300")


async def test_a_silent_connection_is_given_up(api, follow, caplog):
    """The connection stays open and silent, as when a balancer loses its server."""
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow(silence=0.5)
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: api.num_watches == 1, "a watch")
    api.fall_silent()
    api.put(slice_of("b", endpoint("10.0.0.2")))
    await follower.until_states({"10.0.0.1:8300": SERVING, "10.0.0.2:8300": SERVING}, 2.0)
    assert "no event and no bookmark for 0.5 s" in caplog.text


async def test_bookmarks_keep_an_idle_watch_open(api, follow):
    api.bookmark_seconds = 0.1
    follower = follow(silence=1.0)
    await follower.until()
    await asyncio.sleep(1.5)
    assert api.num_watches == 1
    await eventually(lambda: follower.discovery.age_seconds < 0.5, "it is young")
    _, query = api.requests[1]
    assert query["allowWatchBookmarks"].lower() == "true"


async def test_the_age_grows_while_nothing_proves_the_view(api, follow):
    follower = follow()
    await follower.until()
    api.fail_with = 500
    api.cut()
    await asyncio.sleep(0.5)
    assert follower.discovery.age_seconds > 0.4
    api.fail_with = None
    await eventually(lambda: follower.discovery.age_seconds < 0.3, "a new proof")


async def test_a_machine_that_vanished_is_noticed_by_tcp(api, follow):
    """The kernel's table has the keepalive timer (02) of the watch's connection."""
    follower = follow()
    await follower.until()
    remote = f"0100007F:{api.port:04X}"

    def timers():
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return {row[5].split(":")[0] for row in rows if row[2] == remote and row[3] == "01"}

    await eventually(lambda: "02" in timers(), "a keepalive timer")


def test_the_usual_pace_keeps_its_promises():
    pace = Pace()
    assert 75 <= pace.silence <= 90, "more than the 60 s between two bookmarks"
    assert pace.blindness <= 90
    assert pace.recovery <= 10


async def test_a_server_that_ends_every_watch_at_once_is_asked_less_and_less(api, follow):
    api.fail_with = None
    original = api._watch

    async def end_at_once(writer, since, query):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n")

    api._watch = end_at_once
    follower = follow(min_backoff=0.1, max_backoff=0.8)
    await follower.until()
    await asyncio.sleep(2.0)
    assert 3 <= api.num_watches <= 9
    api._watch = original
    api.put(slice_of("a", endpoint("10.0.0.1")))
    await follower.until("10.0.0.1:8300")


async def test_a_version_that_is_too_old_means_a_new_list(api, follow):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    port = api.port
    await api.stop()
    api.put(slice_of("b", endpoint("10.0.0.2")))
    api.delete("a")
    api.compact()
    await api.start(port)
    await follower.until("10.0.0.2:8300")


async def test_while_the_server_is_unreachable_or_refuses_known_endpoints_are_kept(api, follow, caplog):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    api.fail_with = 500
    api.cut()
    await eventually(lambda: "500" in caplog.text, "the refusal is logged")
    assert set(follower.found) == {"10.0.0.1:8300"}
    api.put(slice_of("a", endpoint("10.0.0.3")))
    api.fail_with = None
    await follower.until("10.0.0.3:8300")


async def test_a_token_is_read_again_for_each_connection(api, follow, caplog):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    api.token_path.write_text("old")
    follower = follow()
    await eventually(lambda: "401" in caplog.text, "it is refused")
    assert follower.found is None
    api.token_path.write_text("secret")
    await follower.until("10.0.0.1:8300")


@pytest.mark.parametrize(
    "body",
    [
        b"hello",
        b"<html>a proxy's page</html>",
        b"[]",
        b'{"items": [{"metadata": {}}]}',
        b'{"items": [{"addressType": "IPv4", "endpoints": 7}]}',
    ],
)
async def test_a_malformed_answer_is_an_error(body):
    async def garbage(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    api = KubernetesApi(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "", "")
    try:
        with pytest.raises(UnexpectedAnswer, match="not the answer of an API server"):
            await api.list_slices("ml", "workers", 5)
        with pytest.raises(ApiError):
            async for _ in api.watch_slices("ml", "workers", "7", Pace()):
                pass
    finally:
        server.close()
        await server.wait_closed()


async def test_a_slice_as_a_cluster_has_it(api, follow):
    """Every field that Kubernetes 1.37 fills in, and some that a later one may."""
    api.put(RECORDED)
    await follow().until_states(
        {"10.244.1.7:8300": SERVING, "10.244.2.9:8300": TERMINATING, "10.244.2.10:8300": TERMINATING}
    )


async def test_a_slice_of_a_thousand_endpoints_is_one_line(api, follow):
    follower = follow()
    await follower.until()
    many = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    zone = "z" * 4000  # with what else may stand there, more than a buffer of any usual size
    api.put(slice_of("many", *({**endpoint(one), "zone": zone} for one in many)))
    await follower.until(*(f"{one}:8300" for one in many))


async def test_a_slow_server_is_given_up_and_asked_again(api, follow, caplog):
    api.delay = 60.0
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow(request=0.2)
    await eventually(lambda: "no answer within 0.2 s" in caplog.text, "it is reported")
    api.delay = 0.0
    await follower.until("10.0.0.1:8300")


async def test_a_watch_that_never_begins_is_given_up_and_tried_again(api, follow, caplog):
    original = api._watch

    async def hang(writer, since, query):
        await asyncio.sleep(60.0)

    api._watch = hang
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow(request=0.2)
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: "no answer within 0.2 s" in caplog.text, "it is reported")
    api.put(slice_of("b", endpoint("10.0.0.2")))
    await follower.until("10.0.0.1:8300", "10.0.0.2:8300")
    api._watch = original
    api.put(slice_of("c", endpoint("10.0.0.3")))
    await follower.until("10.0.0.1:8300", "10.0.0.2:8300", "10.0.0.3:8300")


async def test_a_page_that_is_too_old_means_a_new_list(api, follow):
    for number in range(4):
        api.put(slice_of(f"s{number}", endpoint(f"10.0.0.{number}")))
    api.expire_pages = 1
    follower = follow()
    await follower.until(*(f"10.0.0.{number}:8300" for number in range(4)))
    assert api.num_lists == 4, "page, refused page, and two pages"


@pytest.mark.parametrize("event", [{"type": "ADDED"}, {"type": "ADDED", "object": {"metadata": {}}}, []])
async def test_a_malformed_event_restarts_the_watch(api, follow, event):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    api._history.append((api.version + 1, "BOOKMARK", {}))
    original = api._chunk
    sent = []

    async def odd(writer, document):
        await original(writer, document if sent else event)
        sent.append(document)

    api._chunk = odd
    api.put(slice_of("b", endpoint("10.0.0.2")))
    await follower.until("10.0.0.1:8300", "10.0.0.2:8300")
