"""GGUF files of small models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from support.gguf.metadata import architecture_name, model_metadata
from torch import Tensor
from transformers import PreTrainedModel

# Model types of which the converter reorders queries and keys, and those to whose norms it adds 1.
_PERMUTED = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
_SHIFTED = ("gemma", "gemma2", "gemma3_text")
# Names of Transformers that the library does not map, and those that it does.
_RENAMED = {
    ".block_sparse_moe.experts.": ".mlp.experts.",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".mlp.gate.moe_statics.e_score_correction_bias": ".mlp.moe_statics.e_score_correction.bias",
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
    architecture = architecture_name(config)
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {"general.file_type": _FILE_TYPES.get(kind, 15)}
    values |= {f"{architecture}.{key}": value for key, value in model_metadata(config).items()}
    vocabulary = vocabulary or Vocabulary.of_size(config.vocab_size)
    values |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.values.items()}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    for key, value in values.items():
        if key not in without and value is not None:
            _add(writer, key, value)
    for name, tensor in _converted(model):
        _add_tensor(writer, name, tensor, kind)
    for name, factors in _rope_factors(model).items():
        writer.add_tensor(name, factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _converted(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields all weights as the converter writes them."""
    config = model.config
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture_name(config)]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in _unstacked(_mapped(name), tensor.float().squeeze()):
            found = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert found, part
            yield found, _as_written(part, values, config)


def _mapped(name: str) -> str:
    """Returns the name that the library maps."""
    for theirs, mapped in _RENAMED.items():
        name = name.replace(theirs, mapped)
    return name


def _unstacked(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Returns gates and ups of experts apart."""
    if name.endswith("experts.gate_up_proj"):
        gates, ups = tensor.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gates), (f"{stem}up_proj.weight", ups)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


def _as_written(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Shifts norms, and reorders the rows of queries and keys: rotated pairs become neighbours instead of halves."""
    if name.endswith("norm.weight") and config.model_type in _SHIFTED:
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type not in _PERMUTED or heads is None:
        return tensor
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _rope_factors(model: PreTrainedModel) -> dict[str, Tensor]:
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(model)}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}


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
