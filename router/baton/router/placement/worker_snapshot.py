"""A worker's snapshot for one placement: values that are used many times, derived once. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.fleet.rates import Rates
from baton.router.fleet.worker_view import WorkerView
from baton.router.requests.in_flight import PendingLoad


class Demand(NamedTuple):
    """A request's size and objectives."""

    num_prompt_tokens: int
    num_output_tokens: float  # expected
    adapter: str = ""  # empty: the model itself
    stream_part: float = 1.0  # what a second between tokens counts for, against one before the first token
    itl_seconds: float = 0.0  # the objective between tokens. 0: a second counts the same however slow a stream is
    num_choices: int = 1  # places that it takes in a batch


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives: seconds before the first token, and mean seconds between two tokens."""

    ttft_seconds: float = 1.0
    itl_seconds: float = 0.05
    sheds: bool = False  # requests are refused that would spoil more streams than they add

    def stream_part(self, num_output_tokens: float) -> float:
        """Returns the weight of a delay: the part of its objective that it takes.

        A long answer's objective has more room.
        """
        return min(1.0, self.ttft_seconds / (max(1.0, num_output_tokens) * self.itl_seconds))


class Traffic(NamedTuple):
    """The average traffic of each worker."""

    placements_per_second: float = 0.0
    bias: float = 1.0  # factor from estimated to actual seconds of local prefills
    remote_bias: float = 1.0  # and remote ones
    num_output_tokens: float = 1.0  # of those that are served already
    lasting_stall: float = 0.0  # the part of the time in which decodes stand still for prompts, over a stream's life


NO_TRAFFIC = Traffic()


class WorkerSnapshot(NamedTuple):
    """One worker at the moment of one placement."""

    view: WorkerView
    rates: Rates
    num_cached_tokens: int  # of this request's prompt, those in host memory included
    num_requests: int  # running, waiting, and on their way
    num_beside: int  # requests in the batch beside this one
    num_waiting: int  # requests that find no place in the batch
    num_coming_blocks: int  # of requests on their way
    backlog_seconds: float  # prompts that are computed before this one
    num_host_tokens: int = 0  # cached tokens that must be brought back from host memory
    num_behind: float = 0.0  # waiting requests that this one overtakes
    is_preferred: bool = False  # the request's session was here
    has_adapter: bool = False  # the request's adapter is being loaded here
    stalled_part: float = 0.0  # of the time, in which its decodes stand still for prompts

    def with_prefix(self, num_cached_tokens: int, num_host_tokens: int, is_preferred: bool) -> WorkerSnapshot:
        """Returns the same worker with the cached prefix of one request."""
        view, rates, _, requests, beside, waiting, blocks, backlog, _, behind, _, has_adapter, stalled = self
        return WorkerSnapshot(
            view, rates, num_cached_tokens, requests, beside, waiting, blocks, backlog, num_host_tokens, behind,
            is_preferred, has_adapter, stalled,
        )  # fmt: skip

    @property
    def num_stalled(self) -> int:
        """Number of requests that stall while the worker prefills for another one."""
        return self.num_beside if self.view.mixes_phases else 0

    def step_seconds(self, demand: Demand) -> float:
        """Returns the seconds of a decode step with the request in the batch, half generated."""
        step = self.rates.step
        context = self.view.num_context_tokens + demand.num_prompt_tokens + demand.num_output_tokens / 2
        return step.base + step.slope * (self.num_beside + 1) + step.context_slope * context

    def stream_part(self, demand: Demand) -> float:
        """Returns the weight of a second between tokens: the nearer the streams are to their objective, the higher."""
        if not demand.itl_seconds:
            return demand.stream_part
        return demand.stream_part * self.step_seconds(demand) / (demand.itl_seconds * (1.0 - self.stalled_part))

    def prefill_seconds(self, demand: Demand) -> float:
        """Returns the seconds to compute the uncached tokens. A full hit still computes one token."""
        return max(1, demand.num_prompt_tokens - self.num_cached_tokens) / self.rates.prefill_tokens_per_second

    def restore_seconds(self) -> float:
        """Returns the seconds to copy cached tokens back from host memory."""
        if not self.num_host_tokens:
            return 0.0
        return self.view.moved_bytes(self.num_host_tokens) / self.rates.restore_bytes_per_second

    def adapter_seconds(self, demand: Demand) -> float:
        """Returns the seconds to load the adapter, 0 if it is loaded."""
        if not demand.adapter or self.has_adapter or demand.adapter in self.view.adapters:
            return 0.0
        return self.rates.adapter_load_seconds


def _count_requests(view: WorkerView, pending: PendingLoad) -> int:
    """Returns how many requests a worker has: its state's, without those that have ended since, and those it lacks.

    Placements of just before the state may be in it or not. Counting them twice is excluded by the number of those
    without an outcome, which misses only what this router has forgotten.
    """
    shown = max(0, view.num_running + view.queue_depth - pending.num_ended_requests)
    return min(shown + pending.num_requests, max(shown + pending.num_unseen_requests, pending.num_open_requests))


def snapshot_of(
    view: WorkerView,
    pending: PendingLoad,
    rates: Rates,
    num_cached_tokens: int,
    num_host_tokens: int = 0,
    share_ahead: float = 1.0,
    is_preferred: bool = False,
    has_adapter: bool = False,
    stalled_part: float = 0.0,
    given_seconds: float = math.inf,
    age_seconds: float = 0.0,
) -> WorkerSnapshot:
    """Returns a worker's snapshot, including placements in flight.

    `share_ahead`: the part of its queue that is not overtaken.

    `given_seconds`: what is left of all prompts given to it if it did nothing else; `age_seconds`: the view's age.
    """
    num_requests = _count_requests(view, pending)
    seats = view.max_num_requests
    speed = rates.prefill_tokens_per_second
    reported = max(0.0, view.num_pending_prefill_tokens / speed - age_seconds)
    # A state may show placements of just before it, or not: then no more is left than what was given.
    at_least = reported + pending.num_unseen_tokens / speed
    backlog_seconds = max(at_least, min(reported + pending.num_prefill_tokens / speed, given_seconds)) * share_ahead
    num_waiting = max(view.queue_depth - pending.num_ended_requests, num_requests - seats, 0)
    return WorkerSnapshot(
        view,
        rates,
        num_cached_tokens,
        num_requests,
        num_requests if num_requests < seats else seats,
        num_waiting,
        pending.num_blocks,
        backlog_seconds,
        num_host_tokens,
        num_waiting * (1.0 - share_ahead),
        is_preferred,
        has_adapter,
        stalled_part,
    )
