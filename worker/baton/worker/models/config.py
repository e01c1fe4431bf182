"""A model as data: its layers, its sizes, what its checkpoint calls its tensors. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.core import HeadKind
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import LayerSpec
from baton.worker.models.names import TensorNames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. Its layers' attention is of one shape, because all share one KV cache."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_embeddings: bool
    initializer_range: float
    dtype: str  # of the checkpoint, by its own word; "" where it does not say
    eos_token_ids: tuple[int, ...]
    names: TensorNames = TensorNames()  # noqa: RUF009 - frozen
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    heads: tuple[HeadKind, ...] = (HeadKind.GENERATE,)  # what requests may ask of it

    @property
    def num_layers(self) -> int:
        """That have KV."""
        return len(self.layers)

    @property
    def num_q_heads(self) -> int:
        """Of each layer."""
        return self.layers[0].attention.num_q_heads

    @property
    def num_kv_heads(self) -> int:
        """Of each layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def num_qkv_heads(self) -> int:
        """Of each layer's fused projection."""
        return self.layers[0].attention.num_qkv_heads

    @property
    def head_dim(self) -> int:
        """Of each layer."""
        return self.layers[0].attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Of the widest layer."""
        return max(layer.mlp.intermediate_size for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """A layer: keys that a query sees, itself included; 0: all."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Each once, in the layers' order."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

    @property
    def max_model_len(self) -> int:
        """Tokens that the positions are made for."""
        return max(self.max_position_embeddings, *(rope.extended_length for rope in self.ropes))
