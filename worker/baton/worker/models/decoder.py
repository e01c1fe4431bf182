"""One dense decoder for Llama, Mistral, Qwen2 and Qwen3: from token ids to hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.paged_attention import DecodePlan, PrefillPlan, attend_decode, attend_prefill
from baton.kernels.reference.rms_norm import rms_norm
from baton.kernels.reference.rope_cache import normed_and_rotated, rotation, write_kv
from baton.kernels.reference.silu_mul import silu_mul
from baton.worker.models.config import ModelConfig
from baton.worker.weights.build import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences of like length."""

    tokens: Tensor | None  # their places among the step's tokens; None: the first num_tokens
    num_tokens: int
    plans: dict[int, DecodePlan]  # by window


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk: a run of the step's tokens."""

    start: int
    stop: int
    plans: dict[int, PrefillPlan]  # by window


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of a step share."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    block_ids: Tensor  # [num_tokens] int64, where each token's KV goes
    offsets: Tensor  # [num_tokens] int64, within its block
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]


class Decoder:
    """A model's weights and the order of its ops."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, cos_sin: Tensor) -> None:
        self.config = config
        self._weights = weights
        self._cos_sin = cos_sin
        self._scale = config.head_dim**-0.5
        self._compute_dtype = weights.embed.dtype

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.nbytes for tensor in self._weights.tensors())

    def hidden_states(self, inputs: StepInputs, kv: Tensor, on_layer: Callable[[int], None] | None) -> Tensor:
        """[num_tokens, hidden_size] before the last norm. kv is [num_layers, num_blocks, 2, num_kv_heads, block_size,
        head_dim] and gets the step's keys and values; on_layer is called when a layer's are in."""
        hidden = self._weights.embed.index_select(0, inputs.token_ids)
        cos, sin = rotation(self._cos_sin, inputs.positions)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self._weights.layers):
            cache = kv[index]
            query = self._write_kv(inputs, layer, rms_norm(hidden, layer.input_norm, eps), cache, cos, sin)
            if on_layer is not None:
                on_layer(index)
            attended = self._attend(inputs, query, cache, self.config.windows[index])
            _add_linear(hidden, attended, layer.o, layer.o_bias)
            gate_up = functional.linear(rms_norm(hidden, layer.post_norm, eps), layer.gate_up, layer.gate_up_bias)
            _add_linear(hidden, silu_mul(gate_up), layer.down, layer.down_bias)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab_size] for rows of hidden_states."""
        return functional.linear(rms_norm(hidden, self._weights.norm, self.config.rms_norm_eps), self._weights.lm_head)

    def _write_kv(
        self, inputs: StepInputs, layer: LayerWeights, normed: Tensor, cache: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Stores the layer's keys and values; returns the queries, [num_tokens, num_q_heads, head_dim]."""
        config = self.config
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).view(-1, config.num_qkv_heads, config.head_dim)
        rotated = normed_and_rotated(qkv, cos, sin, num_q, num_kv, layer.q_norm, layer.k_norm, config.rms_norm_eps)
        # Rotated keys go back beside the values, so that one op writes both.
        qkv[:, num_q : num_q + num_kv] = rotated[:, num_q:]
        keys_values = qkv[:, num_q:].view(-1, 2, num_kv, config.head_dim)
        write_kv(cache, inputs.block_ids, inputs.offsets, keys_values)
        return rotated[:, :num_q]

    def _attend(self, inputs: StepInputs, query: Tensor, cache: Tensor, window: int) -> Tensor:
        """[num_tokens, num_q_heads * head_dim]"""
        num_tokens = query.shape[0]
        if len(inputs.decodes) == 1 and not inputs.prefills:
            only = inputs.decodes[0]
            return attend_decode(query, cache, only.plans[window], self._scale).view(num_tokens, -1)
        if len(inputs.prefills) == 1 and not inputs.decodes:
            return attend_prefill(query, cache, inputs.prefills[0].plans[window], self._scale).view(num_tokens, -1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in inputs.decodes:
            if group.tokens is None:
                out[: group.num_tokens] = attend_decode(
                    query[: group.num_tokens], cache, group.plans[window], self._scale
                )
            else:
                out[group.tokens] = attend_decode(query[group.tokens], cache, group.plans[window], self._scale)
        for chunk in inputs.prefills:
            mine = slice(chunk.start, chunk.stop)
            out[mine] = attend_prefill(query[mine], cache, chunk.plans[window], self._scale)
        return out.view(num_tokens, -1)


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """residual += x @ weight^T + bias"""
    residual.addmm_(x, weight.t())
    if bias is not None:
        residual.add_(bias)
