"""A model that copies: it continues the last tokens with what followed them before, as in retrieval or edits of code.

Its weights are written down, not trained: an induction head in the sample model's shape, with as many weights and as
much KV. Each token has a code of signs. The first four layers attend to the token before, and so collect the codes of
the four tokens before each. The last full layer attends to where these are the last four tokens, and reads the code of
the token there. All other layers and MLPs add nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SAMPLE = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
_HEADS, _HEAD_DIM = 2, 128  # as wide as the sample model's 8 heads of 32, but one can compare four codes
_THETA = 1e12  # so that half of a head does not rotate
_CODE, _MATCH = 48, 16  # signs that the last linear reads, and that the induction head compares
_MATCHED = 4  # tokens
_OUT = _CODE + (1 + _MATCHED) * _MATCH  # where the induction head writes
_SHARP = 14.0  # of the heads that attend to the token before
_SCALE = 7.5  # of the induction head's queries and keys
_FAST = 8  # dimension pairs of a head whose RoPE frequency is high enough that neighbouring positions differ


def write_copying_model(folder: Path) -> None:
    """Writes the model with the sample model's tokenizer. Its context is 65,536 tokens, of which it copies any."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SAMPLE / name, folder)
    config = json.loads((SAMPLE / "config.json").read_text())
    sizes = {"num_attention_heads": _HEADS, "num_key_value_heads": 1, "head_dim": _HEAD_DIM, "rope_theta": _THETA}
    (folder / "config.json").write_text(json.dumps(config | sizes | {"tie_word_embeddings": False}))
    tensors = _tensors(config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["layer_types"])
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def _tensors(hidden: int, inner: int, vocab_size: int, kinds: list[str]) -> dict[str, Tensor]:
    codes = torch.randint(0, 2, (vocab_size, _CODE + _MATCH), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    embed = torch.zeros(vocab_size, hidden)
    embed[:, : _CODE + _MATCH] = codes
    head = torch.zeros(vocab_size, hidden)
    head[:, _OUT : _OUT + _CODE] = codes[:, :_CODE]
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    induction = len(kinds) - 1 - kinds[::-1].index("full_attention")
    for index in range(len(kinds)):
        written = _CODE + _MATCH * (1 + min(index, _MATCHED)) + (_CODE if index > induction else 0)
        # Undoes the norm: the residual stream holds so many signs, and zeros.
        scale = (written / hidden) ** 0.5
        layer = _empty_layer(hidden, inner, scale)
        if index < _MATCHED:
            _attend_to_previous(layer, index)
        elif index == induction:
            _attend_to_match(layer)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def _empty_layer(hidden: int, inner: int, scale: float) -> dict[str, Tensor]:
    """Returns a layer that adds nothing."""
    query, kv = _HEADS * _HEAD_DIM, _HEAD_DIM
    shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    layer = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return layer | {
        name: torch.full((hidden,), scale) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }


def _attend_to_previous(layer: dict[str, Tensor], distance: int) -> None:
    """Copies the code of the token `distance` + 1 before: what the token before has of its own one."""
    half = _HEAD_DIM // 2
    turns = _THETA ** -(torch.arange(_FAST) / half)  # a position's rotation of each pair
    layer["self_attn.k_proj.bias"][:_FAST] = _SHARP
    layer["self_attn.q_proj.bias"][:_FAST] = _SHARP * turns.cos()
    layer["self_attn.q_proj.bias"][half : half + _FAST] = -_SHARP * turns.sin()
    source = _CODE + distance * _MATCH
    for sign in range(_MATCH):
        layer["self_attn.v_proj.weight"][sign, source + sign] = 1
        layer["self_attn.o_proj.weight"][source + _MATCH + sign, sign] = 1


def _attend_to_match(layer: dict[str, Tensor]) -> None:
    """Compares the last four tokens with those before each token, and reads that token."""
    half = _HEAD_DIM // 2
    slow = [*range(half // 2, half), *range(half + half // 2, _HEAD_DIM)]  # values that hardly rotate
    for place in range(_MATCHED):
        for sign in range(_MATCH):
            value = slow[place * _MATCH + sign]
            layer["self_attn.q_proj.weight"][value, _CODE + place * _MATCH + sign] = _SCALE
            layer["self_attn.k_proj.weight"][value, _CODE + (place + 1) * _MATCH + sign] = _SCALE
    for sign in range(_CODE):
        layer["self_attn.v_proj.weight"][sign, sign] = 1
        layer["self_attn.o_proj.weight"][_OUT + sign, sign] = 1
