"""Endpoints followed over the real watch protocol, against a small API server."""

import asyncio
import contextlib

import pytest
from kubernetes_api_server import ApiServer, endpoint, slice_of
from kvstore_node import eventually

from baton.router.discovery import kubernetes_discovery
from baton.router.discovery.kubernetes_api import ApiError, KubernetesApi, UnexpectedAnswer
from baton.router.discovery.kubernetes_discovery import KubernetesDiscovery

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


class Follower:
    """Keeps what a discovery told last."""

    def __init__(self, discovery):
        self.found = None
        self.count = 0
        self.task = asyncio.create_task(self._follow(discovery))

    async def _follow(self, discovery):
        async for found in discovery.watch():
            self.found = set(found)
            self.count += 1

    async def until(self, *addresses):
        await eventually(lambda: self.found == set(addresses), f"{addresses}, not {self.found}")


@pytest.fixture
async def api(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_discovery, "_MIN_BACKOFF_SECONDS", 0.01)
    server = await ApiServer().start()
    (tmp_path / "token").write_text("secret\n")
    server.client = KubernetesApi(f"http://127.0.0.1:{server.port}", str(tmp_path / "token"), "")
    server.token_path = tmp_path / "token"
    yield server
    await server.stop()


@pytest.fixture
async def follow(api):
    followers = []

    def start(port="grpc"):
        followers.append(Follower(KubernetesDiscovery(api.client, "ml", "workers", port)))
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
    assert sum("watch" in query for _, query in api.requests) == 1


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, True),
        ({"ready": True, "serving": True}, True),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False}, False),
        ({"ready": False}, False),
        ({"ready": None}, True),
    ],
)
async def test_who_serves_counts(api, follow, conditions, counts):
    api.put(slice_of("s", endpoint("10.0.0.1", **conditions), endpoint("10.0.0.2")))
    await follow().until("10.0.0.2:8300", *(["10.0.0.1:8300"] if counts else []))


async def test_ports_by_name_and_number_and_ipv6(api, follow):
    api.put(slice_of("six", endpoint("fd00::1"), address_type="IPv6"))
    api.put(slice_of("fqdn", endpoint("example.test"), address_type="FQDN"))
    await follow("8300").until("[fd00::1]:8300")
    await follow("metrics").until("[fd00::1]:9000")
    await follow("nothing").until()


async def test_a_broken_watch_is_resumed_where_it_was(api, follow):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: sum("watch" in query for _, query in api.requests) == 1, "a watch")
    api.bookmark()
    api.put(slice_of("b", endpoint("10.0.0.2")))
    await follower.until("10.0.0.1:8300", "10.0.0.2:8300")
    version = str(api.version)
    api.cut()
    await eventually(lambda: api.requests[-1][1].get("resourceVersion") == version, "resumed")
    assert sum("watch" not in query for _, query in api.requests) == 1, "one list"
    assert follower.count == 2, "nothing changed"


async def test_a_bookmark_moves_the_version_that_a_watch_is_resumed_from(api, follow):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    await eventually(lambda: sum("watch" in query for _, query in api.requests) == 1, "a watch")
    api.bookmark()
    version = str(api.version)
    await asyncio.sleep(0.1)
    api.compact()
    api.cut()
    await eventually(lambda: api.requests[-1][1].get("resourceVersion") == version, "resumed")
    assert sum("watch" not in query for _, query in api.requests) == 1, "no second list"


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


async def test_while_the_server_is_gone_or_refuses_what_is_known_goes_on(api, follow, caplog):
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    api.fail_with = 500
    api.cut()
    await eventually(lambda: "500" in caplog.text, "the refusal is logged")
    assert follower.found == {"10.0.0.1:8300"}
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
async def test_an_answer_that_is_none_is_an_error_that_says_so(body):
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
            async for _ in api.watch_slices("ml", "workers", "7", 5, 5):
                pass
    finally:
        server.close()
        await server.wait_closed()


async def test_a_slice_as_a_cluster_has_it(api, follow):
    """Every field that Kubernetes 1.37 fills in, and some that a later one may."""
    api.put(RECORDED)
    await follow().until("10.244.1.7:8300", "10.244.2.9:8300")


async def test_a_slice_of_a_thousand_endpoints_is_one_line(api, follow):
    follower = follow()
    await follower.until()
    many = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    zone = "z" * 4000  # with what else may stand there, more than a buffer of any usual size
    api.put(slice_of("many", *({**endpoint(one), "zone": zone} for one in many)))
    await follower.until(*(f"{one}:8300" for one in many))


async def test_a_slow_server_is_given_up_and_asked_again(api, follow, caplog, monkeypatch):
    monkeypatch.setattr(kubernetes_discovery, "_LIST_SECONDS", 0.2)
    api.delay = 60.0
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await eventually(lambda: "no answer in time" in caplog.text, "it is said")
    api.delay = 0.0
    await follower.until("10.0.0.1:8300")


async def test_a_watch_that_never_begins_is_given_up_and_tried_again(api, follow, caplog, monkeypatch):
    monkeypatch.setattr(kubernetes_discovery, "_CONNECT_SECONDS", 0.2)
    api.put(slice_of("a", endpoint("10.0.0.1")))
    follower = follow()
    await follower.until("10.0.0.1:8300")
    api.delay = 60.0
    api.cut()
    await eventually(lambda: "no answer in time" in caplog.text, "it is said")
    api.put(slice_of("b", endpoint("10.0.0.2")))
    api.delay = 0.0
    await follower.until("10.0.0.1:8300", "10.0.0.2:8300")
    assert sum("watch" not in query for _, query in api.requests) == 1, "one list"


async def test_a_page_that_is_too_old_means_a_new_list(api, follow):
    for number in range(4):
        api.put(slice_of(f"s{number}", endpoint(f"10.0.0.{number}")))
    api.expire_pages = 1
    follower = follow()
    await follower.until(*(f"10.0.0.{number}:8300" for number in range(4)))
    assert sum("watch" not in query for _, query in api.requests) == 4, "page, refused page, and two pages"


@pytest.mark.parametrize("event", [{"type": "ADDED"}, {"type": "ADDED", "object": {"metadata": {}}}, []])
async def test_an_event_that_makes_no_sense_begins_anew_and_breaks_nothing(api, follow, event):
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
