"""Fixed rules for disaggregation over Dynamo's cost: remote where enough of the prompt is uncached on the decoder."""

from __future__ import annotations

from bench.policies.dynamo_cost import LinearCost


class Threshold(LinearCost):
    """Remote from so many uncached tokens on, if they are at least such a share of the prompt."""

    min_uncached = 0
    min_share = 0.0

    def __init__(self, parts):
        super().__init__(parts)
        self._waiting: dict[str, int] = {}  # prompt tokens under way, by prefill worker
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
    """Every prompt, whatever is cached."""


class Never(Threshold):
    """No prompt."""

    min_uncached = 1 << 62


class Uncached256(Threshold):
    """llm-d's default: 256 uncached tokens."""

    min_uncached = 256


class Uncached2048AndShare(Threshold):
    """Dynamo's default: 2,048 uncached tokens that are 0.7 of the prompt."""

    min_uncached = 2048
    min_share = 0.7
