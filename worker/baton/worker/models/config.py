"""The description of a model: its layers, its sizes and the names of its tensors. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from baton.worker.core import HeadKind
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import AttentionSpec, ExpertsSpec, LayerSpec, NormSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, Pick, PoolerSpec
from baton.worker.models.transformers_backend.spec import TransformersSpec


@dataclass(frozen=True, slots=True)
class WeightsInFormat:
    """The weight format of a checkpoint."""

    name: str
    executors: tuple[str, ...]  # that compute it
    settings: str  # JSON, which the values of weights depend on
    # Returns the WeightFormat, whose modules load PyTorch. Raises InvalidRequest for settings that it does not support.
    made: Callable[[], Any] = field(compare=False)
    online: bool = False  # made of an unquantized checkpoint while it loads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder or an encoder. Attention has one shape in all layers, because they share one KV cache."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tie_embeddings: bool
    initializer_range: float
    dtype: str  # of the checkpoint, as its config states it; "" if it does not
    eos_token_ids: tuple[int, ...]
    names: TensorNames = TensorNames()  # noqa: RUF009 - frozen
    text_part: bool = False  # of a model that reads images too
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    lm_head_bias: bool = False
    logits_soft_cap: float = 0.0  # logits are soft_cap * tanh(logit / soft_cap); 0: not capped
    learned_positions: bool = False  # the checkpoint has an embedding for each position
    position_offset: int = 0  # the embedding of the first position; those before it are unused
    num_token_types: int = 0  # one for each text of a pair; 0: the model has none
    embedding_norm: bool = False
    final_norm: bool = True
    heads: tuple[HeadKind, ...] = (HeadKind.GENERATE,)  # that requests may use
    pooler: PoolerSpec | None = None  # of the head POOL
    default_pick: Pick = "last"  # of embeddings, where the folder does not say what
    classifier: ClassifierSpec = ClassifierSpec()  # noqa: RUF009 - frozen
    # If Transformers computes the layers, whose specs then describe their attention alone; None: a family of ours.
    transformers: TransformersSpec | None = None
    weight_format: WeightsInFormat | None = None  # None: unquantized

    @property
    def cached(self) -> bool:
        """Whether keys and values are kept from step to step. If not, each step computes whole prompts."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def implementation(self) -> str:
        """What computes the layers, for people."""
        return "Baton" if self.transformers is None else f"Transformers {self.transformers.version}"

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can hold the forward pass."""
        return self.transformers is None or not self.transformers.reads_values

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec | LatentSpec:
        """The first layer's attention, of those that keep something of every token."""
        found = (layer.attention for layer in self.layers)
        return next(each for each in found if not isinstance(each, StateSpec))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state instead of their tokens."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.attention, StateSpec))

    @property
    def num_q_heads(self) -> int:
        return self.attention.num_q_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def projected_size(self) -> int:
        """Width of what a layer's attention takes of a token."""
        return max(layer.attention.projected_size for layer in self.layers)

    @property
    def attended_size(self) -> int:
        """Width of a layer's attention's output."""
        return max(layer.attention.attended_size for layer in self.layers)

    @property
    def rope_head_dim(self) -> int:
        """Values that RoPE's tables are for."""
        return self.attention.rope_head_dim

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Values between the linears of the widest MLP, of one token."""
        return max(layer.mlp.token_width for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Keys that a query attends to, including its own, per layer; 0: all."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The first layer's experts, of those that have some."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec)), None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Distinct RoPE configs, in the order of the layers."""
        found = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(each.rope for each in found if not isinstance(each, StateSpec)))

    def at_length(self, wanted: int) -> ModelConfig:
        """Returns the config of a model that serves sequences of up to `wanted` tokens; 0: max_model_len."""
        longest = max(self.max_model_len, *(rope.longest_length for rope in self.ropes))
        length = min(wanted or self.max_model_len, longest)
        ropes = {rope: rope.at_length(length, self.rope_head_dim) for rope in self.ropes}
        if all(rope is resolved for rope, resolved in ropes.items()):
            return self
        layers = (
            layer
            if isinstance(layer.attention, StateSpec)
            else replace(layer, attention=replace(layer.attention, rope=ropes[layer.attention.rope]))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers), max_position_embeddings=max(self.max_position_embeddings, length))

    @property
    def max_model_len(self) -> int:
        """Tokens that the positions support, with extended RoPE, and the pooler takes."""
        longest = max(self.max_position_embeddings, *(rope.extended_length for rope in self.ropes))
        longest -= self.position_offset
        return min(longest, self.pooler.max_tokens) if self.pooler and self.pooler.max_tokens else longest
