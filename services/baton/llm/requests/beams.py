"""Beam searches as requests of the gateway's generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.gateway.core import Delta, Generation, GenerationRequest, Usage
from baton.gateway.generation.beam_search import Beam, BeamSearchGenerator
from baton.llm.engine.local_engine import LocalEngine
from baton.llm.parameters.beam_search_params import BeamSearchParams
from baton.llm.parameters.names import InvalidParameter
from baton.llm.parameters.sampling_params import RequestOutputKind
from baton.llm.requests.prepared import Encoded, Prepared, Work
from baton.llm.results.beams import BeamSearchOutput, BeamSearchSequence
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2


class BeamCollector:
    """Implements Sink for one search: `on_change` is called at its end."""

    writable = True

    def __init__(
        self, engine: LocalEngine, prompt_token_ids: list[int], keeps_stop: bool, on_change: Callable[[], None]
    ) -> None:
        self.error: ServiceError | None = None
        self._engine = engine
        self._prompt_token_ids = prompt_token_ids
        self._keeps_stop = keeps_stop  # whether a token that ended a beam is part of it
        self._on_change = on_change
        self._beams: Sequence[Beam] = ()

    def take(self, beams: Sequence[Beam]) -> None:
        """Receives the beams, best first."""
        self._beams = beams

    def on_delta(self, delta: Delta) -> None:
        """Does nothing: `take` has received the tokens."""

    def on_done(self, usage: Usage) -> None:
        self._on_change()

    def on_error(self, error: ServiceError) -> None:
        self.error = error
        self._on_change()

    def snapshot(self) -> BeamSearchOutput:
        """Returns the sequences of all beams."""
        return BeamSearchOutput([self._sequence(beam) for beam in self._beams])

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        reason, stop_token = beam.end or (None, None)
        token_ids = beam.token_ids if self._keeps_stop or reason != "stop" else beam.token_ids[:-1]
        tokens = [*self._prompt_token_ids, *token_ids]
        text = self._engine.model.tokenizer.decode(tokens)
        return BeamSearchSequence(tokens, list(beam.logprobs), beam.logprob, text, reason, stop_token)


def prepare_beams(params: BeamSearchParams) -> Prepared:
    """Converts parameters. Raises InvalidParameter."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidParameter(f"params is of type {type(params).__name__}; give BeamSearchParams", field="params")
    stop = types_pb2.StopConditions(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    return Prepared(
        sampling=types_pb2.SamplingParams(),
        stop=stop,
        requested=None,
        n=params.beam_width,
        kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,
        skip_special_tokens=True,
        ranked=True,
        thinking_token_budget=None,
    )


async def start_beams(
    engine: LocalEngine,
    work: Work,
    encoded: Encoded,
    on_change: Callable[[BeamCollector], None],
    params: BeamSearchParams,
) -> tuple[BeamCollector, Generation]:
    """Starts the search of one prompt. Raises a ServiceError."""
    token_ids = encoded.token_ids
    keeps_stop = params.include_stop_str_in_output
    collector = BeamCollector(engine, token_ids, keeps_stop, lambda: on_change(collector))
    width = params.beam_width
    limits = replace(engine.arguments.limits, max_n=max(width, engine.arguments.limits.max_n), max_logprobs=2 * width)
    search = BeamSearchGenerator(engine.scorer, engine.catalog, limits, params.length_penalty, collector.take)
    request = GenerationRequest(
        request_id=work.request_id,
        model=work.adapter or engine.model.name,
        prompt_token_ids=token_ids,
        stop=work.prepared.stop,
        n=width,
        cache_salt=work.source.cache_salt,
        detokenize=False,
    )
    return collector, await search.start(request, collector)
