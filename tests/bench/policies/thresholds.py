"""Fixed rules for disaggregation with Dynamo's cost: a remote prefill if the decode worker lacks enough tokens."""

from __future__ import annotations

from bench.policies.dynamo_cost import LinearCost


class Threshold(LinearCost):
    """Prefills remotely from `min_uncached` tokens on, if they are at least `min_share` of the prompt."""

    min_uncached = 0
    min_share = 0.0

    def __init__(self, parts):
        super().__init__(parts)
        self._waiting: dict[str, int] = {}  # waiting prompt tokens, by prefill worker
        self._remote: dict[int, tuple[str, int]] = {}

    def choose_prefill(self, request, decode, views, cached):
        uncached = request.num_prompt_tokens - cached
        if uncached < self.min_uncached or uncached < self.min_share * request.num_prompt_tokens:
            return None
        held = self.cached_tokens(request)
        prefills = [view for view in views if view.can_prefill_for_others and view.worker_id != decode.worker_id]
        if not prefills:
            return None

        def cost(view):
            return self._waiting.get(view.worker_id, 0) + request.num_prompt_tokens - held.get(view.worker_id, 0)

        chosen = min(prefills, key=cost)
        own = held.get(chosen.worker_id, 0)
        self._remote[self._last_id + 1] = chosen.worker_id, request.num_prompt_tokens - own
        self._waiting[chosen.worker_id] = self._waiting.get(chosen.worker_id, 0) + request.num_prompt_tokens - own
        return chosen, own

    def first_token(self, placement_id):
        super().first_token(placement_id)
        remote = self._remote.pop(placement_id, None)
        if remote is not None:
            self._waiting[remote[0]] -= remote[1]


class Always(Threshold):
    """Prefills every prompt remotely."""


class Never(Threshold):
    """Prefills no prompt remotely."""

    min_uncached = 1 << 62


class Uncached256(Threshold):
    """llm-d's default: 256 uncached tokens."""

    min_uncached = 256


class Uncached2048AndShare(Threshold):
    """Dynamo's default: 2,048 uncached tokens that are at least 0.7 of the prompt."""

    min_uncached = 2048
    min_share = 0.7
