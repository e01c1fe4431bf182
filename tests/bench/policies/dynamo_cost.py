"""Dynamo's KV router: cost = overlap weight x prefill blocks + decode blocks. The lowest cost wins (temperature 0).

Prefill blocks are the worker's waiting prompt tokens plus the request's uncached ones, in blocks. Decode blocks are
those of its active requests, including the new one. The router tracks both itself. Overlaps come from KV events.
"""

from __future__ import annotations

from bench.policies.peer import Peer

_OVERLAP_WEIGHT = 1.0


class LinearCost(Peer):
    """Ties go to a random worker."""

    def choose(self, request, workers):
        cached = self.cached_tokens(request)
        costs = {view.worker_id: self._cost(view, request, cached.get(view.worker_id, 0)) for view in workers}
        least = min(costs.values())
        return self.random.choice([view for view in workers if costs[view.worker_id] == least])

    def _cost(self, view, request, cached):
        load = self.load(view.worker_id)
        waiting = load.num_waiting_tokens + request.num_prompt_tokens - cached
        active = load.num_prompt_tokens + request.num_prompt_tokens
        return (_OVERLAP_WEIGHT * waiting + active) / view.block_size
