"""The dense decoder's forward pass on a CUDA device. Launches kernels; never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.decode_attention import DecodeWorkspace, cut_for_decode, decode_attention
from baton.kernels.decode_cuts import DecodeCuts
from baton.kernels.matmul import matmul
from baton.kernels.prefill_attention import TILE_ROWS, PrefillTiles, make_tiles, prefill_attention
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_cache import rope_and_cache
from baton.kernels.silu_mul import silu_mul
from baton.kernels.small_linear import MAX_TOKENS, Workspace, small_linear
from baton.worker.models.config import ModelConfig
from baton.worker.weights.build import LayerWeights, ModelWeights

if TYPE_CHECKING:
    from baton.kernels.prefill_attention_hopper import PrefillWorkspace

# Up to so many tokens every linear of ours, with what is fused into it, beats a matrix product and its neighbours;
# up to MAX_TOKENS those that add to the residual stream do.
MAX_SMALL_TOKENS = 16
# From so many tokens on a matrix product that adds its result to the residual stream saves more traffic than it costs.
MIN_SUMMING_TOKENS = 1024


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
    cuts: dict[int, list[DecodeCuts]]  # of the decodes, as Decoder.cut returns them


class DecoderPieces(Protocol):
    """Memory that graphs read and write, and the graphs."""

    inputs: Tensor  # [3, max_tokens] int32: tokens, positions, slot mapping
    residual: Tensor  # [max_tokens, hidden]
    qkv: Tensor  # [max_tokens, (q + 2 kv heads) * head_dim]
    mixed: Tensor  # [max_tokens, q heads * head_dim]

    def begin(self, inputs: StepInputs) -> int:
        """Takes a step's inputs over. Returns the size to replay."""

    def replay(self, size: int, index: int) -> None:
        """Queues piece `index`."""


class Decoder:
    """Weights, KV pool and scratch memory of one rank.

    `batch_invariant`: a token's result is the same, bit for bit, whatever else the step computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cos_sin: Tensor,
        cache: Tensor,
        block_table: Tensor,
        max_seqs: int,
        *,
        kv_scale: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> None:
        device = cache.device
        # Called when a layer's KV of the step is queued to be written, with the layer.
        self.on_written: Callable[[int], None] | None = None
        self.cache = cache  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
        self._config = config
        self._weights = weights
        self._cos_sin = cos_sin  # [max_model_len, head_dim] fp32
        self._block_table = block_table  # [num_rows, max_blocks]
        # [2, num_kv_heads] fp32 a layer, of a quantized pool. Each in memory of its own, so that all are aligned alike.
        self._kv_scales = [None if kv_scale is None else kv_scale[layer].clone() for layer in range(config.num_layers)]
        self._invariant = batch_invariant
        self._max_seqs = max_seqs
        self._scale = float(config.head_dim) ** -0.5
        self._workspace = Workspace(device)
        self._decode = DecodeWorkspace(
            max_seqs, config.num_q_heads, config.num_kv_heads, config.head_dim, device, batch_invariant=batch_invariant
        )
        # Of Hopper's kernel, where card and shape allow it.
        self._prefill = None if batch_invariant else _prefill_workspace(cache, config.num_q_heads)
        self._fuses = not (config.o_bias or config.mlp_bias)  # the fused linears have no bias

    @property
    def weights(self) -> ModelWeights:
        """In use."""
        return self._weights

    @weights.setter
    def weights(self, weights: ModelWeights) -> None:
        """Graphs that were captured before read the old ones."""
        self._weights = weights

    def reset(self) -> None:
        """After a step that failed midway: what launches leave behind for one another is as at the start."""
        self._workspace.arrived.zero_()
        self._decode.arrived.zero_()
        if self._prefill is not None:
            self._prefill.arrived.zero_()

    def tiles(self, chunk_lens: list[int], prefix_lens: list[int]) -> PrefillTiles:
        """For StepInputs, of chunks behind their cached prefixes."""
        num_q_heads = 0 if self._prefill is None else self._config.num_q_heads
        return make_tiles(chunk_lens, prefix_lens, TILE_ROWS, self.cache.device, num_q_heads)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Writes the step's KV and returns the residual stream [num_tokens, hidden], before the last norm."""
        residual = functional.embedding(inputs.tokens, self._weights.embed)
        in_place = self._in_place_layer(inputs)
        if in_place is not None:
            for index, layer in enumerate(self._weights.layers):
                in_place(index, layer, residual, inputs)
            return residual
        update: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            update = self._layer(index, layer, residual, update, inputs)
        return residual if update is None else residual.add_(update)

    def forward_in_pieces(self, pieces: DecoderPieces, inputs: StepInputs) -> Tensor:
        """`forward`, with everything between two attentions as one graph."""
        num_tokens = inputs.tokens.shape[0]
        size = pieces.begin(inputs)
        for index in range(self._config.num_layers):
            pieces.replay(size, index)
            if self.on_written is not None:
                self.on_written(index)
            self._attend(index, pieces.qkv[:num_tokens], inputs, pieces.mixed[:num_tokens])
        pieces.replay(size, self._config.num_layers)
        return pieces.residual[:num_tokens]

    def piece(self, index: int, pieces: DecoderPieces, size: int) -> None:
        """What is between the attentions of layers index - 1 and index, for `size` tokens; graphs record it."""
        residual, mixed = pieces.residual[:size], pieces.mixed[:size]
        tokens, positions, slot_mapping = pieces.inputs[:, :size]
        layers = self._weights.layers
        update: Tensor | None = None
        if index == 0:
            residual.copy_(functional.embedding(tokens, self._weights.embed))
        else:
            update = self._rest(layers[index - 1], residual, mixed)
        if index < len(layers):
            qkv = self._project(layers[index], residual, update, out=pieces.qkv[:size])
            self._write(index, layers[index], qkv, positions, slot_mapping)
        elif update is not None:
            residual.add_(update)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden] of the residual stream to [n, vocab]."""
        weights, eps = self._weights, self._config.rms_norm_eps
        if hidden.shape[0] <= MAX_SMALL_TOKENS and not self._invariant:
            return small_linear(hidden, weights.lm_head, self._workspace, norm=weights.norm, eps=eps, out=out)
        normed = rms_norm(hidden, weights.norm, eps)
        if self._invariant:
            return matmul(normed, weights.lm_head, out=out)
        return torch.mm(normed, weights.lm_head.t(), out=out)

    def warm_up(self) -> None:
        """Attention in every form that no step of the warm-up asks for."""
        self._warm_up_decode()
        self._warm_up_cut_prefill()

    def _warm_up_decode(self) -> None:
        """In every form that some number of sequences has."""
        config, device, most = self._config, self.cache.device, self._max_seqs
        nothing = torch.zeros(most, dtype=torch.int32, device=device)
        counts = {
            most,
            *(count for power in range(most.bit_length()) for count in (1 << power, 3 << power) if count < most),
        }
        cuts_of = {count: self.cut(nothing[:count]) for count in sorted(counts)}
        # Whatever fills the query stands between cuts and attention, which reads them before the kernel in front ends.
        shape = (most, config.num_qkv_heads * config.head_dim)
        query = torch.zeros(shape, dtype=self._weights.embed.dtype, device=device)
        query = query[:, : config.num_q_heads * config.head_dim].unflatten(1, (config.num_q_heads, config.head_dim))  # type: ignore[no-untyped-call]
        out = torch.empty(most, config.num_q_heads, config.head_dim, dtype=query.dtype, device=device)
        for count, cuts in cuts_of.items():
            inputs = StepInputs(nothing, nothing, nothing, nothing, nothing, nothing, count, None, cuts)
            for layer in {window: layer for layer, window in enumerate(config.windows)}.values():
                self._decode_attention(layer, query, out, inputs, 0, count)

    def _warm_up_cut_prefill(self) -> None:
        """A token behind the longest prefix, in the first block."""
        config, device, seq_len = self._config, self.cache.device, len(self._cos_sin)
        tiles = self.tiles([1], [seq_len - 1])
        if tiles.parts is None or all(config.windows):
            return
        numbers = torch.tensor([0, seq_len, 0, 1], dtype=torch.int32, device=device)
        heads = torch.zeros(1, config.num_q_heads, config.head_dim, dtype=self._weights.embed.dtype, device=device)
        rows, seq_lens, starts = numbers[:1], numbers[1:2], numbers[2:]
        inputs = StepInputs(rows, rows, rows, rows, seq_lens, starts, 0, tiles, {})
        self._prefill_attention(config.windows.index(0), heads, torch.empty_like(heads), inputs, tiles)

    def cut(self, seq_lens: Tensor) -> dict[int, list[DecodeCuts]]:
        """Where attention of sequences that decode is cut: by a layer's window, a part for each max_seqs of them."""
        parts = seq_lens.split(self._max_seqs) if len(seq_lens) else ()  # type: ignore[no-untyped-call]
        return {
            window: [
                cut_for_decode(
                    part,
                    self.cache,
                    self._weights.embed.dtype,
                    quantized=self._kv_scales[0] is not None,
                    window=window,
                    batch_invariant=self._invariant,
                )
                for part in parts
            ]
            for window in set(self._config.windows)
        }

    def _in_place_layer(self, inputs: StepInputs) -> Callable[[int, LayerWeights, Tensor, StepInputs], None] | None:
        """What adds a layer to the residual stream as it goes; None where matrix products are faster."""
        if self._invariant:
            return self._invariant_layer
        few = inputs.tokens.shape[0] <= MAX_SMALL_TOKENS and inputs.tiles is None
        return self._small_layer if few and self._fuses else None

    def _invariant_layer(self, index: int, layer: LayerWeights, residual: Tensor, inputs: StepInputs) -> None:
        """Every linear sums in one order for any number of tokens; norms stand alone, for the same reason."""
        eps = self._config.rms_norm_eps
        qkv = matmul(rms_norm(residual, layer.input_norm, eps), layer.qkv)
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        self._add_invariant(self._attention(index, layer, qkv, inputs), layer.o, layer.o_bias, residual)
        normed = rms_norm(residual, layer.post_norm, eps)
        if layer.gate_up_bias is None:
            gated = matmul(normed, layer.gate_up, gated=True)
        else:
            gated = silu_mul(matmul(normed, layer.gate_up).add_(layer.gate_up_bias))
        self._add_invariant(gated, layer.down, layer.down_bias, residual)

    def _add_invariant(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        if bias is None:
            matmul(x, weight, residual=residual, out=residual)
        else:
            residual.add_(matmul(x, weight).add_(bias))

    def _small_layer(self, index: int, layer: LayerWeights, residual: Tensor, inputs: StepInputs) -> None:
        """Six launches: every norm, gate and addition is part of the linear beside it."""
        eps = self._config.rms_norm_eps
        if layer.qkv_bias is None:
            qkv = small_linear(residual, layer.qkv, self._workspace, norm=layer.input_norm, eps=eps)
        else:
            qkv = functional.linear(rms_norm(residual, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        mixed = self._attention(index, layer, qkv, inputs)
        small_linear(mixed, layer.o, self._workspace, residual=residual, out=residual)
        gated = small_linear(residual, layer.gate_up, self._workspace, norm=layer.post_norm, eps=eps, gated=True)
        small_linear(gated, layer.down, self._workspace, residual=residual, out=residual)

    def _layer(
        self, index: int, layer: LayerWeights, residual: Tensor, update: Tensor | None, inputs: StepInputs
    ) -> Tensor | None:
        """Returns what is still to be added to the residual stream."""
        qkv = self._project(layer, residual, update)
        return self._rest(layer, residual, self._attention(index, layer, qkv, inputs))

    def _project(
        self, layer: LayerWeights, residual: Tensor, update: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Queries, keys and values, before RoPE."""
        eps = self._config.rms_norm_eps
        if update is None:
            normed = rms_norm(residual, layer.input_norm, eps)
        else:
            normed = rms_norm(update, layer.input_norm, eps, residual=residual)
        if layer.qkv_bias is None:
            return torch.mm(normed, layer.qkv.t(), out=out)
        return torch.addmm(layer.qkv_bias, normed, layer.qkv.t(), out=out)

    def _rest(self, layer: LayerWeights, residual: Tensor, mixed: Tensor) -> Tensor | None:
        """What follows attention. Returns what is still to be added to the residual stream."""
        eps = self._config.rms_norm_eps
        update = self._add(mixed, layer.o, layer.o_bias, residual)
        if update is None:
            normed = rms_norm(residual, layer.post_norm, eps)
        else:
            normed = rms_norm(update, layer.post_norm, eps, residual=residual)
        gated = silu_mul(functional.linear(normed, layer.gate_up, layer.gate_up_bias))
        return self._add(gated, layer.down, layer.down_bias, residual)

    def _add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        """A linear's result goes to the residual stream. Returns what the norm that follows does better itself."""
        num_tokens = residual.shape[0]
        if bias is None and num_tokens <= MAX_TOKENS:
            small_linear(x, weight, self._workspace, residual=residual, out=residual)
            return None
        if bias is None and num_tokens >= MIN_SUMMING_TOKENS:
            residual.addmm_(x, weight.t())
            return None
        return functional.linear(x, weight, bias)

    def _attention(self, index: int, layer: LayerWeights, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """RoPE, the write of K and V, and attention: [num_tokens, q heads * head_dim]."""
        self._write(index, layer, qkv, inputs.positions, inputs.slot_mapping)
        if self.on_written is not None:
            self.on_written(index)
        width = self._config.num_q_heads * self._config.head_dim
        return self._attend(index, qkv, inputs, torch.empty(len(qkv), width, dtype=qkv.dtype, device=qkv.device))

    def _write(self, index: int, layer: LayerWeights, qkv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """RoPE in place, and K and V into the pool."""
        config = self._config
        rope_and_cache(
            qkv,
            self.cache[index],
            positions,
            slot_mapping,
            self._cos_sin,
            config.num_q_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
            kv_scale=self._kv_scales[index],
        )

    def _attend(self, index: int, qkv: Tensor, inputs: StepInputs, out: Tensor) -> Tensor:
        """Into `out` [num_tokens, q heads * head_dim]."""
        config = self._config
        width = config.num_q_heads * config.head_dim
        query = qkv[:, :width].unflatten(1, (config.num_q_heads, config.head_dim))  # type: ignore[no-untyped-call]
        heads = out.view(len(qkv), config.num_q_heads, config.head_dim)
        # More decodes than rows: generated tokens that are computed again.
        for first in range(0, inputs.num_decodes, self._max_seqs):
            self._decode_attention(index, query, heads, inputs, first, min(first + self._max_seqs, inputs.num_decodes))
        if inputs.tiles is not None:
            self._prefill_attention(index, query, heads, inputs, inputs.tiles)
        return out

    def _decode_attention(
        self, index: int, query: Tensor, out: Tensor, inputs: StepInputs, first: int, last: int
    ) -> None:
        decode_attention(
            query[first:last],
            self.cache[index],
            self._block_table,
            inputs.rows[first:last],
            inputs.cuts[self._config.windows[index]][first // self._max_seqs],
            self._scale,
            self._decode,
            out=out[first:last],
            kv_scale=self._kv_scales[index],
        )

    def _prefill_attention(
        self, index: int, query: Tensor, out: Tensor, inputs: StepInputs, tiles: PrefillTiles
    ) -> None:
        # The decodes' rows come first in query_start_loc too, so the chunks' offsets are theirs already.
        decodes = inputs.num_decodes
        arguments = (
            query,
            self.cache[index],
            self._block_table,
            inputs.rows[decodes:],
            inputs.seq_lens[decodes:],
            inputs.query_start_loc[decodes:],
            tiles,
            self._scale,
        )
        window = self._config.windows[index]
        if self._prefill is not None and not window:
            from baton.kernels.prefill_attention_hopper import prefill_attention_hopper

            prefill_attention_hopper(*arguments, workspace=self._prefill, out=out)
        else:
            prefill_attention(*arguments, out=out, kv_scale=self._kv_scales[index], window=window)


def _prefill_workspace(cache: Tensor, num_q_heads: int) -> PrefillWorkspace | None:
    head_dim, block_size = cache.shape[-1], cache.shape[-2]
    hopper = torch.cuda.get_device_capability(cache.device)[0] == 9
    half = cache.dtype in (torch.bfloat16, torch.float16)
    if hopper and half and head_dim in (64, 128) and block_size in (16, 32, 64, 128):
        from baton.kernels.prefill_attention_hopper import PrefillWorkspace

        return PrefillWorkspace(num_q_heads, head_dim, cache.device)
    return None
