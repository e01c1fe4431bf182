"""A model with constructed weights that finds one pair among any number of others, wherever it lies.

Its tokens are pairs (key, value) and questions (key). One layer without RoPE attends from a question to the pairs with
its key and gives their value: KEYS * VALUES pairs, then KEYS questions, then VALUES answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

KEYS, VALUES = 64, 32
_HEAD_DIM, _NUM_Q_HEADS, _NUM_KV_HEADS = 128, 4, 2
_HIDDEN = 512
_PAIRS = KEYS * VALUES
VOCAB_SIZE = _PAIRS + KEYS + VALUES
# Pairs with another key have scores of 0, before rounding. The softmax over n of them takes ln n: 11.8 of 128 k.
_SCORE = 20.0


@dataclass(frozen=True, slots=True)
class Question:
    """A key, and the value that the haystack has for it."""

    key: int
    answer: int  # token

    @property
    def token(self) -> int:
        return _PAIRS + self.key


def write_needle_model(folder: Path, max_model_len: int) -> None:
    """Writes the model as a SmolLM3 of one layer."""
    keys, values = _directions(KEYS, 1), _directions(VALUES, 2)
    embeddings = torch.zeros(VOCAB_SIZE, _HIDDEN)
    # A token's embedding: its key, its value, and whether it asks.
    pairs = embeddings[:_PAIRS].view(KEYS, VALUES, _HIDDEN)
    pairs[:, :, :_HEAD_DIM] = keys[:, None]
    pairs[:, :, _HEAD_DIM : 2 * _HEAD_DIM] = values[None]
    asking = embeddings[_PAIRS : _PAIRS + KEYS]
    asking[:, 2 * _HEAD_DIM : 3 * _HEAD_DIM] = keys * math.sqrt(2)
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": _head(values),
        **_layer(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous().bfloat16() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(max_model_len)))


def haystack(num_tokens: int, seed: int) -> tuple[list[int], list[Question]]:
    """Returns pairs of half of the keys, with one pair of each of the others among them; and the questions for these.

    The needles lie at even distances, the first at the start.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(KEYS)
    asked, others = order[: KEYS // 2], order[KEYS // 2 :]
    token_ids = random.choice(others, num_tokens) * VALUES + random.integers(VALUES, size=num_tokens)
    questions = []
    for place, key in zip(np.linspace(0, num_tokens - 1, len(asked)).astype(int), asked.tolist(), strict=True):
        value = int(random.integers(VALUES))
        token_ids[place] = key * VALUES + value
        questions.append(Question(key, _PAIRS + KEYS + value))
    return token_ids.tolist(), questions


def _directions(count: int, seed: int) -> Tensor:
    """Returns unit vectors [count, head_dim] that are orthogonal to each other."""
    random = torch.Generator().manual_seed(seed)
    square = torch.linalg.qr(torch.randn(_HEAD_DIM, _HEAD_DIM, generator=random)).Q
    return square[:count]


def _layer() -> dict[str, Tensor]:
    """Returns one layer: queries are what is asked, keys and values those of pairs; heads of a group share the work."""
    eye, prefix = torch.eye(_HEAD_DIM), "model.layers.0."
    # Norms make a pair's key and value, and what is asked, sqrt(hidden / 2) and sqrt(hidden) long.
    norm = math.sqrt(_HIDDEN / 2) * math.sqrt(_HIDDEN)
    query = torch.zeros(_NUM_Q_HEADS, _HEAD_DIM, _HIDDEN)
    query[:, :, 2 * _HEAD_DIM : 3 * _HEAD_DIM] = eye * (_SCORE * math.sqrt(_HEAD_DIM) / norm)
    key, value = torch.zeros(2, _NUM_KV_HEADS, _HEAD_DIM, _HIDDEN).unbind()
    key[:, :, :_HEAD_DIM] = eye
    value[:, :, _HEAD_DIM : 2 * _HEAD_DIM] = eye
    out = torch.zeros(_HIDDEN, _NUM_Q_HEADS, _HEAD_DIM)
    out[3 * _HEAD_DIM :] = eye[:, None].expand(-1, _NUM_Q_HEADS, -1) / _NUM_Q_HEADS
    mlp = {f"{prefix}mlp.{name}_proj.weight": torch.zeros(_HEAD_DIM, _HIDDEN) for name in ("gate", "up")}
    return {
        f"{prefix}self_attn.q_proj.weight": query.flatten(0, 1),
        f"{prefix}self_attn.k_proj.weight": key.flatten(0, 1),
        f"{prefix}self_attn.v_proj.weight": value.flatten(0, 1),
        f"{prefix}self_attn.o_proj.weight": out.flatten(1),
        f"{prefix}mlp.down_proj.weight": torch.zeros(_HIDDEN, _HEAD_DIM),
        f"{prefix}input_layernorm.weight": torch.ones(_HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(_HIDDEN),
        **mlp,
    }


def _head(values: Tensor) -> Tensor:
    """Returns a head that reads the value which attention has found."""
    head = torch.zeros(VOCAB_SIZE, _HIDDEN)
    head[_PAIRS + KEYS :, 3 * _HEAD_DIM :] = values
    return head


def _config(max_model_len: int) -> dict[str, object]:
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": _NUM_Q_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "no_rope_layers": [0],
        "use_sliding_window": False,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def asked(questions: Sequence[Question], token_ids: Sequence[int]) -> list[list[int]]:
    """Returns a prompt for each question."""
    return [[*token_ids, one.token] for one in questions]
