"""The arithmetic of an EAGLE-3 head, with the keys and values of each row in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.worker.executors.host.eagle3 import Eagle3Head
from baton.worker.layers.rope import cos_sin_table
from baton.worker.layers.table import take

_LEAST = 64  # tokens that a row's memory begins with


class Grown:
    """A tensor [.., tokens, width] that grows with the positions that are written. Those before `start` are missing."""

    def __init__(self, lead: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.start = 0
        self._values = torch.empty(*lead, 0, width, dtype=dtype)

    def write(self, position: int, values: Tensor) -> None:
        """Writes values [.., tokens, width] from a position on."""
        begin, end = position - self.start, position - self.start + values.shape[-2]
        if end > self._values.shape[-2]:
            grown = self._values.new_empty(*self._values.shape[:-2], max(_LEAST, 2 * end), self._values.shape[-1])
            grown[..., :begin, :] = self._values[..., :begin, :]
            self._values = grown
        self._values[..., begin:end, :] = values

    def read(self, first: int, stop: int) -> Tensor:
        """Returns the values of positions first to stop."""
        return self._values[..., first - self.start : stop - self.start, :]


class Piece(NamedTuple):
    """Tokens of one row, in order."""

    kv: Grown  # [2, num_kv_heads, tokens, head_dim], all before `position` written
    position: int  # of the first one's hidden state
    num_tokens: int


class Eagle3Layer:
    """Computes the head.

    x = [norm(embed(next token)), norm(h)];  r = h + attention(x);  r = r + mlp(norm(r));  logits = lm_head(norm(r))
    """

    def __init__(self, head: Eagle3Head, longest: int) -> None:
        self._head = head
        self._config = head.config
        self._cos_sin = cos_sin_table(head.config.rope, head.config.head_dim, longest)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self._head.weights["fc.weight"].dtype

    def new_kv(self) -> Grown:
        """Returns the memory of a row's keys and values."""
        return Grown((2, self._config.num_kv_heads), self._config.head_dim, self.dtype)

    def combined(self, hidden: Tensor) -> Tensor:
        """Returns h [num_tokens, hidden_size] of the model's joined hidden states."""
        return functional.linear(hidden, self._head.weights["fc.weight"])

    def forward(self, hidden: Tensor, token_ids: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Returns r [num_tokens, hidden_size]; `token_ids` are those behind the tokens of `hidden`."""
        weights, config = self._head.weights, self._config
        embedded = self._norm(take(self._head.embed, token_ids, self.dtype), "midlayer.input_layernorm.weight")
        normed = self._norm(hidden, "midlayer.hidden_norm.weight")
        x = torch.cat((embedded, normed), dim=1)
        q, k, v = (
            functional.linear(x, weights[f"midlayer.self_attn.{name}_proj.weight"]).view(len(x), -1, config.head_dim)
            for name in "qkv"
        )
        positions = torch.cat([torch.arange(each.position, each.position + each.num_tokens) for each in pieces])
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        attended, start = torch.empty_like(q), 0
        for piece in pieces:
            part = slice(start, start + piece.num_tokens)
            attended[part] = self._attended(piece, q[part], torch.stack((k[part], v[part])))
            start += piece.num_tokens
        base = normed if config.residual_is_normed else hidden
        residual = base + functional.linear(attended.flatten(1), weights["midlayer.self_attn.o_proj.weight"])
        inner = self._norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up = (functional.linear(inner, weights[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + functional.linear(functional.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])

    def logits(self, residual: Tensor, vocab_size: int) -> Tensor:
        """Returns fp32 logits [num_rows, vocab_size] over the model's tokens; those that the head lacks are -inf."""
        own = functional.linear(self._norm(residual, "norm.weight"), self._head.weights["lm_head.weight"]).float()
        found = own.new_full((len(own), vocab_size), float("-inf"))
        return found.index_copy_(1, self._head.token_ids, own)

    def _attended(self, piece: Piece, query: Tensor, keys_values: Tensor) -> Tensor:
        """Returns the attention [num_tokens, num_q_heads, head_dim] of a piece, whose keys and values it stores."""
        piece.kv.write(piece.position, keys_values.transpose(1, 2))
        keys, values = piece.kv.read(piece.kv.start, piece.position + piece.num_tokens)
        num_keys = keys.shape[1]
        reach = torch.arange(num_keys - piece.num_tokens, num_keys)
        mask = torch.arange(num_keys) <= reach[:, None]
        found = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._head.weights[name], self._config.eps)
