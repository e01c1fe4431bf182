"""Least loaded: the worker with the fewest active requests, as a load balancer counts connections."""

from __future__ import annotations

from bench.policies.peer import Peer


class LeastLoaded(Peer):
    """Breaks ties by round robin."""

    uses_index = False

    def choose(self, request, workers):
        fewest = min(self.load(view.worker_id).num_requests for view in workers)
        candidates = [view for view in workers if self.load(view.worker_id).num_requests == fewest]
        return candidates[self._last_id % len(candidates)]
