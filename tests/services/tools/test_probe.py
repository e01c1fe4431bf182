"""`baton probe`, which Kubernetes' probes run when services use mTLS."""

from __future__ import annotations

import asyncio

import pytest
from support.network.tls_rig import files_of, make_certs, tls_of

from baton.rpc.identity.identity import ROUTER
from baton.rpc.server.server import RpcServer
from baton.services import cli
from baton.services.tools import probe


async def _exit_code(*flags) -> int:
    return await asyncio.to_thread(cli.main, ["probe", *flags], {})


async def test_a_server_is_alive_before_it_is_ready():
    async with RpcServer("127.0.0.1:0", [], 0) as server:
        address = f"127.0.0.1:{server.port}"
        assert await _exit_code("--address", address, "--service", "liveness") == probe.EXIT_SERVING
        assert await _exit_code("--address", address) == probe.EXIT_NOT_SERVING
        await server.set_ready(True)
        assert await _exit_code("--address", address) == probe.EXIT_SERVING
        await server.set_ready(False)
        assert await _exit_code("--address", address) == probe.EXIT_NOT_SERVING
        assert await _exit_code("--address", address, "--service", "liveness") == probe.EXIT_SERVING


async def test_it_shows_the_services_own_certificate(tmp_path):
    files = files_of(make_certs(tmp_path), ROUTER)
    shown = ("--of", ROUTER, "--tls-certificate", files.certificate, "--tls-key", files.key, "--tls-ca", files.ca)
    async with RpcServer("127.0.0.1:0", [], 0, tls=tls_of(tmp_path, ROUTER)) as server:
        address = f"127.0.0.1:{server.port}"
        await server.set_ready(True)
        assert await _exit_code("--address", address, *shown) == probe.EXIT_SERVING
        assert await _exit_code("--address", address) == probe.EXIT_NOT_SERVING


async def test_errors_are_reported(capsys, tmp_path):
    assert await _exit_code("--address", "127.0.0.1:1") == probe.EXIT_NOT_SERVING
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err
    async with RpcServer("127.0.0.1:0", [], 0) as server:
        address = f"127.0.0.1:{server.port}"
        assert await _exit_code("--address", address, "--service", "livenes") == probe.EXIT_NOT_SERVING
        assert "NOT_FOUND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--address"),
        (("--address", "nowhere"), "nowhere"),
        (("--address", "127.0.0.1:1", "--of", "nobody"), "nobody"),
        (("--address", "127.0.0.1:1", "--tls-key", "k"), "tls"),
        (("--address", "127.0.0.1:1", "--tls-certificate", "c", "--tls-key", "k", "--tls-ca", "a"), "of"),
        (
            (
                "--address",
                "127.0.0.1:1",
                "--of",
                ROUTER,
                "--tls-certificate",
                "/no",
                "--tls-key",
                "/no",
                "--tls-ca",
                "/no",
            ),
            "/no",
        ),
    ],
)
def test_a_wrong_setting_is_named(flags, named, capsys):
    assert cli.main(["probe", *flags], {}) == probe.EXIT_MISCONFIGURED
    assert named in capsys.readouterr().err
