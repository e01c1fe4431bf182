"""Round robin over the workers."""

from __future__ import annotations

from bench.policies.peer import Peer


class RoundRobin(Peer):
    """Places like a plain load balancer."""

    uses_index = False

    def choose(self, request, workers):
        return workers[self._last_id % len(workers)]
