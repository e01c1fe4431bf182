"""The words between the gateway's edges (REST, gRPC) and its generation side. Knows neither of the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.output_format import Reading
from baton.gateway.resume.journal import Journal
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, n choices. `sampling` and `stop` are as the client gave them: unset fields get defaults later."""

    request_id: str
    model: str  # empty: the only model served
    prompt_token_ids: list[int]
    sampling: types_pb2.SamplingParams = field(default_factory=types_pb2.SamplingParams)
    stop: types_pb2.StopConditions = field(default_factory=types_pb2.StopConditions)
    n: int = 1
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    timeout_ms: int = 0  # 0: no limit
    adapter: str = ""
    tenant: str = ""
    tenant_salt: str = ""  # of its prefix cache; empty: its name
    tenant_weight: float = 0.0  # its share of a full fleet; 0: 1
    traceparent: str = ""
    detokenize: bool = True  # False: deltas have token ids and no text
    skip_special_tokens: bool = True
    constraint: types_pb2.Constraint | None = None  # what the text must be; goes behind the reading's own
    constraint_field: str = ""  # the client's name for it. Empty: the contract's
    reading: Reading | None = None  # how reasoning and calls are found in the text; None: all of it is the answer
    journal: Journal | None = None  # where its tokens are written down, and those of before come from
    most_logprobs: int = 0  # of all choices, the prompt's for each; 0: no limit
    on_end: Callable[[Usage], None] | None = None  # told once what was used, however it ends after start() returned


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token: str
    token_bytes: bytes
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token's log-probability, and those of the most likely ones there."""

    token: str  # bytes that are no whole characters show as U+FFFD
    token_bytes: bytes
    token_id: int
    logprob: float
    rank: int  # among all tokens there; 1 is the most likely
    top: Sequence[TopLogprob]  # most likely first


@dataclass(slots=True)
class Delta:
    """What is new of one choice. Text may lag behind tokens: incomplete characters and possible stop strings wait."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, where asked for
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" | "repetition", in the choice's last delta
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for end-of-sequence
    events: list[Event] | None = None  # what the text is; None without a parser: all of it is the answer
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens but the first; in choice 0's first delta


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were not computed, because a worker held their KV
    reasoning_tokens: int = 0  # of the completion's, where a parser tells them


class Sink(Protocol):
    """Where a generation goes. Called synchronously from the worker's stream: must neither block nor raise.

    After on_done or on_error nothing more is called; after Generation.abort() nothing at all is.
    """

    @property
    def writable(self) -> bool:
        """False: keep deltas back and merge them, until Generation.resume() is called."""

    def on_delta(self, delta: Delta) -> None:
        """Takes the next piece of one choice."""

    def on_done(self, usage: Usage) -> None:
        """Every choice has had its finish_reason."""

    def on_error(self, error: ServiceError) -> None:
        """The request failed; deltas may have been sent before."""


class Generation(Protocol):
    """A request that runs."""

    def abort(self) -> None:
        """Ends it now: the sink hears nothing more, the worker frees the blocks. Idempotent; fine after the end."""

    def resume(self) -> None:
        """Call when the sink has become writable again."""


class Generator(Protocol):
    """Runs requests on workers."""

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Validates, places and submits. Raises ServiceError before the sink hears anything."""
