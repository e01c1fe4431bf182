"""A model's shape and its architecture's ways, as data, from a Hugging Face config.json. Knows no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.rope_config import RopeConfig, rope_config
from baton.worker.models.fields import Fields

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a family of models does in its own way."""

    qkv_bias: bool | None = None  # None: the config's attention_bias says
    o_bias: bool | None = None
    mlp_bias: bool = False  # the config's mlp_bias may say so
    qk_norm: bool = False
    sliding_window: bool = False  # the config's sliding_window holds for every layer
    optional_window: bool = False  # only under use_sliding_window, and from max_window_layers on


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(mlp_bias=True),
    "MistralForCausalLM": Architecture(qkv_bias=False, o_bias=False, sliding_window=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, o_bias=False, optional_window=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, optional_window=True),
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # a layer: keys that a query sees, itself included; 0: all
    initializer_range: float
    dtype: str  # of the checkpoint, by its own word; "" where it does not say
    eos_token_ids: tuple[int, ...]

    @property
    def num_qkv_heads(self) -> int:
        """Heads of the fused projection: queries, keys, values."""
        return self.num_q_heads + 2 * self.num_kv_heads

    @property
    def max_model_len(self) -> int:
        """Tokens that the positions are made for."""
        return max(self.max_position_embeddings, self.rope.extended_length)


def load_config(folder: Path) -> ModelConfig:
    """Reads config.json, and generation_config.json where there is one."""
    raw = read_json(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    generation_path = folder / GENERATION_CONFIG_FILE
    generation = read_json(generation_path, "") if generation_path.exists() else {}
    if "eos_token_id" in generation:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    return parse_config(raw, str(folder / CONFIG_FILE))


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig of a config.json. `source` names it in errors."""
    fields = Fields(raw, source)
    name = _architecture_name(fields)
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_q_heads = fields.positive_int("num_attention_heads")
    head_dim = fields.positive_int("head_dim", default=hidden_size // num_q_heads)
    num_kv_heads = fields.positive_int("num_key_value_heads", default=num_q_heads)
    if num_q_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    num_layers = fields.positive_int("num_hidden_layers")
    attention_bias = fields.flag("attention_bias", default=False)
    max_position_embeddings = fields.positive_int("max_position_embeddings", default=2048)
    return ModelConfig(
        architecture=name,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive_float("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=rope_config(fields, max_position_embeddings),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.o_bias is None else architecture.o_bias,
        mlp_bias=architecture.mlp_bias and fields.flag("mlp_bias", default=False),
        qk_norm=architecture.qk_norm,
        windows=_windows(fields, architecture, num_layers),
        initializer_range=fields.positive_float("initializer_range", default=0.02),
        dtype=fields.text("dtype", default=fields.text("torch_dtype", default="")),
        eos_token_ids=_eos_token_ids(fields),
    )


def read_json(path: Path, why: str) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidRequest that names the file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is missing: {why}", field="model") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds a {type(content).__name__}; it must hold an object", field="model")
    return content


def _architecture_name(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else _BY_MODEL_TYPE.get(str(fields.raw.get("model_type")))
    if name in ARCHITECTURES:
        return str(name)
    key = "architectures" if names else "model_type"
    raise fields.error(key, f"one of {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: Fields) -> None:
    if fields.raw.get("auto_map"):
        raise fields.error("auto_map", "absent: the model needs code of its own, and no code of a model folder is run")
    if fields.raw.get("quantization_config"):
        raise fields.error("quantization_config", "absent: only unquantized weights can be loaded")
    if fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "silu")


def _windows(fields: Fields, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    used = architecture.sliding_window or (
        architecture.optional_window and fields.flag("use_sliding_window", default=False)
    )
    if not used or fields.raw.get("sliding_window") is None:
        return (0,) * num_layers
    window = fields.positive_int("sliding_window")
    kinds = fields.raw.get("layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or set(kinds) - {"full_attention", "sliding_attention"}
        ):
            raise fields.error("layer_types", f"a list of {num_layers} x full_attention or sliding_attention")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = fields.number("max_window_layers", default=28) if architecture.optional_window else 0
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.raw.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise fields.error("eos_token_id", "an integer or a list of integers")
    return tuple(listed)
