"""GGUF files of small models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Types that the library cannot quantize to. Their blocks are random, with small scales at these bytes.
_SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
_FILE_TYPES = {Kind.F32: 0, Kind.F16: 1, Kind.BF16: 32}


@dataclass(frozen=True)
class Vocabulary:
    """The metadata of a tokenizer."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_size(cls, size: int) -> Vocabulary:
        """Returns a vocabulary of this size with arbitrary tokens."""
        tokens = ["a", "b", "ab", *(f"t{token_id}" for token_id in range(3, size))]
        return cls(
            {
                "model": "gpt2",
                "pre": "gpt-2",
                "tokens": tokens,
                "token_type": [1] * size,
                "merges": ["a b"],
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    vocabulary: Vocabulary | None = None,
    without: Sequence[str] = (),
    **more: Any,
) -> Path:
    """Writes the model with matrices of one type. `without` and `more`: keys to leave out and values to set, with
    dots as __."""
    config = model.config
    prefix = config.model_type
    writer = gguf.GGUFWriter(path, prefix)
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "general.file_type": _FILE_TYPES.get(kind, 15),
        f"{prefix}.block_count": config.num_hidden_layers,
        f"{prefix}.context_length": config.max_position_embeddings,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_attention_heads,
        f"{prefix}.attention.head_count_kv": config.num_key_value_heads,
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{prefix}.rope.freq_base": float(rope["rope_theta"]),
    }
    if head_dim := getattr(config, "head_dim", None):
        values |= {f"{prefix}.attention.{part}_length": head_dim for part in ("key", "value")}
    vocabulary = vocabulary or Vocabulary.of_size(config.vocab_size)
    values |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.values.items()}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    for key, value in values.items():
        if key not in without and value is not None:
            _add(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add_tensor(writer, _gguf_name(name), _reordered(name, tensor.float(), config), kind)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(model).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{ending}"


def _reordered(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Reorders the rows of Llama's queries and keys: rotated pairs become neighbours instead of halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return tensor
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    values = tensor.contiguous().numpy()
    if tensor.dim() == 1 or kind == Kind.F32:
        writer.add_tensor(name, values)
    elif kind in _SCALES:
        writer.add_tensor(name, _random_blocks(tuple(tensor.shape), kind, len(name)), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block_values, block_bytes), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = generator.uniform(0.0002, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _llama3_divisors(model: PreTrainedModel) -> Tensor:
    """Returns the unscaled frequencies divided by the scaled ones."""
    config = model.config
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return plain / model.model.rotary_emb.inv_freq.float()
