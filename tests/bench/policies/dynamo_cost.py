"""Dynamo's KV router: cost = overlap weight x prefill blocks + decode blocks, the least wins (temperature 0).

Prefill blocks are the worker's prompt tokens under way plus the request's uncached ones, in blocks; decode blocks are
those of the requests active there, the new one included. The router tracks both itself; overlaps come from KV events.
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
