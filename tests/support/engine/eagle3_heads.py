"""Random EAGLE-3 heads in the form of published checkpoints, and what one guesses, computed plainly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

HEADS, KV_HEADS, DRAFT_VOCAB = 4, 2, 1000
THETA = 10_000.0


def write_head(folder: Path, vocab_size: int, changes: Mapping[str, Any] | None = None, *, hidden: int = 256) -> None:
    """Writes a head for a model of `hidden` values a token."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 4,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": hidden // HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab(vocab_size),
    }
    (folder / "config.json").write_text(json.dumps(config | dict(changes or {})))
    save_file(random_tensors(vocab_size, hidden), folder / "model.safetensors")


def draft_vocab(vocab_size: int) -> int:
    """Returns how many of a model's tokens a head has: not all of them."""
    return min(DRAFT_VOCAB, 3 * vocab_size // 4)


def random_tensors(vocab_size: int, hidden: int) -> dict[str, Tensor]:
    """Returns the tensors of a head."""
    generator, own_vocab = torch.Generator().manual_seed(5), draft_vocab(vocab_size)
    query, kv, inner = hidden, hidden * KV_HEADS // HEADS, 5 * hidden // 4
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (own_vocab, hidden),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 0.08 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
    mapped = torch.randperm(vocab_size, generator=generator)[:own_vocab].sort().values
    has = torch.zeros(vocab_size, dtype=torch.bool)
    has[mapped] = True
    return tensors | {"d2t": mapped - torch.arange(own_vocab), "t2d": has}


class PlainHead:
    """A head without a cache: computes the whole text for each guess, in fp32."""

    def __init__(
        self, folder: Path, model: PreTrainedModel, layers: Sequence[int], *, residual_is_normed: bool
    ) -> None:
        self._weights = load_file(folder / "model.safetensors")
        self._model = model
        self._layers = layers
        self._residual_is_normed = residual_is_normed
        self._head_dim = self._weights["norm.weight"].shape[0] // HEADS

    def guess(self, text: Sequence[int], most: int, first: int = 0) -> list[int]:
        """Returns the most likely tokens behind a text. It sees the hidden states from position `first` on."""
        with torch.inference_mode():
            states = self._model(torch.tensor([text]), output_hidden_states=True).hidden_states
            joined = torch.cat([states[layer][0] for layer in self._layers], dim=1)[first:-1]
            hidden, tokens = functional.linear(joined, self._weights["fc.weight"]), list(text[first + 1 :])
            for _ in range(most):
                last = self._forward(hidden, torch.tensor(tokens), first)[-1]
                logits = functional.linear(self._norm(last, "norm"), self._weights["lm_head.weight"])
                own = int(logits.argmax())
                tokens.append(own + int(self._weights["d2t"][own]))
                hidden = torch.cat((hidden, last[None]))
        return tokens[-most:]

    def _forward(self, hidden: Tensor, token_ids: Tensor, first: int) -> Tensor:
        embedded = self._norm(self._model.get_input_embeddings()(token_ids), "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((embedded, normed), dim=1)
        q, k, v = (
            self._linear(x, f"self_attn.{name}_proj").view(len(x), -1, self._head_dim).transpose(0, 1) for name in "qkv"
        )
        rates = THETA ** -(torch.arange(0, self._head_dim, 2) / self._head_dim)
        angles = torch.arange(first, first + len(x))[:, None] * rates
        q, k = (one * angles.cos().repeat(1, 2) + _turned(one) * angles.sin().repeat(1, 2) for one in (q, k))
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=0) for one in (k, v))
        scores = (q @ k.transpose(1, 2)) * self._head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        residual = (normed if self._residual_is_normed else hidden) + self._linear(attended, "self_attn.o_proj")
        inner = self._norm(residual, "midlayer.post_attention_layernorm")
        gated = functional.silu(self._linear(inner, "mlp.gate_proj")) * self._linear(inner, "mlp.up_proj")
        return residual + self._linear(gated, "mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"midlayer.{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self._weights[f"{name}.weight"]


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
