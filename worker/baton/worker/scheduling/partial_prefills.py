"""Limits the share of a step that long prompts get, and how many prompts are partly computed. Starts no request.

The three limits are vLLM's. A prompt is long while more tokens of it are uncomputed than the threshold. It gets as many
tokens of a step as the threshold, and short prompts pass it while enough long ones are in progress.
"""

from __future__ import annotations

import sys

from baton.rpc.errors import InvalidRequest
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.scheduling.steps.draft import Draft

# Part of the model's length from which prompts are long, if several may be partly computed and no threshold is set.
_LONG_PART = 0.04


def long_prompt_threshold(settings: EngineSettings, max_model_len: int) -> int:
    """Returns the tokens from which a prompt is long. 0: none is. Raises InvalidRequest for one that no prompt has."""
    threshold = settings.long_prefill_token_threshold
    if threshold > max_model_len:
        raise InvalidRequest(
            f"long_prefill_token_threshold is {threshold}; it must be at most max_model_len, {max_model_len}",
            field="long_prefill_token_threshold",
        )
    if not threshold and settings.max_num_partial_prefills > 1:
        return max(1, int(max_model_len * _LONG_PART))
    return threshold


class PartialPrefills:
    """The limits of one engine."""

    def __init__(self, queues: RequestQueues, settings: EngineSettings, max_model_len: int) -> None:
        self._queues = queues
        threshold = long_prompt_threshold(settings, max_model_len)
        self._most_tokens = threshold or sys.maxsize  # of one prompt in a step
        self._never_whole = min(self._most_tokens, settings.max_num_batched_tokens)  # longer prompts take several steps
        self._most = settings.max_num_partial_prefills or sys.maxsize
        self._most_long = settings.max_long_partial_prefills or sys.maxsize
        self._limited = min(self._most, self._most_long) < sys.maxsize

    def chunk(self, remaining: int, given: int, budget: int) -> int:
        """Returns how many more tokens a prompt gets in this step, beside the `given` ones."""
        return min(remaining - given, budget, self._most_tokens - given)

    def take_back(self, draft: Draft) -> None:
        """Queues the best long prompt of each line again, where one more may start."""
        lines = self._queues.aside.lines
        if lines and self._may_start_long(draft):
            for line in lines:
                state = self._queues.aside.front(line)
                if state is not None:
                    self._queues.aside.discard(state)
                    self._queues.waiting.push(state)

    def set_aside(self, state: RequestState, num_uncached: int, draft: Draft) -> bool:
        """Lets others pass a prompt that takes several steps, if it may not start now."""
        if not self._limited or num_uncached <= self._never_whole or self._may_start_long(draft):
            return False
        self._queues.waiting.discard(state)
        self._queues.aside.push(state)
        return True

    def waits(self, num_uncached: int, draft: Draft) -> bool:
        """Returns whether a prompt waits for a step that computes all of it."""
        return num_uncached > draft.budget and self._num_partial(draft) >= self._most

    def _may_start_long(self, draft: Draft) -> bool:
        return self._num_partial(draft) < self._most and self._num_long() < self._most_long

    def _num_partial(self, draft: Draft) -> int:
        """Returns the prompts that this step leaves unfinished."""
        if self._most == sys.maxsize:
            return 0
        left = [self._remaining(state) > draft.chunks.get(state, 0) for state in self._queues.batch.prefilling]
        return sum(left)

    def _num_long(self) -> int:
        if self._most_long == sys.maxsize:
            return 0
        prefilling = self._queues.batch.prefilling
        return sum([self._remaining(state) > self._most_tokens for state in prefilling])

    def _remaining(self, state: RequestState) -> int:
        return len(state.token_ids) - int(self._queues.batch.num_computed[state.row])
