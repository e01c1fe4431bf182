"""A decoder's weights on the device, fused the way the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(q + 2 kv heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(q + 2 kv heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: Tensor  # [hidden, q heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], gates first
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    cos_sin: Tensor  # [max_model_len, head_dim] fp32: cosines, then sines
