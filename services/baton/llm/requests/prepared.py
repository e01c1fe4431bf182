"""Sampling parameters as the gateway's generation takes them: converted once, used for many prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.gateway.core import Generation, GenerationRequest
from baton.gateway.fields.adopted import requested_constraint
from baton.gateway.fields.sampling import sampling_of, stop_of
from baton.gateway.fields.validation import (
    check_context,
    check_fields,
    check_for_model,
    check_logprob_token_ids,
    check_logprobs,
    expand_logprobs,
)
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.sampling import seed_of_choice
from baton.gateway.models.served import ServedModel
from baton.gateway.parsing.tool import ToolUse
from baton.gateway.serving.reasoning_limit import limit_reasoning
from baton.llm.engine.local_engine import LocalEngine
from baton.llm.parameters.names import InvalidParameter
from baton.llm.parameters.sampling_params import RequestOutputKind, SamplingParams
from baton.llm.requests.prompts import Chat, Prompt
from baton.llm.results.collector import Collector
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_UINT64 = 2**64 - 1


class Source(Protocol):
    """A prompt or a chat."""

    @property
    def cache_salt(self) -> str:
        """Separates the prefix cache."""

    async def encode(self, model: ServedModel) -> tuple[str | None, list[int]]:
        """Returns the text, if there is one, and the token ids."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Sampling parameters after their checks, as the engine takes them."""

    sampling: types_pb2.SamplingParams
    stop: types_pb2.StopConditions
    requested: RequestedConstraint | None
    n: int
    kind: RequestOutputKind
    detokenize: bool
    skip_special_tokens: bool
    ranked: bool
    thinking_token_budget: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a call."""

    index: int  # in the call
    request_id: str
    number: int  # of the engine's requests; requests without a seed draw theirs from it
    source: Source
    prepared: Prepared
    priority: int = 0
    adapter: str = ""  # its name; empty: the model itself


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request's prompt as tokens."""

    text: str | None  # None: the prompt was given as tokens
    token_ids: list[int]
    received: float  # seconds of time.perf_counter


def prepare(params: SamplingParams, engine: LocalEngine, kind: RequestOutputKind | None = None) -> Prepared:
    """Converts parameters. `kind` replaces theirs. Raises InvalidRequest."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(
            f"sampling_params is of type {type(params).__name__}; give SamplingParams", field="sampling_params"
        )
    fields, limits = params.request_fields(), engine.arguments.limits
    check_fields(fields, limits.max_n, limits.max_logprobs)
    if fields.logprobs is not None:
        check_logprobs("logprobs", fields.logprobs, limits.max_logprobs)
    check_logprob_token_ids(fields, fields.logprobs, "logprobs")
    check_for_model(fields, engine.info)
    expand_logprobs(fields, engine.info.vocab_size)
    return Prepared(
        sampling=sampling_of(fields, fields.logprobs),
        stop=stop_of(fields, fields.max_tokens),
        requested=requested_constraint(fields),
        n=fields.n or 1,
        kind=kind or params.output_kind,
        detokenize=params.detokenize,
        skip_special_tokens=params.skip_special_tokens,
        ranked=not params.logprob_token_ids,
        thinking_token_budget=params.thinking_token_budget,
    )


async def encode(engine: LocalEngine, work: Work) -> Encoded:
    """Returns the prompt of one request as tokens. Raises a ServiceError."""
    received = time.perf_counter()
    text, token_ids = await work.source.encode(engine.model)
    return Encoded(text, token_ids, received)


async def encode_each(engine: LocalEngine, works: Sequence[Work]) -> list[Encoded | BaseException]:
    """Returns the prompts of requests as tokens, or why one has none: short texts together, others one by one."""
    received = time.perf_counter()
    texts: dict[int, Prompt] = {}
    others: dict[int, Awaitable[tuple[str | None, list[int]]]] = {}
    found: dict[int, Encoded | BaseException] = {}
    for place, work in enumerate(works):
        source = work.source
        if not isinstance(source, Prompt) or (source.token_ids is None and source.is_long):
            others[place] = source.encode(engine.model)
        elif source.token_ids is None:
            texts[place] = source
        else:
            found[place] = _encoded(engine, source.text, source.token_ids, received)
    for added in (True, False):
        chosen = {place: prompt for place, prompt in texts.items() if prompt.add_special_tokens is added}
        found.update(zip(chosen, await _encode_texts(engine, list(chosen.values()), added, received), strict=True))
    results = await asyncio.gather(*others.values(), return_exceptions=True)
    for place, result in zip(others, results, strict=True):
        found[place] = result if isinstance(result, BaseException) else Encoded(*result, received)
    return [found[place] for place in range(len(works))]


async def _encode_texts(
    engine: LocalEngine, prompts: Sequence[Prompt], add_special_tokens: bool, received: float
) -> list[Encoded | BaseException]:
    texts = [prompt.text or "" for prompt in prompts]
    if not texts:
        return []
    try:
        encoded = await engine.model.encode_texts(texts, add_special_tokens=add_special_tokens)
    except InvalidRequest as error:
        if len(texts) == 1:
            return [error]
        each = [_encode_texts(engine, [prompt], add_special_tokens, received) for prompt in prompts]  # names the wrong
        return [one for (one,) in await asyncio.gather(*each)]
    return [_encoded(engine, text, token_ids, received) for text, token_ids in zip(texts, encoded, strict=True)]


def _encoded(engine: LocalEngine, text: str | None, token_ids: list[int], received: float) -> Encoded | BaseException:
    try:
        check_context(len(token_ids), engine.model.require_info().max_model_len, "prompt")
    except InvalidRequest as error:
        return error
    return Encoded(text, token_ids, received)


async def start(
    engine: LocalEngine, work: Work, encoded: Encoded, on_change: Callable[[Collector], None]
) -> tuple[Collector, Generation]:
    """Submits one request. `on_change` is called as the output grows. Raises a ServiceError."""
    prepared, token_ids = work.prepared, encoded.token_ids
    meter = AnswerMeter(engine.metrics, encoded.received, prepared.n)
    collector = Collector(
        work.request_id,
        encoded.text,
        token_ids,
        prepared.n,
        prepared.kind,
        prepared.ranked,
        meter,
        lambda: on_change(collector),
    )
    request = GenerationRequest(
        request_id=work.request_id,
        model=work.adapter or engine.model.name,
        prompt_token_ids=token_ids,
        sampling=_sampling(engine, work, token_ids),
        stop=prepared.stop,
        seed=_seed(engine, work),
        n=prepared.n,
        priority=work.priority,
        cache_salt=work.source.cache_salt,
        detokenize=prepared.detokenize,
        skip_special_tokens=prepared.skip_special_tokens,
        constraint=_constraint(engine, work, token_ids),
        constraint_field="" if prepared.requested is None else prepared.requested.field,
        whole=prepared.kind is RequestOutputKind.FINAL_ONLY,
    )
    return collector, await engine.generator.start(request, collector)


def _sampling(engine: LocalEngine, work: Work, token_ids: list[int]) -> types_pb2.SamplingParams:
    prepared, budget = work.prepared, work.prepared.thinking_token_budget
    if budget is None:
        return prepared.sampling
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(prepared.sampling)
    limit_reasoning(sampling, engine.model, token_ids, budget)
    return sampling


def _seed(engine: LocalEngine, work: Work) -> int | None:
    """Returns the seed of a request that has none, drawn from that of the engine; None: it stays as it is."""
    seed = engine.arguments.seed
    if seed is None or work.prepared.sampling.HasField("seed"):
        return None
    return seed_of_choice(seed & _UINT64, work.number + 1)


def _constraint(engine: LocalEngine, work: Work, token_ids: list[int]) -> types_pb2.Constraint | None:
    """Returns the constraint. A model that reasons first, in a chat, follows it after its reasoning."""
    requested = work.prepared.requested
    if requested is None or not isinstance(work.source, Chat):
        return None if requested is None else requested.constraint
    return engine.model.constraint(requested.constraint, requested.field, ToolUse(), token_ids)
