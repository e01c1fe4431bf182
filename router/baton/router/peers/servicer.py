"""Serves baton.v1.RouterPeerService: sends this router's news to other routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.router.peers.news import PeerNews
from baton.rpc.errors import Unavailable
from baton.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAME = "baton.v1.RouterPeerService"
_GATHER_SECONDS = 0.02  # news wait so long for others
_BEAT_SECONDS = 0.25

Context = grpc.aio.ServicerContext[Any, Any]


class RouterPeerServicer(router_pb2_grpc.RouterPeerServiceServicer):
    """The gRPC side of PeerNews."""

    def __init__(self, news: PeerNews) -> None:
        self._news = news
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all streams."""
        self._closing.set()

    async def Share(  # noqa: N802
        self, request: router_pb2.ShareRequest, context: Context
    ) -> AsyncIterator[router_pb2.ShareResponse]:
        woken = asyncio.Event()
        reader = self._news.join(woken.set)
        try:
            for part in self._news.snapshot():
                yield part
            while not self._closing.is_set():
                if not reader.has_news:
                    await _either(woken, _BEAT_SECONDS)
                if reader.has_news:
                    await asyncio.sleep(_GATHER_SECONDS)
                woken.clear()
                if reader.lags:
                    raise Unavailable("the reader is too slow; it must open a new stream")
                yield self._news.take(reader)
        finally:
            self._news.leave(reader)


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
