"""/metrics of inner services: plain, or over TLS to operators of the fleet alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.error
import urllib.request

import prometheus_client
import pytest
from support.network.tls_rig import der_of, make_certs, metrics_over_tls, replace_files, tls_of

from baton.rpc.errors import Unavailable
from baton.rpc.identity.identity import ENVOY, GATEWAY, KVSTORE, OPERATOR, ROUTER, WORKER
from baton.rpc.server.metrics_endpoint import metrics_endpoint
from baton.rpc.tls.credentials import Tls

REFUSED = (ssl.SSLError, ConnectionError, urllib.error.URLError)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def registry():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("answer", "Of a test.", registry=registry).set(42)
    return registry


@contextlib.contextmanager
def serving(listen, registry, tls=None):
    """The endpoint's port. Its threads serve, no loop."""
    endpoint = metrics_endpoint(listen, registry, tls)
    with asyncio.Runner() as runner:
        port = runner.run(endpoint.__aenter__())
        try:
            yield port
        finally:
            runner.run(endpoint.__aexit__(None, None, None))


@pytest.fixture
def endpoint(certificates, registry):
    """A router's, over TLS: its address, and its TLS."""
    tls = tls_of(certificates, ROUTER)
    with serving("127.0.0.1:0", registry, tls) as port:
        yield f"127.0.0.1:{port}", tls


def test_without_tls_it_is_plain_and_off_without_an_address(registry):
    with serving("", registry) as port:
        assert port == 0
    with serving("127.0.0.1:0", registry) as port:
        for path in ("/metrics", "/metrics?name[]=answer"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                assert b"answer 42.0" in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_an_address_in_use_is_named(registry):
    other = prometheus_client.CollectorRegistry()
    with serving("127.0.0.1:0", registry) as port, pytest.raises(Unavailable, match=f"metrics_listen=127.0.0.1:{port}"):
        serving(f"127.0.0.1:{port}", other).__enter__()


def test_over_tls_an_operator_of_the_fleet_reads_it(endpoint, certificates):
    address, tls = endpoint
    assert "answer 42.0" in metrics_over_tls(address, certificates, ROUTER)
    assert not tls.refusals


@pytest.mark.parametrize("reader", [GATEWAY, ROUTER, KVSTORE, WORKER, ENVOY])
def test_other_services_are_refused_and_counted(endpoint, certificates, reader):
    address, tls = endpoint
    with pytest.raises(REFUSED):
        metrics_over_tls(address, certificates, ROUTER, reader)
    assert tls.refusals == {"/metrics": 1}


def test_strangers_get_nothing(endpoint, certificates, tmp_path):
    address, _ = endpoint
    host, port = address.split(":")
    stranger = make_certs(tmp_path / "stranger")
    of_another_fleet = make_certs(tmp_path / "fleet", ca=certificates, fleet="other")
    with pytest.raises(REFUSED):
        metrics_over_tls(address, stranger, ROUTER)
    with pytest.raises(REFUSED):
        metrics_over_tls(address, of_another_fleet, ROUTER)  # the router is not of the fleet that it is asked as
    context = ssl._create_unverified_context()  # of who looks at no certificate and shows none
    with pytest.raises(REFUSED):
        urllib.request.urlopen(f"https://{address}/metrics", timeout=10, context=context)
    with pytest.raises(REFUSED):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)
    with socket.create_connection((host, int(port)), timeout=10) as garbage:
        garbage.sendall(b"\x16\x03\x01" + b"\xff" * 4096)
        garbage.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while garbage.recv(4096):
                pass
    assert "answer 42.0" in metrics_over_tls(address, certificates, ROUTER)


def test_an_operator_of_another_fleet_with_the_same_ca_is_refused(endpoint, certificates, tmp_path):
    address, tls = endpoint
    other = Tls(tls_of(make_certs(tmp_path / "fleet", ca=certificates, fleet="other"), OPERATOR).live.files, OPERATOR)
    context = other.ssl_context(server_side=False)
    context.check_hostname = False
    with pytest.raises(REFUSED):
        urllib.request.urlopen(f"https://{address}/metrics", timeout=20, context=context)
    assert tls.refusals == {"/metrics": 1}


def test_stalled_handshakes_delay_no_other_client(endpoint, certificates):
    address, _ = endpoint
    host, port = address.split(":")
    stalled = [socket.create_connection((host, int(port)), timeout=10) for _ in range(16)]
    try:
        assert "answer 42.0" in metrics_over_tls(address, certificates, ROUTER)
    finally:
        for one in stalled:
            one.close()


def test_new_files_are_shown_to_the_next_reader(certificates, registry, tmp_path):
    in_use, new = make_certs(tmp_path / "in-use"), tmp_path / "new"
    make_certs(new, ca=in_use)
    with serving("127.0.0.1:0", registry, tls_of(in_use, ROUTER)) as port:
        address = f"127.0.0.1:{port}"
        assert shown(address, in_use) == der_of(in_use, ROUTER)
        replace_files(in_use, new, ROUTER)
        assert shown(address, in_use) == der_of(new, ROUTER)
        (in_use / "router.crt").write_text("torn")
        assert shown(address, in_use) == der_of(new, ROUTER)


def shown(address, folder):
    tls = tls_of(folder, OPERATOR)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        tls.ssl_context(server_side=False).wrap_socket(plain, server_hostname=tls.host_name_of(ROUTER)) as connection,
    ):
        return connection.getpeercert(binary_form=True)
