"""A model's weights on a device, fused for few launches, and the ways to get them. Knows no files' format."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.worker.models.config import ModelConfig
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.kv_scales import is_kv_scale

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

# The tensor of a checkpoint's name and shape; it is copied, so a view will do.
Source = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [num_qkv_heads * head_dim, hidden_size]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Tensor  # [hidden_size, num_q_heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size], gates first
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a dense decoder."""

    embed: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]; embed itself where tied

    def tensors(self) -> list[Tensor]:
        """Each once, in an order that models of one architecture share."""
        own = [self.embed, self.norm, *([] if self.lm_head is self.embed else [self.lm_head])]
        of_layers = [getattr(layer, one.name) for layer in self.layers for one in dataclasses.fields(layer)]
        return own + [tensor for tensor in of_layers if tensor is not None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelWeights:
        """The same weights, each tensor changed, a shared one once."""
        embed = change(self.embed)

        def layer_of(layer: LayerWeights) -> LayerWeights:
            tensors = {one.name: getattr(layer, one.name) for one in dataclasses.fields(layer)}
            changed: dict[str, Any] = {name: None if one is None else change(one) for name, one in tensors.items()}
            return LayerWeights(**changed)

        layers = tuple(map(layer_of, self.layers))
        lm_head = embed if self.lm_head is self.embed else change(self.lm_head)
        return ModelWeights(embed, layers, change(self.norm), lm_head)


def pinned(tensor: Tensor) -> Tensor:
    """A copy in host memory that a device reads fast."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor)


def load_weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU
) -> ModelWeights:
    """Copies a checkpoint's tensors to the device, converted. Raises InvalidRequest for a missing or misshapen one."""
    used: set[str] = set()

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        used.add(name)
        return checkpoint.tensor(name, shape)

    weights = build_weights(config, source, dtype, device)
    unused = [name for name in checkpoint.names if name not in used and not _is_redundant(name, config)]
    if unused:
        _log.warning("%d tensors of %s are not used: %s", len(unused), checkpoint.folder, ", ".join(unused[:4]))
    return weights


def dummy_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU) -> ModelWeights:
    """Random weights, the same for a seed on every device of a kind: a model of the right shape that makes no sense."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(shape, dtype=dtype, device=device).normal_(
            0.0, config.initializer_range, generator=generator
        )

    return build_weights(config, source, dtype, device)


def build_weights(config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device = _CPU) -> ModelWeights:
    """Fuses what `source` gives."""
    hidden, vocab = config.hidden_size, config.vocab_size

    def fused(parts: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        return _fused(source, dtype, device, parts)

    embed = fused([("model.embed_tokens.weight", (vocab, hidden))])
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(config, fused, layer) for layer in range(config.num_layers)),
        norm=fused([("model.norm.weight", (hidden,))]),
        lm_head=embed if config.tie_embeddings else fused([("lm_head.weight", (vocab, hidden))]),
    )


def _layer(
    config: ModelConfig, fused: Callable[[list[tuple[str, tuple[int, ...]]]], Tensor], layer: int
) -> LayerWeights:
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    prefix = f"model.layers.{layer}."
    qkv = [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)]
    gate_up = [("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)]

    def matrix(parts: list[tuple[str, int]], width: int) -> Tensor:
        return fused([(f"{prefix}{name}.weight", (size, width)) for name, size in parts])

    def vector(parts: list[tuple[str, int]], suffix: str, wanted: bool = True) -> Tensor | None:
        return fused([(f"{prefix}{name}.{suffix}", (size,)) for name, size in parts]) if wanted else None

    def norm(name: str) -> Tensor:
        return fused([(f"{prefix}{name}.weight", (hidden,))])

    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=matrix(qkv, hidden),
        qkv_bias=vector(qkv, "bias", config.qkv_bias),
        q_norm=vector([("self_attn.q_norm", head_dim)], "weight", config.qk_norm),
        k_norm=vector([("self_attn.k_norm", head_dim)], "weight", config.qk_norm),
        o=matrix([("self_attn.o_proj", hidden)], q_size),
        o_bias=vector([("self_attn.o_proj", hidden)], "bias", config.o_bias),
        post_norm=norm("post_attention_layernorm"),
        gate_up=matrix(gate_up, hidden),
        gate_up_bias=vector(gate_up, "bias", config.mlp_bias),
        down=matrix([("mlp.down_proj", hidden)], ffn),
        down_bias=vector([("mlp.down_proj", hidden)], "bias", config.mlp_bias),
    )


def _fused(
    source: Source, dtype: torch.dtype, device: torch.device, parts: list[tuple[str, tuple[int, ...]]]
) -> Tensor:
    """The parts one after the other along their first dimension, in memory of their own."""
    rows = sum(shape[0] for _, shape in parts)
    out = torch.empty((rows, *parts[0][1][1:]), dtype=dtype, device=device)
    start = 0
    for name, shape in parts:
        out[start : start + shape[0]] = source(name, shape)
        start += shape[0]
    return out


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq") or is_kv_scale(name):
        return True
    return config.tie_embeddings and name == "lm_head.weight"
