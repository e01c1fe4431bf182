"""Addresses from lists, names, and several sources at once; and how an operator names them."""

import asyncio
import contextlib
import sys

import pytest
from support.fleet.kvstore_node import eventually

from baton.router.discovery.addresses import DnsDiscovery, StaticDiscovery, UnionDiscovery
from baton.router.discovery.endpoints import EndpointState, followed, merged
from baton.router.discovery.kubernetes_api import KubernetesApi
from baton.router.discovery.kubernetes_discovery import KubernetesDiscovery
from baton.router.discovery.sources import check_sources, discovery_of
from baton.rpc.errors import InvalidRequest


class Name:
    """A name whose addresses the test changes."""

    def __init__(self, *addresses):
        self.answers = list(addresses)
        self.error = None
        self.count = 0

    async def __call__(self, host, port):
        self.count += 1
        if self.error is not None:
            raise self.error
        return [f"{address}:{port}" for address in self.answers]


@contextlib.asynccontextmanager
async def following(discovery):
    told = []

    async def follow():
        async for found in discovery.watch():
            told.append(set(found))
            assert set(found.values()) <= {EndpointState.SERVING}

    task = asyncio.create_task(follow())
    yield told
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_name_is_resolved_again_and_only_changes_are_reported():
    name = Name("10.0.0.1", "10.0.0.2")
    async with following(DnsDiscovery("workers", 8300, 0.01, name)) as told:
        await eventually(lambda: name.count > 3, "several resolutions")
        assert told == [{"10.0.0.1:8300", "10.0.0.2:8300"}]
        name.answers = ["10.0.0.2"]
        await eventually(lambda: told[-1] == {"10.0.0.2:8300"}, "the change")


@pytest.mark.parametrize("error", [OSError("no such name"), TimeoutError()])
async def test_an_unresolvable_name_keeps_its_last_addresses(error, caplog):
    name = Name("10.0.0.1")
    async with following(DnsDiscovery("workers", 8300, 0.01, name)) as told:
        await eventually(lambda: told, "an answer")
        name.error = error
        count = name.count
        await eventually(lambda: name.count > count + 2, "failed resolutions")
        assert len(told) == 1
        assert caplog.text.count("cannot be resolved") == 1, "said once"
        name.error, name.answers = None, ["10.0.0.9"]
        await eventually(lambda: told[-1] == {"10.0.0.9:8300"}, "the change")


async def test_real_names_are_resolved():
    async with following(DnsDiscovery("127.0.0.1", 8300)) as told:
        await eventually(lambda: told == [{"127.0.0.1:8300"}], "an address")


async def test_a_union_reports_all_sources_and_follows_each():
    name = Name("10.0.0.1")
    union = UnionDiscovery([StaticDiscovery(["a:1"]), DnsDiscovery("workers", 2, 0.01, name)])
    async with following(union) as told:
        await eventually(lambda: told and told[-1] == {"a:1", "10.0.0.1:2"}, "both")
        name.answers = []
        await eventually(lambda: told[-1] == {"a:1"}, "one")


async def test_a_source_that_breaks_is_not_swallowed():
    name = Name()
    name.error = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        async for _ in UnionDiscovery([DnsDiscovery("workers", 2, 0.01, name)]).watch():
            pass


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (("a:1", "b:2"), StaticDiscovery),
        (("dns://workers:1",), DnsDiscovery),
        (("k8s://ml/workers:grpc",), KubernetesDiscovery),
        (("a:1", "dns://workers:1"), UnionDiscovery),
    ],
)
def test_sources_are_distinguished(values, kind):
    assert type(discovery_of(values, KubernetesApi(), "workers")) is kind


def test_a_service_of_kubernetes_needs_its_client(monkeypatch):
    for name in ("kubernetes", "kubernetes.aio.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        InvalidRequest,
        match=r'workers: k8s:// needs the package kubernetes: pip install "baton-inference\[kubernetes\]"',
    ):
        discovery_of(("k8s://ml/workers:grpc",), KubernetesApi(), "workers")
    assert type(discovery_of(("a:1",), KubernetesApi(), "workers")) is StaticDiscovery


@pytest.mark.parametrize(
    "value",
    ["a", "dns://a", "dns://", "k8s://ml:1", "k8s://ml/workers", "k8s:///workers:1", "k8s://a/b/c:1", "x:99999"],
)
def test_a_wrong_source_is_named(value):
    with pytest.raises(InvalidRequest) as error:
        check_sources([value], "workers")
    assert error.value.field == "workers"
    assert value in error.value.message or value.removeprefix("dns://") in error.value.message


def test_an_address_given_twice_is_an_error():
    with pytest.raises(InvalidRequest, match="twice"):
        check_sources(["a:1", "a:1"], "peers")


def test_an_endpoint_that_is_not_ready_is_followed_only_where_it_was():
    """A new endpoint may still start; a known one that drains, sleeps or restarts is not gone."""
    found = {"a:1": EndpointState.NOT_READY, "b:1": EndpointState.TERMINATING, "c:1": EndpointState.SERVING}
    assert followed((), found) == {"b:1", "c:1"}
    assert followed({"a:1", "d:1"}, found) == {"a:1", "b:1", "c:1"}


def test_of_two_states_the_one_that_takes_more_work_counts():
    parts = [{"a:1": EndpointState.TERMINATING}, {"a:1": EndpointState.SERVING}, {"a:1": EndpointState.NOT_READY}]
    assert merged(parts) == {"a:1": EndpointState.SERVING}


async def test_the_age_of_a_union_is_that_of_its_oldest_source():
    name = Name("10.0.0.1")
    union = UnionDiscovery([StaticDiscovery(["a:1"]), DnsDiscovery("workers", 2, 0.01, name)])
    async with following(union):
        await eventually(lambda: name.count > 1, "an answer")
        await eventually(lambda: union.age_seconds < 0.5, "it is young")
        name.error = OSError("no such name")
        await eventually(lambda: union.age_seconds > 0.6, "it grows")
