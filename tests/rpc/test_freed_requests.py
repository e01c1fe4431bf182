"""A call that fails holds neither its request nor the frames that it failed in, before any garbage collection."""

from __future__ import annotations

import gc
import logging
import weakref

import grpc
import pytest
from support.fleet.kvstore_node import eventually

from baton.rpc.errors import InvalidRequest
from baton.rpc.server.server import RpcServer, Service

NAME = "test.Refusing"


class Text:
    """What a request, or a frame, holds."""


class Refusing:
    """Methods that fail; all texts that they made are in `texts`."""

    def __init__(self):
        self.texts = []

    def read(self, data):
        return self._made()

    async def answer(self, request, context):
        self._refuse()

    async def stream(self, request, context):
        yield b"first"
        self._refuse()

    async def break_down(self, request, context):
        text = self._made()
        raise KeyError(text)

    def _refuse(self):
        text = self._made()
        try:
            raise ValueError(text)
        except ValueError:
            raise InvalidRequest("no") from None

    def _made(self):
        text = Text()
        self.texts.append(weakref.ref(text))
        return text


def register(servicer, server):
    read = {"request_deserializer": servicer.read}
    methods = {
        "Answer": grpc.unary_unary_rpc_method_handler(servicer.answer, **read),
        "Stream": grpc.unary_stream_rpc_method_handler(servicer.stream, **read),
        "BreakDown": grpc.unary_unary_rpc_method_handler(servicer.break_down, **read),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("method", ["Answer", "Stream", "BreakDown"])
async def test_a_call_that_fails_is_freed_as_it_ends(no_collector, method, monkeypatch):
    monkeypatch.setattr(logging.getLogger("baton.rpc.server.server"), "disabled", True)  # pytest keeps what is logged
    servicer = Refusing()
    service = Service(NAME, servicer, register)
    async with RpcServer("127.0.0.1:0", [service]) as server, grpc.aio.insecure_channel(address(server)) as channel:
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in channel.unary_stream(f"/{NAME}/{method}")(b"x", timeout=5):
                    pass
        await eventually(lambda: all(text() is None for text in servicer.texts), "all are freed")
        assert len(servicer.texts) == 10


def address(server):
    return f"127.0.0.1:{server.port}"
