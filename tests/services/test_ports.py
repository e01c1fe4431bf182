import socket

import pytest

from baton.services import ports


@pytest.fixture
def held():
    with ports.HeldPorts() as held:
        yield held


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_held_ports_are_different_and_free_for_services(held, host):
    found = held.choose(8, host)
    assert len(set(found)) == 8
    assert all(ports.why_unusable(f"{host}:{port}") is None for port in found)
    for port in found:
        with socket.create_server((host, port)), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_nobody_else_chooses_a_port_that_is_held(held):
    besides = set(range(15000, 20000)) - set(range(15000, 15020))
    first = held.choose(10, besides=besides)
    with ports.HeldPorts() as other:
        assert not set(other.choose(5, besides=besides)) & set(first)
        with pytest.raises(OSError, match="no 20 free ports"):
            other.choose(20, besides=besides)


def test_gateways_of_one_address_share_a_held_port(held):
    (port,) = held.choose(1)
    servers = [socket.create_server(("127.0.0.1", port), reuse_port=True) for _ in range(2)]
    for server in servers:
        server.close()


def test_reserved_ports_are_left_out(held):
    left = range(15000, 15010)
    found = held.choose(5, besides=set(range(15000, 20000)) - set(left))
    assert len(set(found)) == 5
    assert set(found) <= set(left)


def test_a_port_that_is_listened_on_is_named_as_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert ports.why_unusable(f"127.0.0.1:{taken.getsockname()[1]}") == "the port is in use"


@pytest.mark.parametrize("address", ["", "8000", "localhost:", ":8000", "localhost:http", "localhost:70000"])
def test_invalid_addresses_are_reported(address):
    assert "is not host:port" in (ports.why_unusable(address) or "")


def test_a_host_of_another_machine_cannot_be_listened_on():
    assert ports.why_unusable("192.0.2.1:8000")
