"""The dense decoder's forward pass on a CUDA device. Launches kernels; never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.decode_attention import DecodeWorkspace, decode_attention
from baton.kernels.prefill_attention import PrefillTiles, prefill_attention
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_cache import rope_and_cache
from baton.kernels.silu_mul import silu_mul
from baton.kernels.small_linear import Workspace, small_linear
from baton.worker.cuda.weights import DecoderWeights, LayerWeights

# Up to so many tokens the weights' own kernels, with what is fused into them, beat a matrix product and its neighbours.
MAX_SMALL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers that the forward pass needs."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int
    norm_eps: float

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return float(self.head_dim) ** -0.5


class StepInputs(NamedTuple):
    """One step's tensors, on the device, int32. Sequences that decode one token come first."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    rows: Tensor  # [num_seqs], of the block table
    seq_lens: Tensor  # [num_seqs]
    query_start_loc: Tensor  # [num_seqs + 1]
    num_decodes: int
    tiles: PrefillTiles | None  # of the sequences behind the decodes, numbered from 0


class Decoder:
    """Weights, KV pool and scratch memory of one rank."""

    def __init__(
        self, weights: DecoderWeights, shape: DecoderShape, cache: Tensor, block_table: Tensor, max_seqs: int
    ) -> None:
        device = cache.device
        self.shape = shape
        self.cache = cache  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
        self._weights = weights
        self._block_table = block_table  # [num_rows, max_blocks]
        self._linear = Workspace(device)
        self._decode = DecodeWorkspace(max_seqs, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, device)
        self._prefill_attention = _pick_prefill(cache)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Writes the step's KV and returns the residual stream [num_tokens, hidden], before the last norm."""
        residual = functional.embedding(inputs.tokens, self._weights.embedding)
        small = residual.shape[0] <= MAX_SMALL_TOKENS and inputs.tiles is None
        if small:
            for index, layer in enumerate(self._weights.layers):
                self._small_layer(index, layer, residual, inputs)
            return residual
        update: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            update = self._layer(index, layer, residual, update, inputs)
        assert update is not None
        return residual.add_(update)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] of the residual stream to [n, vocab]."""
        weights = self._weights
        if hidden.shape[0] <= MAX_SMALL_TOKENS:
            return small_linear(hidden, weights.head, self._linear, norm=weights.norm, eps=self.shape.norm_eps)
        return functional.linear(rms_norm(hidden, weights.norm, self.shape.norm_eps), weights.head)

    def _small_layer(self, index: int, layer: LayerWeights, residual: Tensor, inputs: StepInputs) -> None:
        """Five or six launches: every norm, gate and addition is part of the linear beside it."""
        eps = self.shape.norm_eps
        if layer.qkv_bias is None:
            qkv = small_linear(residual, layer.qkv, self._linear, norm=layer.input_norm, eps=eps)
        else:
            qkv = functional.linear(rms_norm(residual, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        mixed = self._attention(index, layer, qkv, inputs)
        small_linear(mixed, layer.out, self._linear, residual=residual, out=residual)
        gated = small_linear(residual, layer.gate_up, self._linear, norm=layer.post_norm, eps=eps, gated=True)
        small_linear(gated, layer.down, self._linear, residual=residual, out=residual)

    def _layer(
        self, index: int, layer: LayerWeights, residual: Tensor, update: Tensor | None, inputs: StepInputs
    ) -> Tensor:
        """Returns what is still to be added to the residual stream."""
        eps = self.shape.norm_eps
        normed = (
            rms_norm(residual, layer.input_norm, eps)
            if update is None
            else rms_norm(update, layer.input_norm, eps, residual=residual)
        )
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        mixed = functional.linear(self._attention(index, layer, qkv, inputs), layer.out)
        normed = rms_norm(mixed, layer.post_norm, eps, residual=residual)
        return functional.linear(silu_mul(functional.linear(normed, layer.gate_up)), layer.down)

    def _attention(self, index: int, layer: LayerWeights, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """RoPE, the write of K and V, and attention: [num_tokens, q heads * head_dim]."""
        shape = self.shape
        cache = self.cache[index]
        rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mapping,
            self._weights.cos_sin,
            shape.num_q_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=shape.norm_eps,
        )
        num_tokens = qkv.shape[0]
        width = shape.num_q_heads * shape.head_dim
        query = qkv[:, :width].unflatten(1, (shape.num_q_heads, shape.head_dim))
        out = torch.empty(num_tokens, width, dtype=qkv.dtype, device=qkv.device)
        heads = out.view(num_tokens, shape.num_q_heads, shape.head_dim)
        decodes = inputs.num_decodes
        if decodes:
            decode_attention(
                query[:decodes],
                cache,
                self._block_table,
                inputs.rows[:decodes],
                inputs.seq_lens[:decodes],
                shape.scale,
                self._decode,
                out=heads[:decodes],
            )
        if inputs.tiles is not None:
            self._prefill_attention(
                query,
                cache,
                self._block_table,
                inputs.rows[decodes:],
                inputs.seq_lens[decodes:],
                inputs.query_start_loc[decodes:],
                inputs.tiles,
                shape.scale,
                out=heads,
            )
        return out


def _pick_prefill(cache: Tensor) -> Callable[..., Tensor]:
    """The Hopper kernel where card and shape allow it."""
    head_dim, block_size = cache.shape[-1], cache.shape[-2]
    hopper = torch.cuda.get_device_capability(cache.device)[0] == 9
    if hopper and cache.dtype != torch.float32 and head_dim in (64, 128) and block_size in (16, 32, 64, 128):
        from baton.kernels.prefill_attention_hopper import prefill_attention_hopper

        return prefill_attention_hopper
    return prefill_attention
