"""Runs texts on workers for their vectors: in groups, each placed on one worker, and moved when their worker fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton.gateway.core import PooledText, PoolRequest
from baton.gateway.generation.hashed_prompt import namespace_of
from baton.gateway.generation.pooled_group import PooledGroup, PoolProgress
from baton.gateway.generation.running import GenerationServices
from baton.gateway.models.served import ModelCatalog
from baton.rpc.errors import DeadlineExceeded
from baton.v1 import types_pb2

GROUP_TEXTS = 32
GROUP_TOKENS = 16 << 10
MAX_GROUPS = 4  # of one request, at once


@dataclass(frozen=True, slots=True)
class WorkerPooler:
    """Implements TextPooler over routers and workers."""

    catalog: ModelCatalog
    services: GenerationServices

    async def pool(self, request: PoolRequest) -> list[PooledText]:
        model = self.catalog.get(request.model)
        info, adapter = model.require_info(), model.adapter
        namespace = namespace_of(request, info, adapter)
        progress = PoolProgress([None] * len(request.texts))
        groups = [
            PooledGroup(
                replace(request, model=model.base_name),
                indices,
                namespace,
                info.block_size,
                self.services,
                progress,
                info.max_model_len,
                adapter,
            )
            for indices in groups_of([len(text) for text in request.texts])
        ]
        try:
            async with asyncio.timeout(request.timeout_ms / 1000 or None):
                await (groups[0].run() if len(groups) == 1 else _run_all(groups))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the vectors were not computed within {request.timeout_ms} ms", phase=types_pb2.PHASE_PREFILL
            ) from error
        return [result for result in progress.results if result is not None]


def groups_of(num_tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of texts that are placed together, in order, from the texts' sizes."""
    group: list[int] = []
    total = 0
    for index, count in enumerate(num_tokens):
        if group and (len(group) == GROUP_TEXTS or total + count > GROUP_TOKENS):
            yield group
            group, total = [], 0
        group.append(index)
        total += count
    if group:
        yield group


async def _run_all(groups: Sequence[PooledGroup]) -> None:
    """Runs some groups at once. Raises the first error, after the rest is cancelled."""
    limit = asyncio.Semaphore(MAX_GROUPS)

    async def run(group: PooledGroup) -> None:
        async with limit:
            await group.run()

    tasks = [asyncio.create_task(run(group)) for group in groups]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
