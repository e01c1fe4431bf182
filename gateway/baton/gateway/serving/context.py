"""The shared steps of all generating routes: model, admission, request id, metrics. Knows no bodies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.gate import Gate, OpenGate, Permit
from baton.gateway.access.identity import Identity
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.config import GatewayConfig
from baton.gateway.core import GenerationRequest, Generator, TextPooler
from baton.gateway.errors.anthropic import speaks_anthropic
from baton.gateway.errors.http import http_error_of
from baton.gateway.generation.beam_search import BeamSearchGenerator
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter, BackgroundMeter, GatewayMetrics
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.sampling import RequestLimits
from baton.gateway.models.served import ModelCatalog, ServedModel, UnknownModel
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.parsing.tool import ToolUse
from baton.gateway.rest.sse import Envelope
from baton.gateway.resume.journal import Journal, StreamHead
from baton.gateway.schemas.requests import GenerationFields
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.affinity import session_of, worker_of
from baton.gateway.serving.answer_size import limit_logprobs, most_logprobs
from baton.gateway.serving.name_resolver import NameResolver
from baton.gateway.serving.running_requests import RunningRequests
from baton.gateway.serving.tenancy import AdmittedGenerator, allowed_model
from baton.gateway.version import VERSION
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2

if TYPE_CHECKING:
    from baton.gateway.resume.store import StreamStore


class Call(Protocol):
    """A client's request over REST or gRPC."""

    request_id: str
    identity: Identity
    limit_headers: Mapping[str, str]  # the tenant's limits, as response headers
    journal: Journal | None  # of a resumable stream
    on_end: list[Callable[[Any], None]]  # called with the request at its end

    @property
    def received(self) -> float:
        """Returns the time of arrival, by time.perf_counter."""

    @property
    def path(self) -> str:
        """Returns the path or the method's name."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Returns the headers by lower-case name."""

    @property
    def body(self) -> bytes:
        """Returns the raw body; empty if streams are not resumed from it."""


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The services that generating routes use."""

    config: GatewayConfig
    catalog: ModelCatalog
    generator: Generator
    admission: ConcurrencyLimiter
    metrics: GatewayMetrics
    gate: Gate = field(default_factory=OpenGate)
    streams: StreamStore | None = None  # None: streams are not resumable
    bodies: BodyThread = field(default_factory=BodyThread)
    running: RunningRequests = field(default_factory=RunningRequests)
    pooler: TextPooler | None = None  # None: there are no routes for vectors
    names: NameResolver | None = None  # None: no adapter is loaded when a request first names it

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Counts errors before a generation starts, except names that may be loaded now."""
        try:
            yield
        except ServiceError as error:
            if isinstance(error, UnknownModel) and self.catalog.resolving_model(error.name) is not None:
                raise
            self.metrics.generation_rejected(http_error_of(error).type)
            raise

    def model(self, call: Call, name: str | None) -> ServedModel:
        """Returns the requested model if the client's tenant may use it. Raises NotFound."""
        return allowed_model(self.catalog, call.identity, name)

    def admit(self, call: Call, fields: GenerationFields, num_choices: int) -> str:
        """Admits the request until it ends and returns its unique id. Raises NoCapacity."""
        if fields.request_id:
            call.request_id = fields.request_id
        admitted = self.admission.admit(call.request_id, num_choices)
        call.on_end.append(lambda _: admitted.end())
        return admitted.request_id

    def meter(self, call: Call, num_choices: int) -> AnswerMeter:
        """Returns a meter that starts at the request's arrival."""
        kind = BackgroundMeter if call.identity.background else AnswerMeter
        return kind(self.metrics, call.received, num_choices)

    def generator_for(self, fields: GenerationFields) -> Generator:
        """Returns the generator for a request."""
        if not fields.use_beam_search:
            return self.generator
        limits = RequestLimits(self.config.max_choices, self.config.most_logprobs)
        penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
        return BeamSearchGenerator(self.generator, self.catalog, limits, penalty)

    def admitted(
        self, call: Call, generator: Generator, requests: Sequence[GenerationRequest], answer_id: str = ""
    ) -> AdmittedGenerator:
        """Returns a generator that applies the tenant's limits and sets the response's limit headers.

        `answer_id` is another name of the request.
        """

        def note(permit: Permit) -> None:
            call.limit_headers = permit.headers(speaks_anthropic(call.path))

        info = self.catalog.get(requests[0].model).info
        max_model_len = 0 if info is None else info.max_model_len
        names = (call.request_id, answer_id)
        admitted = AdmittedGenerator(
            generator, self.gate, call.identity, requests, max_model_len, note, self.running, names
        )
        call.on_end.append(lambda _: admitted.close())
        return admitted

    def generation_request(
        self,
        call: Call,
        request_id: str,
        model: ServedModel,
        fields: GenerationFields,
        prompt_token_ids: list[int],
        sampling: types_pb2.SamplingParams,
        stop: types_pb2.StopConditions,
        output_parsing: OutputParsing | None = None,
        requested: RequestedConstraint | None = None,
        use: ToolUse | None = None,
        holds_logprobs: bool = False,
        session: str = "",
        whole: bool = False,
    ) -> GenerationRequest:
        """Returns one prompt's request to the generator.

        `holds_logprobs`: kept as objects until the response ends. `session` goes before the field `user`. `whole`: the
        response is sent at its end.
        """
        constraint = None if requested is None else requested.constraint
        if requested is not None and output_parsing is not None:
            constraint = model.constraint(requested.constraint, requested.field, use or ToolUse(), prompt_token_ids)
            output_parsing = replace(output_parsing, constraint=None)  # it includes the constraint of calls
        journal = self._journal_of(call, fields, sampling)
        most = self.config.max_answer_logprobs
        stores = holds_logprobs or bool(getattr(fields, "store", None))
        request = GenerationRequest(
            request_id=request_id,
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stop=stop,
            n=fields.n or 1,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            timeout_ms=int(self.config.request_timeout * 1000),
            traceparent=call.headers.get(b"traceparent", b"").decode("latin-1"),
            session_id=session_of(call, fields.prompt_cache_key, session, fields.user),
            worker_id=worker_of(call, AdminCheck(self.gate, self.config.rest_listen)),
            skip_special_tokens=fields.skip_special_tokens is not False,
            output_parsing=output_parsing,
            constraint=constraint,
            constraint_field="" if requested is None else requested.field,
            journal=journal,
            most_logprobs=most_logprobs(most, sampling, streams=bool(fields.stream), stores=stores),
            whole=whole,
        )
        return limit_logprobs([request], model.require_info().max_model_len)[0]

    def envelope(
        self, kind: str, prefix: str, exchange: Exchange, model: ServedModel, fields: GenerationFields
    ) -> Envelope:
        """Returns the common members of all chunks or of the document."""
        options = fields.stream_options
        return Envelope(
            object=kind,
            id=f"{prefix}-{exchange.request_id}",
            created=int(time.time()) if exchange.journal is None else exchange.journal.head.created,
            model=model.name,
            system_fingerprint=fingerprint(model),
            include_usage=self.includes_usage(fields),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            with_metrics=self.config.enable_per_request_metrics,
        )

    def includes_usage(self, fields: GenerationFields) -> bool:
        """Returns whether a stream ends with its usage."""
        options = fields.stream_options
        asked = options is not None and bool(options.include_usage)
        return asked or self.config.enable_force_include_usage

    def _journal_of(self, call: Call, fields: GenerationFields, sampling: types_pb2.SamplingParams) -> Journal | None:
        """Starts a journal if the client named the stream. Draws the seed now, so that other gateways can use it."""
        if call.journal is not None:
            call.on_end.append(_end_journal)
            sampling.seed = call.journal.head.seed
            return call.journal
        named = b"x-request-id" in call.headers or bool(fields.request_id)
        if self.streams is None or not fields.stream or not named or not can_resume(fields):
            return None
        if not sampling.HasField("seed"):
            sampling.seed = random.getrandbits(64)
        call.on_end.append(_end_journal)
        call.journal = self.streams.begin(
            StreamHead(
                tenant=call.identity.tenant.name,
                request_id=call.request_id,
                path=call.path,
                body=bytes(call.body),
                num_choices=getattr(fields, "best_of", None) or fields.n or 1,
                seed=sampling.seed,
                created=int(time.time()),
            )
        )
        return call.journal


def _end_journal(call: Call) -> None:
    if call.journal is not None:
        call.journal.end()


def can_resume(fields: GenerationFields) -> bool:
    """Returns whether the request is a single generation whose tokens reproduce the stream."""
    prompt = getattr(fields, "prompt", None)
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int) or len(prompt) == 1
    return is_one and not fields.use_beam_search


def fingerprint(model: ServedModel) -> str:
    """Returns a fingerprint of the software and the model's weights."""
    digest = model.info.digest.hex()[:8] if model.info is not None else "00000000"
    return f"baton-{VERSION}-{digest}"
