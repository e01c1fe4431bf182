"""How many tokens and requests of a model fit into memory, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.kv_spec import BYTES_PER_VALUE
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import kv_spec_of


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory for weights and KV. The largest step needs more, which only a start measures."""

    memory_bytes: int  # for weights and KV together
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        return max(0, self.memory_bytes - self.weight_bytes) // self.kv_bytes_per_token

    @property
    def concurrency(self) -> float:
        """Requests of the greatest length whose KV fits."""
        return self.kv_tokens / self.max_model_len


def kv_bytes_per_token(model: ModelConfig, dtype: str, block_size: int = 16) -> int:
    """Returns the bytes of one token's KV in all layers. `dtype` is the cache's."""
    return kv_spec_of(model, bytes(16), block_size, dtype).bytes_per_block // block_size


def weight_bytes(num_values: int, dtype: str) -> int:
    """Returns the bytes of unquantized weights, converted to a dtype."""
    return num_values * BYTES_PER_VALUE[dtype]
