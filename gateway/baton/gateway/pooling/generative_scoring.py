"""POST /generative_scoring: scores items by the probabilities that a generating model gives the next token."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from baton.gateway.core import Delta, GenerationRequest, Generator, Usage
from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.validation import check_context
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import check_generates
from baton.gateway.pooling.texts import check_count
from baton.gateway.pooling.vectors import VectorService
from baton.gateway.pooling.work import result_for
from baton.gateway.schemas.generative_scoring import GenerativeScoringRequest
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InternalError, InvalidRequest, ServiceError
from baton.v1 import types_pb2

_AT_ONCE = 32  # generations of one request
_MAX_TOKENS = 320 << 10  # of all prompts together: 0.4 s of work. A single one may fill the context


class NextTokenSink:
    """Implements Sink for a generation of one token: keeps the log-probabilities of the labels."""

    writable = True

    def __init__(self) -> None:
        self.logprobs: Sequence[float] = ()
        self.cached_tokens = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: Delta) -> None:
        if delta.logprobs:
            self.logprobs = [one.logprob for one in delta.logprobs[0].top]

    def on_done(self, usage: Usage) -> None:
        self.cached_tokens = usage.cached_tokens
        if not self._ended.done():  # as it is if the request was aborted
            self._ended.set_result(None)

    def on_error(self, error: ServiceError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def wait(self) -> None:
        """Waits for the end. Raises the generation's error."""
        await self._ended


class GenerativeScoring:
    """Handles POST /generative_scoring."""

    def __init__(self, service: VectorService) -> None:
        self._serving = service.serving
        self._decoder = service.decoder(GenerativeScoringRequest)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections():
            request, model = await serving.bodies.run(
                lambda: self._check(exchange), exchange.num_body_bytes, exchange.owner
            )
            if request.request_id:
                exchange.request_id = request.request_id
            admitted = serving.admission.admit(exchange.request_id, 1)
            exchange.on_end.append(lambda _: admitted.end())
            body = await result_for(exchange, self._run(exchange, admitted.request_id, request, model))
        if body is not None:
            exchange.respond(200, orjson.dumps(body))

    def _check(self, exchange: Exchange) -> tuple[GenerativeScoringRequest, ServedModel]:
        request = self._decoder.read(exchange)
        model = self._serving.model(exchange, request.model)
        check_generates(model.name, model.require_info())
        check_count(len(request.items), "items")
        model.check_token_ids(request.label_token_ids, "label_token_ids")
        if len(set(request.label_token_ids)) < len(request.label_token_ids):
            raise InvalidRequest("label_token_ids has a token twice; give each once", field="label_token_ids")
        return request, model

    async def _run(
        self, exchange: Exchange, request_id: str, request: GenerativeScoringRequest, model: ServedModel
    ) -> dict[str, Any]:
        """Returns the answer. Raises Cancelled if another request aborted this one."""
        scoring = self._score(exchange, request_id, request, model)
        return await self._serving.running.run(scoring, exchange.identity.tenant.name, exchange.request_id)

    async def _score(
        self, exchange: Exchange, request_id: str, request: GenerativeScoringRequest, model: ServedModel
    ) -> dict[str, Any]:
        serving = self._serving
        prompts = await _prompts_of(model, request)
        generations = []
        for index, prompt in enumerate(prompts):
            if index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            generations.append(_generation(serving, exchange, f"{request_id}-{index}", request, model, prompt))
        meter = serving.meter(exchange, 1)
        generator = serving.admitted(exchange, serving.generator, generations)
        sinks = await _run_all(generator, generations)
        num_tokens = sum(map(len, prompts))
        meter.on_done(num_tokens, len(sinks), sum(sink.cached_tokens for sink in sinks))
        softmax = request.apply_softmax is not False
        data = [
            {"index": index, "object": "score", "score": score_of(sink.logprobs, softmax)}
            for index, sink in enumerate(sinks)
        ]
        return {
            "id": f"generative-scoring-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens + len(sinks)},
        }


def score_of(logprobs: Sequence[float], softmax: bool) -> float:
    """Returns the first label's probability: among the labels, or among all tokens."""
    if not softmax:
        return math.exp(logprobs[0])
    most = max(logprobs)
    if most == -math.inf:
        return 1 / len(logprobs)
    weights = [math.exp(one - most) for one in logprobs]
    return weights[0] / sum(weights)


async def _prompts_of(model: ServedModel, request: GenerativeScoringRequest) -> list[list[int]]:
    """Returns the tokens of all prompts. Raises InvalidRequest for too many, before the rest is encoded."""
    most = max(_MAX_TOKENS, model.require_info().max_model_len)
    prompts: list[list[int]] = []
    num_tokens = 0
    for index in range(len(request.items)):
        prompts.append(await _prompt_of(model, request, index))
        num_tokens += len(prompts[-1])
        if num_tokens > most:
            message = f"query and items have over {most} tokens together, a query for each item; send fewer"
            raise InvalidRequest(message, field="items")
    return prompts


async def _prompt_of(model: ServedModel, request: GenerativeScoringRequest, index: int) -> list[int]:
    """Returns the tokens of the query and an item, in their order. Two texts are encoded as one."""
    await asyncio.sleep(0)
    field = f"items.{index}"
    info, special = model.require_info(), request.add_special_tokens is not False
    parts = [("query", request.query), (field, request.items[index])]
    if request.item_first:
        parts.reverse()
    texts = [part for _, part in parts if isinstance(part, str)]
    token_ids: list[int] = []
    try:
        if len(texts) == len(parts):
            token_ids = await model.encode_text("".join(texts), add_special_tokens=special)
        else:
            for number, (name, part) in enumerate(parts):
                field = name
                if isinstance(part, str):
                    token_ids += await model.encode_text(part, add_special_tokens=special and not number)
                else:
                    check_prompt_ids(part, info.vocab_size)
                    token_ids += part
            field = f"items.{index}"
        if not token_ids:
            raise InvalidRequest(f"query and {field} are both empty; give at least one token")
        check_context(len(token_ids), info.max_model_len, field)
    except (ContextTooLong, InvalidRequest) as error:
        error.field = field
        raise
    return token_ids


def _generation(
    serving: ServingContext,
    exchange: Exchange,
    request_id: str,
    request: GenerativeScoringRequest,
    model: ServedModel,
    prompt: list[int],
) -> GenerationRequest:
    sampling = types_pb2.SamplingParams(
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=request.label_token_ids,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
    return GenerationRequest(
        request_id=request_id,
        model=model.name,
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=types_pb2.StopConditions(max_tokens=1),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_ms=int(serving.config.request_timeout * 1000),
        traceparent=exchange.headers.get(b"traceparent", b"").decode("latin-1"),
    )


async def _run_all(generator: Generator, generations: Sequence[GenerationRequest]) -> list[NextTokenSink]:
    """Runs the generations, some at once. Raises the first error, after the rest has ended."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def run(request: GenerationRequest, sink: NextTokenSink) -> None:
        async with limit:
            generation = await generator.start(request, sink)
            try:
                await sink.wait()
            finally:
                generation.abort()
        if not sink.logprobs:
            raise InternalError(f"the generation {request.request_id} has no log-probabilities")

    sinks = [NextTokenSink() for _ in generations]
    tasks = [asyncio.ensure_future(run(request, sink)) for request, sink in zip(generations, sinks, strict=True)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, ServiceError):
                await task
        raise
    return sinks
