"""What a placement costs, in seconds of delay added: to the request itself, and to those it meets. Pure functions.

Everything is computed from the workers' states, their measured rates, and the placements that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.router.in_flight import PendingLoad
from baton.router.rates import Rates
from baton.router.worker_view import WorkerView

# submit, started, accept, first token, complete: what a hand-over costs when nothing has to be moved.
_HANDOVER_SECONDS = 0.002


class Costs(NamedTuple):
    """Seconds, one field for each router.proto CostKind."""

    queue: float
    prefill: float
    transfer: float
    decode: float
    memory: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    @property
    def to_first_token(self) -> float:
        """The part that passes before the first token."""
        return self.queue + self.prefill + self.transfer


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for."""

    num_prompt_tokens: int
    num_output_tokens: float  # expected


class Standing(NamedTuple):
    """One worker at the moment of one placement; `standing_of` derives once what is used many times."""

    view: WorkerView
    rates: Rates
    num_cached_tokens: int  # of this request's prompt
    num_requests: int  # running, waiting, and on their way
    num_beside: int  # requests in the batch beside this one
    num_waiting: int  # requests that find no place in the batch
    num_coming_blocks: int  # of requests on their way
    backlog_seconds: float  # prompts that are computed before this one

    def prefill_seconds(self, demand: Demand) -> float:
        """Computing what is not cached; a whole hit still computes one token."""
        return max(1, demand.num_prompt_tokens - self.num_cached_tokens) / self.rates.prefill_tokens_per_second


def standing_of(view: WorkerView, pending: PendingLoad, rates: Rates, num_cached_tokens: int) -> Standing:
    """A worker's standing, with what is on its way to it."""
    num_requests = view.num_running + view.queue_depth + pending.num_requests
    seats = view.max_num_requests
    backlog = view.num_pending_prefill_tokens + pending.num_prefill_tokens
    return Standing(
        view,
        rates,
        num_cached_tokens,
        num_requests,
        min(num_requests, seats),
        max(view.queue_depth, num_requests - seats),
        pending.num_blocks,
        backlog / rates.prefill_tokens_per_second,
    )


def decode_alone(decode: Standing, demand: Demand, floor_seconds: float) -> Costs:
    """The cost of decoding there, whoever prefills. `floor_seconds` is the fastest step that any worker offers."""
    step = decode.rates.step
    beside = decode.num_beside
    own = demand.num_output_tokens * max(0.0, step.seconds(beside + 1) - floor_seconds)
    # The others are half through, on average.
    others = beside * step.slope * demand.num_output_tokens / 2
    return Costs(_seat_seconds(decode, demand), 0.0, 0.0, own + others, _memory_seconds(decode, demand))


def local(decode: Standing, demand: Demand, alone: Costs) -> Costs:
    """The decode worker prefills: its batch stands still meanwhile."""
    prefill = decode.prefill_seconds(demand)
    queue = max(alone.queue, decode.backlog_seconds)
    return Costs(queue, prefill, 0.0, alone.decode + decode.num_beside * prefill, alone.memory)


def remote(decode: Standing, prefill: Standing, demand: Demand, alone: Costs) -> Costs:
    """Another worker prefills and sends the KV while it computes."""
    seconds = prefill.prefill_seconds(demand)
    num_bytes = max(0, demand.num_prompt_tokens - decode.num_cached_tokens) * decode.view.kv_bytes_per_token
    moving = num_bytes / decode.rates.transfer_bytes_per_second
    # Layers go as they are computed: the last one cannot hide, and neither can what takes longer than the prefill.
    exposed = max(moving - seconds, moving / max(1, decode.view.num_layers))
    stalled = prefill.num_beside * seconds if prefill.view.mixes_phases else 0.0
    queue = max(alone.queue, prefill.backlog_seconds)
    return Costs(queue, seconds, exposed + _HANDOVER_SECONDS, alone.decode + stalled, alone.memory)


def seconds_per_seat(decode: Standing, demand: Demand) -> float:
    """How often a place in a full batch becomes free."""
    seats = max(1, decode.view.max_num_requests)
    return demand.num_output_tokens * decode.rates.step.seconds(seats) / seats


def _seat_seconds(decode: Standing, demand: Demand) -> float:
    excess = decode.num_requests + 1 - decode.view.max_num_requests
    return excess * seconds_per_seat(decode, demand) if excess > 0 else 0.0


def _memory_seconds(decode: Standing, demand: Demand) -> float:
    """What is missing when everything beside has grown must be preempted, and computed again."""
    view = decode.view
    block_size = max(1, view.block_size)
    own = demand.num_prompt_tokens - decode.num_cached_tokens + demand.num_output_tokens
    growth = decode.num_beside * demand.num_output_tokens / 2
    missing = (own + growth) / block_size + decode.num_coming_blocks - view.num_free_blocks
    return max(0.0, missing) * block_size / decode.rates.prefill_tokens_per_second
