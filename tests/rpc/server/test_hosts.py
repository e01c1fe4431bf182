"""Which Host headers a server without authentication accepts, and that loopback /metrics holds to it."""

import asyncio
import http.client

import prometheus_client
import pytest

from baton.rpc.errors import InvalidRequest
from baton.rpc.server.hosts import HostRule, check_allowed_hosts
from baton.rpc.server.metrics_endpoint import metrics_endpoint

ALWAYS = (
    "localhost", "LOCALHOST:8000", "localhost.:8000", "app.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000",
    "[::1]", "10.0.0.7:8000", "[fd00::1]",
)  # fmt: skip
NEVER = (
    "", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
    "evil.example@localhost", "localhost:8000:1", "localhost evil.example", "localhost,evil.example", "[evil]", "[::1",
    "::1.evil", "0x7f000001", "2130706433", "127.1", "localhost/", "localhost\x00", "l\u00f6calhost", "x" * 10_000,
)  # fmt: skip


@pytest.mark.parametrize("host", ALWAYS)
def test_addresses_and_names_of_this_machine_are_accepted(host):
    assert HostRule().accepts(host.encode())


@pytest.mark.parametrize("host", NEVER)
def test_other_names_are_refused_whatever_is_allowed_beside_them(host):
    assert not HostRule(["gateway.example", "*.inside.example"]).accepts(host.encode("latin-1"))


def test_allowed_names_are_accepted_with_any_port_and_subdomains_only_where_they_are_asked_for():
    rule = HostRule(["gateway.example", "*.inside.example"])
    for host in (b"gateway.example", b"Gateway.Example:99", b"a.inside.example", b"a.b.inside.example:1"):
        assert rule.accepts(host)
    for host in (b"a.gateway.example", b"inside.example", b"xinside.example"):
        assert not rule.accepts(host)
    assert HostRule(["*"]).accepts(b"anything.example")


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "A.example", "*.*", "a.*", "", "*.", "a b"])
def test_a_wrong_entry_is_named(host):
    with pytest.raises(InvalidRequest, match="allowed_hosts") as raised:
        check_allowed_hosts([host])
    assert repr(host) in raised.value.message
    check_allowed_hosts(["a.example", "*.a.example", "*", "service_name"])


def test_metrics_on_loopback_are_not_read_under_another_name():
    registry = prometheus_client.CollectorRegistry()
    endpoint = metrics_endpoint("127.0.0.1:0", registry)
    with asyncio.Runner() as runner:
        port = runner.run(endpoint.__aenter__())
        try:
            statuses = {host: _status(port, host) for host in ("evil.example", "localhost", f"127.0.0.1:{port}")}
        finally:
            runner.run(endpoint.__aexit__(None, None, None))
    assert list(statuses.values()) == [403, 200, 200]


def _status(port, host):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"host": host})
        return connection.getresponse().status
    finally:
        connection.close()
