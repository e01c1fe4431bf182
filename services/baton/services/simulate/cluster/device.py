"""The simulated device: how many seconds a step takes, how fast KV moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest
from baton.worker.core import StepPlan


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Seconds of a step as a sum over what is in it. The defaults fit an 8B model, bf16, on one H200."""

    base: float = 4.4e-3
    per_prefill_token: float = 22e-6
    per_prefill_pair: float = 1.0e-9  # for each prompt token and each token before it
    per_decode_request: float = 12e-6
    per_context_token: float = 30e-9  # of the requests that decode
    transfer_bytes_per_second: float = 50e9  # of one worker's port, each way
    kv_bytes_per_token: int = 131_072

    def validate(self) -> None:
        """Raises InvalidRequest for a device that cannot be."""
        for name in ("per_prefill_token", "transfer_bytes_per_second", "kv_bytes_per_token"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", field=name)
        for name in ("base", "per_prefill_pair", "per_decode_request", "per_context_token"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must not be negative", field=name)

    def step_seconds(self, plan: StepPlan, num_drafts: int = 0) -> float:
        """Returns how long the plan takes. A draft takes as long as a request that decodes."""
        seconds = self._step_seconds(plan)
        return seconds + self.per_decode_request * num_drafts if num_drafts else seconds

    def _step_seconds(self, plan: StepPlan) -> float:
        num_decodes = plan.num_decodes
        num_context = int(plan.num_computed_tokens[:num_decodes].sum())
        if num_decodes == len(plan.rows):
            return self.decode_seconds(num_decodes, num_context)
        num_prefill = num_pairs = 0
        chunks = plan.num_scheduled_tokens[num_decodes:].tolist()
        for chunk, computed in zip(chunks, plan.num_computed_tokens[num_decodes:].tolist(), strict=True):
            num_prefill += chunk
            num_pairs += chunk * (2 * computed + chunk) // 2
        return self.decode_seconds(num_decodes, num_context) + self.prefill_seconds(num_prefill, num_pairs)

    def decode_seconds(self, num_decodes: int, num_context: int) -> float:
        """Returns the seconds of a step that only decodes."""
        return self.base + self.per_decode_request * num_decodes + self.per_context_token * num_context

    def prefill_seconds(self, num_tokens: int, num_pairs: int) -> float:
        """Returns the seconds that prompt tokens add to a step."""
        return self.per_prefill_token * num_tokens + self.per_prefill_pair * num_pairs

    def prompt_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        """Returns the seconds to compute a prompt's uncached tokens, alone and in one step."""
        computed = num_tokens - num_cached
        return self.base + self.prefill_seconds(computed, computed * (num_tokens + num_cached) // 2)
