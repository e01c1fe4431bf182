"""The outputs of an engine: a step's tokens and endings, its load, its totals. Knows no wire format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import ServiceError
from baton.v1 import control_pb2
from baton.worker.core import BlockId, FinishReason, Int32, Request, Row, TokenLogprobs
from baton.worker.requests.histogram import COPIED_BYTES, STEP_TOKENS, Histogram
from baton.worker.requests.state import GroupSpan


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation. Its last token is in the same outputs or in earlier ones."""

    request: Request
    reason: FinishReason
    stop_token_id: int | None = None  # the stop token that matched; None for end-of-sequence and all else
    num_cached_tokens: int = 0  # prompt tokens found in this worker's cache at admission
    num_transferred_tokens: int = 0  # prompt tokens whose KV a prefill worker sent
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of them
    queue_seconds: float = 0.0  # submit to first scheduled; with a remote prefill, to reserve_blocks
    prefill_seconds: float = 0.0  # from there to the first token

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class Failure:
    """A generation that cannot continue. Nothing follows."""

    request: Request
    error: ServiceError

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class AdapterWait:
    """A request that has waited until its adapter was on the device. Times are on the engine's clock."""

    request: Request
    began: float
    ended: float
    source: str  # where the adapter was: device (the request waited for its turn), host_memory or files
    read_seconds: float  # of the adapter's load from files; 0: this request did not wait for one
    copy_seconds: float  # of its copy to the device; as above


@dataclass(frozen=True, slots=True)
class PrefillWanted:
    """A request that waits for another worker's prefill. The first num_cached_tokens (whole blocks) are held here."""

    request: Request
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A prefill_only request is scheduled for the first time. Its blocks, for the whole prompt, stay until freed."""

    request: Request
    num_cached_tokens: int
    block_ids: list[BlockId]  # of the first group
    row: Row  # its index in the executor's layer hook
    step: int  # the first step that computes it; before it, the row was another request's
    windows: Sequence[GroupSpan] = ()  # blocks of the other groups so far


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill_only request is computed. It holds its blocks until free_prefill; no Finish follows."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


class EngineListener:
    """Reacts to a step before it ends. Methods run on the engine's thread, and do nothing unless overridden."""

    def on_prefill_started(self, started: PrefillStarted) -> None:
        """A prefill_only request is scheduled for the first time; its step is not launched yet."""

    def on_windows_moved(self, request: Request, windows: Sequence[GroupSpan]) -> None:
        """A prefill_only request has these blocks in groups after the first; its step is not launched yet."""

    def on_admitted(self, requests: list[Request]) -> None:
        """These requests got a row in a step that is not launched yet."""

    def on_launched(self, began: float) -> None:
        """A step is launched; the launch began then, on the engine's clock."""

    def on_evicted(self) -> None:
        """Cached blocks are removed, and the launched step overwrites them: take_events has the removals."""


@dataclass(slots=True)
class StepOutputs:
    """Everything that happened since the last outputs.

    Tokens are columns: token_ids[i] belongs to requests[i], with logprobs[i] if requested. A request that has several
    tokens occurs several times, in order. A request that ends has its last token here or earlier.
    """

    step: int = 0  # the last collected step; grows
    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into token_ids
    prompt_logprobs: list[tuple[Request, int, list[TokenLogprobs]]] = field(default_factory=list)  # first place in it
    pooled: list[tuple[Request, NDArray[np.float32]]] = field(default_factory=list)  # [vectors, values] each
    finishes: list[Finish] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    prefill_wanted: list[PrefillWanted] = field(default_factory=list)
    prefill_started: list[PrefillStarted] = field(default_factory=list)
    prefill_progress: list[tuple[Request, int]] = field(default_factory=list)  # prefill_only: tokens computed so far
    first_tokens: list[FirstToken] = field(default_factory=list)
    adapter_waits: list[AdapterWait] = field(default_factory=list)
    # Of the collected step, for histograms; all 0 without one.
    seconds: float = 0.0  # device time
    num_prefill_tokens: int = 0
    num_decodes: int = 0

    def __bool__(self) -> bool:
        """Returns whether there is anything to report."""
        return bool(
            self.token_ids
            or self.prompt_logprobs
            or self.pooled
            or self.finishes
            or self.failures
            or self.prefill_wanted
            or self.prefill_started
            or self.prefill_progress
            or self.first_tokens
            or self.adapter_waits
        )

    def tokens(self) -> Iterator[tuple[Request, int, TokenLogprobs | None]]:
        """Yields the token columns, row by row."""
        for index, (request, token_id) in enumerate(zip(self.requests, self.token_ids, strict=True)):
            yield request, token_id, self.logprobs.get(index)


class LoadSnapshot(NamedTuple):
    """The load and the speed of the engine, in the units of baton.v1.WorkerLoad."""

    num_running: int
    queue_depth: int  # waiting for a place in the batch, for a remote prefill, or for another request's prefix
    num_pending_prefill_tokens: int  # to be computed here; another worker's part does not count
    num_context_tokens: int
    num_blocks: int
    num_free_blocks: int  # neither held nor leased
    max_num_requests: int
    prefill_tokens_per_second: float  # 0: unknown
    decode_step_seconds: float  # 0: unknown
    num_host_blocks: int = 0  # of host memory
    num_cached_host_blocks: int = 0
    restore_bytes_per_second: float = 0.0  # 0: unknown
    adapter_load_seconds: float = 0.0  # 0: unknown
    num_adapter_slots: int = 0  # on the device; 0: without LoRA
    num_resident_adapters: int = 0  # on the device
    decode_tokens_per_step: float = 1.0  # of a request; above 1 with speculation


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start. The hand-over counts transfers."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_local_fallbacks: int = 0
    num_discarded_tokens: int = 0  # computed for requests that had ended; the cost of asynchronous steps
    num_evicted_blocks: int = 0
    step_seconds: float = 0.0
    num_host_hit_tokens: int = 0  # num_cached_tokens that were restored from host memory
    num_offloaded_blocks: int = 0  # copied to host memory
    num_restored_blocks: int = 0  # copied back
    num_dropped_blocks: int = 0  # evicted without a copy in host memory
    num_offloaded_bytes: int = 0
    num_restored_bytes: int = 0
    offload_seconds: float = 0.0  # while copies ran
    restore_seconds: float = 0.0
    num_transferred_tokens: int = 0  # num_prompt_tokens whose KV prefill workers sent
    num_drafts: int = 0  # decodes with drafts
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of them
    num_proposer_failures: int = 0  # requests that get no drafts any more
    accepted_by_place: list[int] = field(default_factory=list)  # by place among a decode's drafts
    offload_bytes: Histogram = field(default_factory=lambda: Histogram(COPIED_BYTES))  # of one copy to host memory
    restore_bytes: Histogram = field(default_factory=lambda: Histogram(COPIED_BYTES))  # of one copy back
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))  # computed by a step

    def count_drafts(self, drafted: Int32, accepted: Int32) -> None:
        """Counts a step's drafts: those of each decode, and how many of them were right."""
        self.num_drafts += int(np.count_nonzero(drafted))
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        most = int(drafted.max(initial=0))
        self.accepted_by_place += [0] * (most - len(self.accepted_by_place))
        for place in range(int(accepted.max(initial=0))):
            self.accepted_by_place[place] += int(np.count_nonzero(accepted > place))

    def speculation_message(self) -> control_pb2.SpeculationCounters:
        """Returns the counts of drafts in the contract's form."""
        return control_pb2.SpeculationCounters(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_by_place=self.accepted_by_place,
            num_proposer_failures=self.num_proposer_failures,
        )

    def count_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts the prompt of a request that begins."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
