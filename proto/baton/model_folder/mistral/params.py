"""The config.json of a model in Mistral's own format, from its params.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, Unsupported

PARAMS_FILE = "params.json"
_MAX_LENGTH_KEYS = ("max_position_embeddings", "max_seq_len", "model_max_length")
_DEFAULT_MAX_LENGTH = 128_000  # as vLLM has it
# Keys of models that are not built of Mistral's layers.
_OTHER_KINDS = {
    "kv_lora_rank": "multi-head latent attention",
    "quantization": "quantized weights",
    "qk_nope_head_dim": "multi-head latent attention",
}


@dataclass(frozen=True, slots=True)
class _Params:
    values: Mapping[str, Any]
    path: Path

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a number above 0")
        return float(value)

    def inner(self, key: str) -> _Params | None:
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return _Params(value, Path(f"{self.path}: {key}"))

    def error(self, key: str, allowed: str) -> InvalidRequest:
        if key not in self.values:
            return InvalidRequest(f"{self.path}: {key} is missing; it must be {allowed}", field="model")
        return InvalidRequest(f"{self.path}: {key} is {self.values[key]!r}; it must be {allowed}", field="model")


def config_of_params(path: Path) -> dict[str, Any]:
    """Returns the config. Raises InvalidRequest for missing and wrong values, Unsupported for other kinds of models."""
    params = _Params(_read(path), path)
    for key, what in _OTHER_KINDS.items():
        if params.values.get(key):
            raise Unsupported(f"{path}: {key} is set; models with {what} cannot be loaded from it", field="model")
    heads, num_layers = params.count("n_heads"), params.count("n_layers")
    head_dim = params.count("head_dim", default=max(1, params.count("dim") // heads))
    return {
        **_architecture(params),
        "vocab_size": params.count("vocab_size"),
        "hidden_size": params.count("dim"),
        "intermediate_size": params.count("hidden_dim"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": params.count("n_kv_heads", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": params.number("norm_eps"),
        "max_position_embeddings": _max_length(params),
        "tie_word_embeddings": bool(params.values.get("tied_embeddings")),
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": _rope(params),
        **_windows(params, num_layers),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds a {type(content).__name__}; it must hold an object", field="model")
    # Models with images nest the text model's keys in some releases.
    inner = content.get("llm")
    return {**content, **inner} if isinstance(inner, dict) else content


def _architecture(params: _Params) -> dict[str, Any]:
    experts = params.inner("moe")
    if experts is not None:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts.count("num_experts"),
            "num_experts_per_tok": experts.count("num_experts_per_tok"),
        }
    if params.inner("llama_4_scaling") is not None:
        return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def _max_length(params: _Params) -> int:
    key = next((key for key in _MAX_LENGTH_KEYS if params.values.get(key) is not None), _MAX_LENGTH_KEYS[0])
    return params.count(key, default=_DEFAULT_MAX_LENGTH)


def _rope(params: _Params) -> dict[str, Any]:
    theta = params.number("rope_theta", default=10000.0)
    yarn, queries = params.inner("yarn"), params.inner("llama_4_scaling")
    if yarn is None:
        if queries is not None:
            raise params.error("llama_4_scaling", "absent without yarn")
        return {"rope_type": "default", "rope_theta": theta}
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": yarn.count("original_max_position_embeddings"),
        "beta_fast": yarn.number("beta", default=32.0),
        "beta_slow": yarn.number("alpha", default=1.0),
    }
    if not yarn.values.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    if queries is not None:
        rope["llama_4_scaling_beta"] = queries.number("beta")
        if queries.count("original_max_position_embeddings") != rope["original_max_position_embeddings"]:
            raise queries.error("original_max_position_embeddings", "that of yarn")
    return rope


def _windows(params: _Params, num_layers: int) -> dict[str, Any]:
    """Returns the window: one for all layers, or a list that layers repeat, with null for those without."""
    window = params.values.get("sliding_window", params.values.get("_sliding_window"))
    if not isinstance(window, list):
        return {"sliding_window": window}
    sizes = {size for size in window if size is not None}
    if len(sizes) != 1 or num_layers % len(window):
        raise params.error("sliding_window", f"a list with one size, whose length divides n_layers ({num_layers})")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    return {"sliding_window": sizes.pop(), "layer_types": kinds * (num_layers // len(window))}
