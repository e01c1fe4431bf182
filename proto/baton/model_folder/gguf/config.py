"""The config.json of a GGUF file, from its metadata. Adds nothing that the metadata and llama.cpp do not state."""

from __future__ import annotations

from typing import Any

from baton.model_folder.gguf.architectures import GgufArchitecture, architecture_of
from baton.model_folder.gguf.fields import Reader
from baton.model_folder.gguf.header import GgufHeader, GgufTensor
from baton.model_folder.gguf.metadata import Metadata
from baton.model_folder.gguf.rope import rope_of
from baton.rpc.errors import InvalidRequest, Unsupported

_EMBEDDINGS = "token_embd.weight"
_LM_HEAD = "output.weight"
_FILE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # by general.file_type
_EPSILON = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}  # by field; others: of LayerNorm
_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the config. Raises InvalidRequest for missing metadata, Unsupported for what is not supported."""
    architecture = architecture_of(header)
    metadata = Metadata(header.metadata, header.path)
    reader = Reader(metadata, architecture.name, header.tensors.keys())
    _refuse_experts(reader, architecture)
    heads = reader.count("attention.head_count")
    config = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": reader.count("embedding_length"),
        "intermediate_size": reader.count("feed_forward_length"),
        "num_hidden_layers": reader.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.count("attention.head_count_kv", default=heads),
        "head_dim": reader.head_dim,
        architecture.eps: reader.number(_EPSILON.get(architecture.eps, _LAYER_NORM_EPSILON)),
        "max_position_embeddings": reader.count("context_length"),
        "tie_word_embeddings": _LM_HEAD not in header.tensors,
        "dtype": _FILE_DTYPES.get(metadata.values.get("general.file_type", -1), "bfloat16"),
        **rope_of(header, reader, partial=architecture.rotates_parts, longrope_scales=architecture.longrope_scales),
        **_biases(header, architecture),
        **architecture.more(reader),
    }
    if reader.count("attention.value_length", default=reader.head_dim) != reader.head_dim:
        raise metadata.error(reader.key("attention.value_length"), f"attention.key_length ({reader.head_dim})")
    return config


def _refuse_experts(reader: Reader, architecture: GgufArchitecture) -> None:
    if reader.has("expert_count") and not architecture.has_experts:
        raise Unsupported(
            f"{reader.metadata.path}: {reader.key('expert_count')} is"
            f" {reader.metadata.values[reader.key('expert_count')]}; GGUF files of {architecture.name} with experts"
            " cannot be loaded",
            field="model",
        )


def _vocab_size(header: GgufHeader) -> int:
    tensor = _required(header, _EMBEDDINGS)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > tensor.shape[0]:
        raise InvalidRequest(
            f"{header.path}: tokenizer.ggml.tokens has {len(tokens)} tokens;"
            f" {_EMBEDDINGS} has rows for {tensor.shape[0]}",
            field="model",
        )
    return tensor.shape[0]


def _required(header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        raise InvalidRequest(f"{header.path} does not hold the tensor {name}", field="model")
    return header.tensors[name]


def _biases(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, Any]:
    """Returns which linears have biases, where the architecture does not fix that."""
    names = {name.removeprefix("blk.0.") for name in header.tensors if name.endswith(".bias")}
    flags = {}
    for field, parts in architecture.biases.items():
        found = names & {f"{part}.bias" for part in parts}
        if found and len(found) != len(parts):
            raise Unsupported(
                f"{header.path}: only {', '.join(sorted(found))} exist of a layer's biases;"
                f" {architecture.architecture} has all or none of {', '.join(parts)}",
                field="model",
            )
        flags[field] = bool(found)
    return flags
