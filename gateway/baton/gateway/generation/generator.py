"""Starts generations: validates a request, applies defaults, hashes its blocks and runs it on workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from baton.gateway.core import Generation, GenerationRequest, Sink
from baton.gateway.generation.hashed_prompt import hash_prompt
from baton.gateway.generation.output.choice import Choice
from baton.gateway.generation.output.logprobs import logprob_namer
from baton.gateway.generation.output.prompt_logprobs import PromptLogprobParts
from baton.gateway.generation.output.repetition import detector_of
from baton.gateway.generation.output.stop_strings import StopStrings
from baton.gateway.generation.pooler import WorkerPooler
from baton.gateway.generation.running import GenerationServices, RunningGeneration
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.sampling import RequestLimits, ResolvedRequest, Resolver
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.models.tasks import check_generates
from baton.gateway.models.tokenization.bad_words import forbid_words
from baton.gateway.models.tokenization.detokenizer import NoText
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.routers.placer import Placed, Placer
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.errors import NotFound
from baton.rpc.prompt_hashes import PromptHashes
from baton.v1 import types_pb2


class WorkerGenerator:
    """Implements Generator over routers and workers."""

    def __init__(
        self,
        catalog: ModelCatalog,
        router: Placer,
        streams: WorkerStreams,
        counters: GenerationCounters,
        limits: RequestLimits | None = None,
        tracing: GatewayTracing | None = None,
        stream_interval: int = 1,
        fixed: Callable[[Collection[str]], Placed] | None = None,
    ) -> None:
        self._catalog = catalog
        self._hashes = PromptHashes()
        self._resolver = Resolver(limits or RequestLimits())
        self._services = GenerationServices(router, streams, counters, tracing, stream_interval, fixed)

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        model = adapted(self._catalog, request.model, request.adapter)
        info = model.require_info()
        check_generates(model.name, info)
        resolved = self._resolver.resolve(request, model.defaults, info)
        if resolved.sampling.bad_words:
            resolved = await _without_words(resolved, model.tokenizer, info.vocab_size)
        self._services.counters.requested_choices.observe(request.n)
        self._services.counters.requested_tokens.observe(resolved.stop.max_tokens)
        choices = [make_choice(index, request, resolved, model) for index in range(request.n)]
        prompt = hash_prompt(request, info, self._hashes, model.adapter)
        generation = RunningGeneration(request, resolved, prompt, model.base_name, choices, sink, self._services)
        await generation.begin()
        return generation

    @property
    def pooler(self) -> WorkerPooler:
        """The pooler over the same routers and workers."""
        return WorkerPooler(self._catalog, self._services)

    def shut_down(self) -> None:
        """Ends the running generations with an error for their clients."""
        for generation in tuple(self._services.running):
            generation.shut_down()


async def _without_words(resolved: ResolvedRequest, tokenizer: Tokenizer, vocab_size: int) -> ResolvedRequest:
    """Returns the request with its bad_words as tokens. Raises InvalidRequest that names the word."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(resolved.sampling)
    await forbid_words(sampling, tokenizer, vocab_size)
    return replace(resolved, sampling=sampling)


def adapted(catalog: ModelCatalog, name: str, adapter: str) -> ServedModel:
    """Returns the model of a name, with an adapter if one is given too. Raises NotFound for one of another model."""
    model = catalog.get(name)
    if not adapter:
        return model
    view = catalog.get(adapter)
    if view.adapter is None or view.base_name != model.base_name:
        raise NotFound(f"The adapter `{adapter}` of the model `{model.base_name}` does not exist.", field="adapter")
    return view


def make_choice(index: int, request: GenerationRequest, resolved: ResolvedRequest, model: ServedModel) -> Choice:
    """Returns one choice of a request, before its first token."""
    return output_of(index, request, resolved.stop_ids, resolved.sampling, model)


def output_of(
    index: int,
    request: GenerationRequest,
    stop_ids: frozenset[int],
    sampling: types_pb2.SamplingParams,
    model: ServedModel,
) -> Choice:
    """Returns one choice that ends at these tokens, with the log-probabilities that `sampling` asks for."""
    include_stop = request.stop.include_stop_str_in_output
    output_parsing = request.output_parsing if request.detokenize else None
    detokenizer = (
        model.tokenizer.detokenizer(
            request.prompt_token_ids,
            skip_special_tokens=request.skip_special_tokens,
            shown=output_parsing.special_tokens if output_parsing is not None else frozenset(),
        )
        if request.detokenize
        else NoText()
    )
    name_logprobs = logprob_namer(model.tokenizer)
    # All choices share the prompt, so only the first one requests its log-probabilities.
    asks = index == 0 and sampling.HasField("prompt_logprobs")
    return Choice(
        index=index,
        detokenizer=detokenizer,
        stops=StopStrings(request.stop.stop, include_in_output=include_stop) if request.stop.stop else None,
        stop_ids=stop_ids,
        include_stop=include_stop,
        name_logprobs=name_logprobs if sampling.HasField("logprobs") else None,
        parser=output_parsing.new_parser() if output_parsing is not None else None,
        prompt_logprobs=PromptLogprobParts(request.prompt_token_ids, name_logprobs) if asks else None,
        repetition=detector_of(request.stop),
        min_tokens=request.stop.min_tokens,
    )
