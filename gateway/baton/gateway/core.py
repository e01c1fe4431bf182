"""Shared types between the API packages (REST, gRPC) and generation. Knows neither of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.resume.journal import Journal
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its `n` choices. `sampling` and `stop` are as the client sent them; defaults are applied later."""

    request_id: str
    model: str  # empty: the only served model
    prompt_token_ids: list[int]
    sampling: types_pb2.SamplingParams = field(default_factory=types_pb2.SamplingParams)
    stop: types_pb2.StopConditions = field(default_factory=types_pb2.StopConditions)
    seed: int | None = None  # replaces that of `sampling`
    n: int = 1
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    timeout_ms: int = 0  # 0: no limit
    adapter: str = ""
    tenant: str = ""
    tenant_salt: str = ""  # namespace of the tenant's prefix cache; empty: the tenant's name
    tenant_weight: float = 0.0  # relative share of a full fleet; 0 means 1
    traceparent: str = ""
    session_id: str = ""  # the router's name of the session; empty: none
    worker_id: str = ""  # the only worker that may decode; empty: any
    detokenize: bool = True  # False: deltas have token ids and no text
    skip_special_tokens: bool = True
    # what the output must follow; combined with the constraint of `output_parsing`
    constraint: types_pb2.Constraint | None = None
    constraint_field: str = ""  # the client's name of the constraint's field; empty: the contract's name
    output_parsing: OutputParsing | None = None  # parses reasoning and tool calls; None: all text is the answer
    journal: Journal | None = None  # records the tokens for resumption, and holds those of earlier attempts
    most_logprobs: int = 0  # limit over all choices, prompt log-probabilities included for each; 0: no limit
    on_end: Callable[[Usage], None] | None = None  # called once with the usage when the generation ends
    whole: bool = False  # the output is read only once it is complete, so workers may send many tokens together


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A candidate token at a position with its log-probability."""

    token: str
    token_bytes: bytes
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An output token's log-probability and the most likely candidates at its position."""

    token: str  # incomplete UTF-8 shows as U+FFFD
    token_bytes: bytes
    token_id: int
    logprob: float
    rank: int  # rank in the whole vocabulary; 1 is the most likely
    top: Sequence[TopLogprob]  # most likely first


@dataclass(slots=True)
class Delta:
    """New output of one choice.

    Text may lag behind the tokens: incomplete characters and possible stop strings are held back.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob] | None = None  # one per entry of token_ids, if requested
    finish_reason: str | None = None  # stop, length, tool_calls, repetition or abort, in a choice's last delta
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for end-of-sequence
    events: list[Event] | None = None  # parsed text; None without a parser: all text is the answer
    # for the prompt's tokens except the first; in the first delta of choice 0
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens not computed because a worker held their KV
    reasoning_tokens: int = 0  # part of completion_tokens, if a parser identifies reasoning
    queue_seconds: float = 0.0  # the longest that a choice waited in a worker before it was computed


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Texts whose vectors a model that pools computes."""

    request_id: str
    model: str
    texts: Sequence[Sequence[int]]  # token ids
    params: types_pb2.PoolingParams
    second_starts: Sequence[int] = ()  # of each text: the token at which the second text of a pair begins
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    timeout_ms: int = 0  # 0: no limit
    adapter: str = ""
    tenant: str = ""
    tenant_salt: str = ""
    tenant_weight: float = 0.0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PooledText:
    """The vectors of one text."""

    values: bytes  # little-endian float32, vector after vector
    num_vectors: int
    cached_tokens: int


class TextPooler(Protocol):
    """Computes the vectors of texts."""

    async def pool(self, request: PoolRequest) -> list[PooledText]:
        """Returns the vectors of each text, in order. Raises a ServiceError; a field `input.N` names the text."""


class Sink(Protocol):
    """Receives a generation's output. Called synchronously from the worker's stream: must neither block nor raise.

    There are no further calls after on_done or on_error, nor after Generation.abort().
    """

    @property
    def writable(self) -> bool:
        """Returns False to have deltas held back and merged until Generation.resume() is called."""

    def on_delta(self, delta: Delta) -> None:
        """Receives the next delta of one choice."""

    def on_done(self, usage: Usage) -> None:
        """Called once after every choice has had its finish_reason."""

    def on_error(self, error: ServiceError) -> None:
        """Called once if the request failed; deltas may have been sent before."""


class Generation(Protocol):
    def abort(self) -> None:
        """Ends the request: the sink is not called again, and the worker frees its blocks.

        Idempotent; allowed after the end.
        """

    def cancel(self) -> None:
        """Ends the request with the output so far: its choices get the finish reason abort. Idempotent."""

    def resume(self) -> None:
        """Resumes deltas after the sink has become writable again."""


class Generator(Protocol):
    """Runs requests on workers."""

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Validates, places and submits a request. Raises ServiceError before the first call of the sink."""
