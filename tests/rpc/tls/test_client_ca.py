"""Edges whose clients must present a certificate: over TLS sockets and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import pytest
from support.network.tls_rig import files_of, make_certs, replace_files

from baton.rpc.errors import InvalidRequest
from baton.rpc.server.server import RpcServer
from baton.rpc.tls.credentials import EdgeTls
from baton.rpc.tls.files import edge_files


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_certs(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Of another CA."""
    return make_certs(tmp_path_factory.mktemp("other"))


def edge_of(folder, client_ca):
    edge = files_of(folder, "edge")
    return EdgeTls(edge_files(edge.certificate, edge.key, "rest_tls", str(client_ca)))


def client_context(folder, own=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.crt")
    if own is not None:
        files = files_of(own, "operator")
        context.load_cert_chain(files.certificate, files.key)
    return context


def shake_hands(server, client):
    """Raises the server's SSLError if it refuses the client."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(8):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def test_a_client_presents_a_certificate_of_the_ca(good, other):
    context = edge_of(good, good / "ca.crt").ssl_context()
    shake_hands(context, client_context(good, own=good))
    with pytest.raises(ssl.SSLError, match="did not return a certificate"):
        shake_hands(context, client_context(good))
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(context, client_context(good, own=other))


def test_another_client_ca_is_used_for_new_connections(good, other, tmp_path):
    replace_files(tmp_path, good, "edge")
    (tmp_path / "clients.crt").write_bytes((good / "ca.crt").read_bytes())
    context = edge_of(tmp_path, tmp_path / "clients.crt").ssl_context()
    shake_hands(context, client_context(good, own=good))
    (tmp_path / "clients.crt").write_bytes((other / "ca.crt").read_bytes())
    shake_hands(context, client_context(good, own=other))
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(context, client_context(good, own=good))


def connect(port, context, session=None):
    """Returns the session of a connection, and whether it was resumed. Raises SSLError, OSError if it is refused."""
    with (
        socket.create_connection(("localhost", port), timeout=20) as plain,
        context.wrap_socket(plain, session=session) as connection,
    ):
        if not connection.recv(1):
            raise ConnectionResetError("closed by the server")
        return connection.session, connection.session_reused


@contextlib.asynccontextmanager
async def listening(kind, edge):
    """Yields the port of an edge."""
    if kind == "grpc":
        async with RpcServer("127.0.0.1:0", [], tls=edge) as server:
            yield server.port
        return

    async def greet(reader, writer):
        writer.write(b"x")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=edge.ssl_context())
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("kind", ["rest", "grpc"])
async def test_sessions_of_another_client_ca_are_not_resumed(good, other, tmp_path, kind):
    ca = tmp_path / "clients.crt"
    ca.write_bytes((good / "ca.crt").read_bytes())
    context = client_context(good, own=good)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    async with listening(kind, edge_of(good, ca)) as port:
        session, _ = await asyncio.to_thread(connect, port, context)
        assert (await asyncio.to_thread(connect, port, context, session))[1]
        os.replace(shutil.copy(other / "ca.crt", tmp_path / "new"), ca)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(connect, port, context, session)
        os.replace(shutil.copy(good / "ca.crt", tmp_path / "new"), ca)
        assert not (await asyncio.to_thread(connect, port, context, session))[1]


async def test_grpc_clients_present_one_too(good):
    edge = edge_of(good, good / "ca.crt")
    async with RpcServer("127.0.0.1:0", [], tls=edge) as server:
        files = files_of(good, "operator")
        paths = (good / "ca.crt", Path(files.key), Path(files.certificate))
        ca, key, certificate = (path.read_bytes() for path in paths)
        for credentials, accepted in (
            (grpc.ssl_channel_credentials(ca, key, certificate), True),
            (grpc.ssl_channel_credentials(ca), False),
        ):
            async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                if accepted:
                    await check(b"", timeout=10)
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await check(b"", timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_wrong_settings_are_named(good, tmp_path):
    with pytest.raises(InvalidRequest, match="rest_tls_client_ca given without rest_tls_certificate"):
        edge_files("", "", "rest_tls", "ca.crt")
    with pytest.raises(InvalidRequest, match=r"rest_tls_client_ca=.*missing cannot be read"):
        edge_of(good, tmp_path / "missing")
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(InvalidRequest, match=r"rest_tls_client_ca=.*text cannot be used"):
        edge_of(good, tmp_path / "text")


def test_without_a_client_ca_none_is_presented(good):
    files = files_of(good, "edge")
    edge = EdgeTls(dataclasses.replace(edge_files(files.certificate, files.key, "rest_tls")))
    shake_hands(edge.ssl_context(), client_context(good))
