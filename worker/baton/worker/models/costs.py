"""The arithmetic and the memory traffic of steps, from a model's shapes. Measures nothing.

FLOPs are those of matrix products, two for each multiply-add: linears of every computed token, scores and sums of
attention for every key that a query sees, logits of every sampled token. Reads are the weights once a step, of experts
those that the step is expected to touch, and the KV that attention sees; writes are new KV. Activations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.worker.core import HeadKind, Int32
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.config import ModelConfig


class StepCost(NamedTuple):
    """The cost of one step."""

    flops: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Layers with one window."""

    num_layers: int
    q_size: int
    window: int  # keys; 0: all
    causal: bool = True
    decode_size: int = 0  # that of rows of one token; 0: q_size


@dataclass(frozen=True, slots=True)
class ExpertsCost:
    """Layers with experts of one kind."""

    num_bytes: float  # of all experts of these layers
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What one token costs."""

    token_flops: int  # linears of all layers
    sample_flops: int  # logits
    attention: tuple[AttentionCost, ...]
    dense_bytes: float  # weights that every step reads
    experts: tuple[ExpertsCost, ...]
    kv_layer_bytes: float  # of one token in one layer

    def of_step(self, num_computed: Int32, num_scheduled: Int32, num_samples: int) -> StepCost:
        """Returns the cost of a step whose rows compute `num_scheduled` tokens after `num_computed` ones."""
        computed, scheduled = num_computed.astype(np.float64), num_scheduled.astype(np.float64)
        num_tokens = float(scheduled.sum())
        flops = self.token_flops * num_tokens + self.sample_flops * num_samples
        seen_bytes = 0.0
        for layers in self.attention:
            see = _seen if layers.causal else _seen_by_all
            pairs, keys = see(computed, scheduled, layers.window)
            flops += 4.0 * layers.num_layers * layers.q_size * pairs
            if layers.decode_size:
                decodes, _ = see(computed[scheduled == 1], scheduled[scheduled == 1], layers.window)
                flops += 4.0 * layers.num_layers * (layers.decode_size - layers.q_size) * decodes
            seen_bytes += layers.num_layers * self.kv_layer_bytes * keys
        weights = self.dense_bytes
        for one in self.experts:
            weights += one.num_bytes * (1.0 - (1.0 - one.top_k / one.num_experts) ** num_tokens)
        num_layers = sum(layers.num_layers for layers in self.attention)
        return StepCost(flops, weights + seen_bytes, num_layers * self.kv_layer_bytes * num_tokens)


def active_values(config: ModelConfig) -> int:
    """Returns how many weights of its layers a token is multiplied with. For models that Baton's layers compute."""
    return sum(_active_values(config.hidden_size, layer) for layer in config.layers)


def model_costs(config: ModelConfig, weight_bytes: int, spec: KvSpec) -> ModelCosts:
    """Returns the costs of a model whose weights have so many bytes together."""
    head = config.hidden_size * config.vocab_size
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsSpec)]
    expert_values = [one.router.num_experts * _expert_values(config.hidden_size, one) for one in experts]
    if config.transformers is None:
        active = active_values(config)
        idle = [
            values - _active_experts(config.hidden_size, one)
            for values, one in zip(expert_values, experts, strict=True)
        ]
        total = active + sum(idle) + head * (1 if config.tie_embeddings else 2)
    else:
        # The specs describe attention alone: every value of the weights besides the embedding counts.
        total = weight_bytes // _value_bytes(config.dtype)
        active = total - head * (1 if config.tie_embeddings else 2)
    bytes_per_value = weight_bytes / max(1, total)
    generates = HeadKind.GENERATE in config.heads
    embedding = 0 if config.tie_embeddings and generates else head  # of which a step reads few rows
    states = set(config.state_layers)  # whose cost does not grow with the tokens before
    windows = [window for layer, window in enumerate(config.windows) if layer not in states]
    return ModelCosts(
        token_flops=2 * active,
        sample_flops=2 * head if generates else 0,
        attention=tuple(_attention_cost(config, window, windows.count(window)) for window in dict.fromkeys(windows)),
        dense_bytes=bytes_per_value * (total - sum(expert_values) - embedding),
        experts=tuple(
            ExpertsCost(bytes_per_value * values, one.router.num_experts, one.router.top_k)
            for values, one in zip(expert_values, experts, strict=True)
        ),
        kv_layer_bytes=spec.bytes_per_block / spec.block_size / len(windows) if config.cached else 0.0,
    )


def _attention_cost(config: ModelConfig, window: int, count: int) -> AttentionCost:
    """Returns the cost of `count` layers with a window. A pair costs twice the mean width of its key and its value."""
    first = config.attention
    if isinstance(first, LatentSpec):
        absorbed = first.num_q_heads * (first.head_dim + first.kv_rank) // 2
        return AttentionCost(count, (first.projected_size + first.attended_size) // 2, window, decode_size=absorbed)
    return AttentionCost(count, config.num_q_heads * config.head_dim, window, config.cached)


def _seen(computed: np.ndarray, scheduled: np.ndarray, window: int) -> tuple[float, float]:
    """Returns the pairs of query and key, and the keys that some query of their row sees."""
    if not window:
        return float((scheduled * computed + scheduled * (scheduled + 1) / 2).sum()), float(
            (computed + scheduled).sum()
        )
    growing = np.clip(window - computed, 0, scheduled)  # queries that see all keys before them
    pairs = growing * computed + growing * (growing + 1) / 2 + (scheduled - growing) * window
    return float(pairs.sum()), float(np.minimum(computed + scheduled, window + scheduled - 1).sum())


def _seen_by_all(computed: np.ndarray, scheduled: np.ndarray, window: int) -> tuple[float, float]:
    """Returns the same where queries see the keys behind them too."""
    keys = np.minimum(scheduled, 2 * window - 1) if window else scheduled
    return float((scheduled * keys).sum()), float(scheduled.sum())


def _active_values(hidden: int, layer: LayerSpec) -> int:
    """Returns the values of a layer's linears that one token is multiplied with."""
    values = layer.attention.num_weights(hidden)
    if isinstance(layer.mlp, MlpSpec):
        return values + _mlp_values(hidden, layer.mlp)
    values += hidden * layer.mlp.router.num_experts + _active_experts(hidden, layer.mlp)
    if layer.mlp.shared is not None:
        values += _mlp_values(hidden, layer.mlp.shared) + (hidden if layer.mlp.shared_gate else 0)
    return values


def _active_experts(hidden: int, experts: ExpertsSpec) -> int:
    return experts.router.top_k * _expert_values(hidden, experts)


def _expert_values(hidden: int, experts: ExpertsSpec) -> int:
    return (experts.gate.num_parts + 1) * hidden * experts.intermediate_size


def _mlp_values(hidden: int, mlp: MlpSpec) -> int:
    return (3 if mlp.gated else 2) * hidden * mlp.intermediate_size


def _value_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
