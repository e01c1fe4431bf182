"""The gateway's REST server with scripted vectors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import numpy as np
from support.gateway.rest_harness import Rest, rest_side

from baton.gateway.core import PooledText, PoolRequest
from baton.gateway.models.text_prompts import TextPrompts
from baton.v1 import types_pb2

WIDTH = 16


class FakePooler:
    """Implements TextPooler: vectors follow from the token ids. Records requests."""

    def __init__(self) -> None:
        self.requests: list[PoolRequest] = []
        self.hold: asyncio.Event | None = None  # pool() waits for it
        self.num_cancelled = 0

    async def pool(self, request: PoolRequest) -> list[PooledText]:
        self.requests.append(request)
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [PooledText(vector_of(ids).astype("<f4").tobytes(), 1, 0) for ids in request.texts]


def vector_of(token_ids: object) -> np.ndarray:
    seed = np.array(token_ids, np.uint32)
    return np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)


@contextlib.asynccontextmanager
async def vectors_side(
    pooler: FakePooler, prompts: Mapping[str, str] | None = None, default: str = "", max_model_len: int = 64
) -> AsyncIterator[Rest]:
    """A model that embeds, with these prompts."""
    async with rest_side(pooler=pooler) as rest:
        model = rest.catalog.get("")
        model.text_prompts = TextPrompts(prompts or {}, default)
        info = model.require_info()
        info.max_model_len = max_model_len
        tasks = (types_pb2.POOLING_TASK_EMBED, types_pb2.POOLING_TASK_TOKEN_EMBED)
        info.pooler.CopyFrom(types_pb2.PoolerInfo(tasks=tasks, width=WIDTH, normalized=True))
        yield rest
