"""Round robin: each worker in its turn."""

from __future__ import annotations

from bench.policies.peer import Peer


class RoundRobin(Peer):
    """What a plain load balancer does."""

    uses_index = False

    def choose(self, request, workers):
        return workers[self._last_id % len(workers)]
