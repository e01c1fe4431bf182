"""llm-d's weighted blend: prefix match 3, queue depth 2, KV memory 2; the highest sum wins, and ties are random.

Each score is in [0, 1]: the matched share of the prompt; the queue relative to the longest and shortest; free memory.
Queue and memory come from the workers' latest reports.
"""

from __future__ import annotations

from bench.policies.peer import Peer

_PREFIX, _QUEUE, _MEMORY = 3.0, 2.0, 2.0


class WeightedBlend(Peer):
    """The default profile of llm-d's endpoint picker, with prefixes from KV events."""

    def choose(self, request, workers):
        cached = self.cached_tokens(request)
        queues = [view.queue_depth for view in workers]
        longest, shortest = max(queues), min(queues)

        def score(view):
            prefix = cached.get(view.worker_id, 0) / max(1, request.num_prompt_tokens)
            queue = 1.0 if longest == shortest else (longest - view.queue_depth) / (longest - shortest)
            memory = view.num_free_blocks / max(1, view.num_blocks)
            return _PREFIX * prefix + _QUEUE * queue + _MEMORY * memory

        scores = {view.worker_id: score(view) for view in workers}
        best = max(scores.values())
        return self.random.choice([view for view in workers if scores[view.worker_id] >= best - 1e-9])
