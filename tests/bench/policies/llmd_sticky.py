"""llm-d, sticky until saturated: the worker with the longest cached prefix, until its waiting prompt tokens reach tau.

tau is the number of tokens that a worker prefills in one second at its observed peak. A prefix counts if it has at
least 0.8 of the best match. If saturated, or without a match: the worker with the fewest waiting prompt tokens.
"""

from __future__ import annotations

from bench.policies.peer import Peer

_AFFINITY = 0.8
_TAU_SECONDS = 1.0
_DEFAULT_PEAK = 10_000.0  # tokens per second, until a rate was observed


class StickyUntilSaturated(Peer):
    """The peak is the highest rate that a worker has reported."""

    def __init__(self, parts):
        super().__init__(parts)
        self._peak = 0.0

    def choose(self, request, workers):
        self._peak = max(self._peak, *(view.prefill_tokens_per_second for view in workers))
        tau = (self._peak or _DEFAULT_PEAK) * _TAU_SECONDS
        cached = self.cached_tokens(request)
        best = max((cached.get(view.worker_id, 0) for view in workers), default=0)
        sticky = [view for view in workers if best and cached.get(view.worker_id, 0) >= _AFFINITY * best]
        free = [view for view in sticky if self.load(view.worker_id).num_waiting_tokens < tau]
        return min(free or workers, key=self._busy)

    def _busy(self, view):
        load = self.load(view.worker_id)
        return load.num_waiting_tokens, load.num_requests
