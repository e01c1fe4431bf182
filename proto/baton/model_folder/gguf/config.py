"""The config.json of a GGUF file, from its metadata. Adds nothing that the metadata does not state."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

from baton.model_folder.gguf.architectures import GgufArchitecture, architecture_of
from baton.model_folder.gguf.header import GgufHeader, GgufTensor
from baton.model_folder.gguf.metadata import Metadata
from baton.rpc.errors import InvalidRequest, Unsupported

_EMBEDDINGS = "token_embd.weight"
_LM_HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies of the rotated pairs
_F32 = 0
_FILE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # by general.file_type


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the config. Raises InvalidRequest for missing metadata, Unsupported for what is not supported."""
    architecture = architecture_of(header)
    metadata = Metadata(header.metadata, header.path)
    prefix = architecture.name
    _refuse_experts(metadata, prefix)
    hidden, heads = metadata.count(f"{prefix}.embedding_length"), metadata.count(f"{prefix}.attention.head_count")
    head_dim = metadata.count(f"{prefix}.attention.key_length", default=max(1, hidden // heads))
    context = metadata.count(f"{prefix}.context_length")
    config = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": metadata.count(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": metadata.count(f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{prefix}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": _LM_HEAD not in header.tensors,
        "dtype": _FILE_DTYPES.get(metadata.values.get("general.file_type", -1), "bfloat16"),
        **_rope(header, metadata, architecture, head_dim, context),
        **_biases(header, architecture),
    }
    value_dim = metadata.count(f"{prefix}.attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise metadata.error(f"{prefix}.attention.value_length", f"attention.key_length ({head_dim})")
    return config


def _refuse_experts(metadata: Metadata, prefix: str) -> None:
    key = f"{prefix}.expert_count"
    if metadata.values.get(key):
        raise Unsupported(
            f"{metadata.path}: {key} is {metadata.values[key]}; GGUF files of models with experts cannot be loaded",
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
    """Returns which linears of Llama have biases; the other architectures fix that."""
    if architecture.architecture != "LlamaForCausalLM":
        return {}
    names = {name.removeprefix("blk.0.") for name in header.tensors if name.endswith(".bias")}
    attention = names & {f"attn_{part}.bias" for part in ("q", "k", "v", "output")}
    mlp = names & {f"ffn_{part}.bias" for part in ("gate", "up", "down")}
    for found, whole in ((attention, 4), (mlp, 3)):
        if found and len(found) != whole:
            raise Unsupported(
                f"{header.path}: only {', '.join(sorted(found))} exist of a layer's biases; Llama has all or none",
                field="model",
            )
    return {"attention_bias": bool(attention), "mlp_bias": bool(mlp)}


def _rope(
    header: GgufHeader, metadata: Metadata, architecture: GgufArchitecture, head_dim: int, context: int
) -> dict[str, Any]:
    prefix = f"{architecture.name}.rope"
    rotated = metadata.count(f"{prefix}.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise metadata.error(f"{prefix}.dimension_count", f"the size of a head ({head_dim})")
    theta = metadata.number(f"{prefix}.freq_base", default=10000.0)
    return {"rope_parameters": {"rope_theta": theta, **_scaling(header, metadata, prefix, rotated, context)}}


def _scaling(header: GgufHeader, metadata: Metadata, prefix: str, rotated: int, context: int) -> dict[str, Any]:
    key = f"{prefix}.scaling.type"
    kind = metadata.text(key, default="none")
    if ROPE_FACTORS in header.tensors:
        return _factors(header.tensors[ROPE_FACTORS], rotated, context)
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise metadata.error(key, "none, linear or yarn")
    factor = metadata.number(f"{prefix}.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.count(f"{prefix}.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _factors(tensor: GgufTensor, rotated: int, context: int) -> dict[str, Any]:
    """Returns the scaling of Llama 3, whose file divides each frequency by its own factor, as longrope does."""
    if tensor.type_number != _F32 or tensor.shape != (rotated // 2,):
        raise InvalidRequest(
            f"{tensor.path}: {tensor.name} has type {tensor.type_number} and shape {list(tensor.shape)};"
            f" it must be F32 {[rotated // 2]}",
            field="model",
        )
    factors = _read_floats(tensor.path, tensor.start, rotated // 2)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _read_floats(path: Path, start: int, count: int) -> list[float]:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(4 * count)
    if len(data) < 4 * count:
        raise InvalidRequest(f"{path} is truncated; download or copy it again", field="model")
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
