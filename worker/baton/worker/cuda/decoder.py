"""The dense decoder's forward pass on a CUDA device. Launches kernels; never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.decode_attention import DecodeWorkspace, decode_attention
from baton.kernels.prefill_attention import PrefillTiles, prefill_attention
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_cache import rope_and_cache
from baton.kernels.silu_mul import silu_mul
from baton.kernels.small_linear import MAX_TOKENS, Workspace, small_linear
from baton.worker.model.config import ModelConfig
from baton.worker.model.weights import LayerWeights, ModelWeights

# Up to so many tokens every linear of ours, with what is fused into it, beats a matrix product and its neighbours;
# up to MAX_TOKENS those that add to the residual stream do.
MAX_SMALL_TOKENS = 16


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
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cos_sin: Tensor,
        cache: Tensor,
        block_table: Tensor,
        max_seqs: int,
    ) -> None:
        device = cache.device
        self.cache = cache  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
        self._config = config
        self._weights = weights
        self._cos_sin = cos_sin  # [max_model_len, head_dim] fp32
        self._block_table = block_table  # [num_rows, max_blocks]
        self._scale = float(config.head_dim) ** -0.5
        self._linear = Workspace(device)
        self._decode = DecodeWorkspace(max_seqs, config.num_q_heads, config.num_kv_heads, config.head_dim, device)
        self._fast_prefill = _fast_prefill(cache)
        self._fuses = not (config.o_bias or config.mlp_bias)  # the fused linears have no bias

    def forward(self, inputs: StepInputs) -> Tensor:
        """Writes the step's KV and returns the residual stream [num_tokens, hidden], before the last norm."""
        residual = functional.embedding(inputs.tokens, self._weights.embed)
        if residual.shape[0] <= MAX_SMALL_TOKENS and inputs.tiles is None and self._fuses:
            for index, layer in enumerate(self._weights.layers):
                self._small_layer(index, layer, residual, inputs)
            return residual
        update: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            update = self._layer(index, layer, residual, update, inputs)
        return residual if update is None else residual.add_(update)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] of the residual stream to [n, vocab]."""
        weights = self._weights
        if hidden.shape[0] <= MAX_SMALL_TOKENS:
            return small_linear(hidden, weights.lm_head, self._linear, norm=weights.norm, eps=self._config.rms_norm_eps)
        return functional.linear(rms_norm(hidden, weights.norm, self._config.rms_norm_eps), weights.lm_head)

    def _small_layer(self, index: int, layer: LayerWeights, residual: Tensor, inputs: StepInputs) -> None:
        """Six launches: every norm, gate and addition is part of the linear beside it."""
        eps = self._config.rms_norm_eps
        if layer.qkv_bias is None:
            qkv = small_linear(residual, layer.qkv, self._linear, norm=layer.input_norm, eps=eps)
        else:
            qkv = functional.linear(rms_norm(residual, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        mixed = self._attention(index, layer, qkv, inputs)
        small_linear(mixed, layer.o, self._linear, residual=residual, out=residual)
        gated = small_linear(residual, layer.gate_up, self._linear, norm=layer.post_norm, eps=eps, gated=True)
        small_linear(gated, layer.down, self._linear, residual=residual, out=residual)

    def _layer(
        self, index: int, layer: LayerWeights, residual: Tensor, update: Tensor | None, inputs: StepInputs
    ) -> Tensor | None:
        """Returns what is still to be added to the residual stream."""
        eps = self._config.rms_norm_eps
        few = residual.shape[0] <= MAX_TOKENS and self._fuses
        if update is None:
            normed = rms_norm(residual, layer.input_norm, eps)
        else:
            normed = rms_norm(update, layer.input_norm, eps, residual=residual)
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        mixed = self._attention(index, layer, qkv, inputs)
        if few:
            small_linear(mixed, layer.o, self._linear, residual=residual, out=residual)
            normed = rms_norm(residual, layer.post_norm, eps)
        else:
            mixed = functional.linear(mixed, layer.o, layer.o_bias)
            normed = rms_norm(mixed, layer.post_norm, eps, residual=residual)
        gated = silu_mul(functional.linear(normed, layer.gate_up, layer.gate_up_bias))
        if few:
            small_linear(gated, layer.down, self._linear, residual=residual, out=residual)
            return None
        return functional.linear(gated, layer.down, layer.down_bias)

    def _attention(self, index: int, layer: LayerWeights, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """RoPE, the write of K and V, and attention: [num_tokens, q heads * head_dim]."""
        config = self._config
        cache = self.cache[index]
        rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mapping,
            self._cos_sin,
            config.num_q_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        num_tokens = qkv.shape[0]
        width = config.num_q_heads * config.head_dim
        query = qkv[:, :width].unflatten(1, (config.num_q_heads, config.head_dim))  # type: ignore[no-untyped-call]
        out = torch.empty(num_tokens, width, dtype=qkv.dtype, device=qkv.device)
        heads = out.view(num_tokens, config.num_q_heads, config.head_dim)
        window = config.windows[index]
        decodes = inputs.num_decodes
        if decodes:
            decode_attention(
                query[:decodes],
                cache,
                self._block_table,
                inputs.rows[:decodes],
                inputs.seq_lens[:decodes],
                self._scale,
                self._decode,
                out=heads[:decodes],
                window=window,
            )
        if inputs.tiles is not None:
            # The decodes' rows come first in query_start_loc too, so the chunks' offsets are theirs already.
            arguments = (
                query,
                cache,
                self._block_table,
                inputs.rows[decodes:],
                inputs.seq_lens[decodes:],
                inputs.query_start_loc[decodes:],
                inputs.tiles,
                self._scale,
            )
            if self._fast_prefill is not None and not window:
                self._fast_prefill(*arguments, out=heads)
            else:
                prefill_attention(*arguments, out=heads, window=window)
        return out


def _fast_prefill(cache: Tensor) -> Callable[..., Tensor] | None:
    """The Hopper kernel where card and shape allow it."""
    head_dim, block_size = cache.shape[-1], cache.shape[-2]
    hopper = torch.cuda.get_device_capability(cache.device)[0] == 9
    if hopper and cache.dtype != torch.float32 and head_dim in (64, 128) and block_size in (16, 32, 64, 128):
        from baton.kernels.prefill_attention_hopper import prefill_attention_hopper

        return prefill_attention_hopper
    return None
