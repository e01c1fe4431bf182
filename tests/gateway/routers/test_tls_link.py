"""The gateway's long-lived channel to a router under TLS: after a loss it shows the files that are there by then."""

from __future__ import annotations

import asyncio

import pytest
from support.network.tls_rig import make_certs, replace_files, tls_of

from baton.gateway.routers.link import NotPlaced, RouterLink
from baton.rpc.channel import Dial
from baton.rpc.identity.identity import GATEWAY, ROUTER
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import router_pb2, router_pb2_grpc

REQUEST = router_pb2.PlaceRequest(model="m")


class Router(router_pb2_grpc.RouterServiceServicer):
    """Places whatever it is asked, and remembers the certificate that was shown."""

    def __init__(self):
        self.shown = []

    async def PlaceStream(self, requests, context):  # noqa: N802
        self.shown.append(context.auth_context()["x509_pem_cert"][0])
        async for message in requests:
            answers = [router_pb2.PlaceAnswer(call_id=one.call_id, placed={}) for one in message.entries]
            yield router_pb2.PlaceStreamResponse(answers=answers)


def serving(router, folder, port=0):
    register = router_pb2_grpc.add_RouterServiceServicer_to_server
    services = [Service("baton.v1.RouterService", router, register)]
    return RpcServer(f"127.0.0.1:{port}", services, 0, tls=tls_of(folder, ROUTER))


async def placed(link):
    """Tries until the router is found again."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await link.place(REQUEST, 5)
            except NotPlaced:
                await asyncio.sleep(0.05)


async def test_a_lost_router_is_shown_the_files_of_now(tmp_path):
    folder, router = make_certs(tmp_path / "in-use"), Router()
    old = (folder / "gateway.crt").read_bytes()
    async with serving(router, folder) as server:
        link = RouterLink(f"127.0.0.1:{server.port}", Dial(tls_of(folder, GATEWAY), ROUTER))
        await placed(link)
        replace_files(folder, make_certs(tmp_path / "new", folder), GATEWAY)
        await placed(link)
        assert router.shown == [old]
    async with serving(router, folder, server.port):
        await placed(link)
        assert router.shown == [old, (folder / "gateway.crt").read_bytes()]
        assert router.shown[0] != router.shown[1]
        await link.close()


async def test_a_gateway_with_a_workers_certificate_gets_that_error(tmp_path):
    folder, router = make_certs(tmp_path), Router()
    async with serving(router, folder) as server:
        link = RouterLink(f"127.0.0.1:{server.port}", Dial(tls_of(folder, "worker"), ROUTER))
        with pytest.raises(
            NotPlaced, match="of spiffe://baton/dev/worker/default; accepted: spiffe://baton/dev/gateway"
        ):
            await link.place(REQUEST, 5)
        assert router.shown == []
        await link.close()
