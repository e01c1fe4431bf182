"""Power of two choices: the less loaded of two random workers."""

from __future__ import annotations

from bench.policies.peer import Peer


class PowerOfTwo(Peer):
    """Load is the number of active requests."""

    uses_index = False

    def choose(self, request, workers):
        pair = self.random.sample(list(workers), min(2, len(workers)))
        return min(pair, key=lambda view: self.load(view.worker_id).num_requests)
