import socket

import pytest

from baton.services import ports


def test_free_ports_are_different_and_free():
    found = ports.free_ports(8)
    assert len(set(found)) == 8
    assert all(ports.why_unusable(f"127.0.0.1:{port}") is None for port in found)


def test_reserved_ports_are_left_out():
    left = range(15000, 15010)
    found = ports.free_ports(5, besides=set(range(15000, 20000)) - set(left))
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
