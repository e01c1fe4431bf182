"""Reads the ModelConfig of a model that Transformers computes, from a trial without weights. Refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.supported.families import nearest
from baton.worker.models.transformers_backend import installed
from baton.worker.models.transformers_backend.spec import TransformersSpec
from baton.worker.models.transformers_backend.trial import Call, Trial, try_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Transformers rotates queries and keys itself.
_ROPE = RopeConfig(NO_ROPE, 1.0)
# These depend on the longest sequence of a batch.
_ROPES_OF_LENGTH = ("dynamic", "longrope")


def read_with_transformers(fields: Fields) -> ModelConfig:
    """Reads a config.json. Raises InvalidRequest for what cannot run on Baton's attention."""
    version, name = installed.version(fields), installed.architecture_of(fields)
    if name not in installed.causal_architectures():
        near = nearest(name, installed.causal_architectures())
        hint = f"; the nearest is {near}" if near else ""
        raise _refusal(fields, name, f"Transformers {version} has no causal language model of this name{hint}")
    if fields.raw.get("quantization_config"):
        raise fields.error("quantization_config", "absent: only unquantized weights can be loaded")
    config = installed.config_of(name, fields.raw, fields.source)
    if problem := _problem_of_config(config) or _problem_of_class(name):
        raise _refusal(fields, name, problem)
    trial = try_out(name, config, fields.source)
    for find in (_problem_of_modules, _problem_of_attention, _problem_of_positions):
        if problem := find(trial, config):
            raise _refusal(fields, name, problem)
    return _model_config(fields, name, config, trial, version)


def _refusal(fields: Fields, name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{fields.source}: {name} cannot run with model_impl=transformers: {problem}", field="model")


def _problem_of_config(config: PreTrainedConfig) -> str:
    if config.is_encoder_decoder:
        return "it has an encoder"
    if config.get_text_config() is not config:
        return "it has more parts than a language model"
    return ""


def _problem_of_class(name: str) -> str:
    if installed.takes_attention(name):
        return ""
    return "its attention does not use Transformers' attention interface (ALiBi, recurrent state, or a form of its own)"


def _problem_of_attention(trial: Trial, config: PreTrainedConfig) -> str:
    calls, num_layers = trial.calls, config.num_hidden_layers
    if not calls:
        return f"no layer attends{_kinds_of(config)}"
    if len(calls) != num_layers:
        return (
            f"{len(calls)} calls of attention in {num_layers} layers{_kinds_of(config)}: layers with recurrent state, "
            "or that attend twice, are not supported"
        )
    if len({call.module for call in calls}) != len(calls):
        return "layers share an attention module"
    for call in calls:
        if problem := _problem_of_call(call, calls[0]):
            return f"{call.module}: {problem}"
    return ""


def _problem_of_call(call: Call, first: Call) -> str:
    if call.unknown:
        return f"attention gets {', '.join(call.unknown)}, which Baton's does not take"
    if call.window is None:
        return "its mask is neither causal nor a sliding window"
    if call.value[-1] != call.key[-1]:
        return f"keys of {call.key[-1]} and values of {call.value[-1]} elements (latent attention)"
    if (call.query[1], *call.key[1::2]) != (first.query[1], *first.key[1::2]):
        return f"its heads have another shape than those of {first.module}; all layers share one KV cache"
    if call.key[2] != call.query[2]:
        return "it attends to more keys than the model has tokens"
    if call.key[-1] % 2:
        return f"head_dim is {call.key[-1]}; it must be even"
    if (call.soft_cap, bool(call.sinks)) != (first.soft_cap, bool(first.sinks)):
        return f"its soft cap or sinks differ from those of {first.module}"
    return ""


def _kinds_of(config: PreTrainedConfig) -> str:
    kinds = getattr(config, "layer_types", None)
    return f" ({', '.join(sorted(set(kinds)))})" if isinstance(kinds, list) and kinds else ""


def _problem_of_positions(trial: Trial, config: PreTrainedConfig) -> str:
    if not trial.takes_positions:
        return "it takes no position_ids (its positions follow from the whole batch)"
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        return "its config states no max_position_embeddings"
    return ""


def _problem_of_modules(trial: Trial, config: PreTrainedConfig) -> str:
    for name, module in trial.model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            return f"{name}: a convolution over tokens{_kinds_of(config)}"
        kinds = getattr(module, "rope_type", None)
        listed = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if found := [kind for kind in listed if kind in _ROPES_OF_LENGTH]:
            return f"{name}: RoPE of the kind {found[0]} depends on the longest sequence of a batch"
    return ""


def _model_config(fields: Fields, name: str, config: PreTrainedConfig, trial: Trial, version: str) -> ModelConfig:
    hidden = int(config.hidden_size)
    mlp = MlpSpec(_whole(config, "intermediate_size", 4 * hidden))
    layers = tuple(LayerSpec(_attention(call), mlp) for call in trial.calls)
    model = trial.model
    tensors = [*model.parameters(), *model.buffers()]
    return ModelConfig(
        architecture=name,
        vocab_size=trial.num_logits,
        hidden_size=hidden,
        layers=layers,
        norm=NormSpec(0.0),
        max_position_embeddings=_longest(config),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        initializer_range=float(getattr(config, "initializer_range", None) or 0.02),
        dtype=fields.text("dtype", default=fields.text("torch_dtype", default="")),
        eos_token_ids=_eos(config),
        transformers=TransformersSpec(
            class_name=name,
            raw_config=installed.canonical(fields.raw),
            body=trial.body,
            attentions=tuple(call.module for call in trial.calls),
            num_weights=sum(tensor.numel() for tensor in tensors),
            version=version,
            reads_values=trial.reads_values,
            sinks=tuple(call.sinks for call in trial.calls if call.sinks),
        ),
    )


def _attention(call: Call) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=call.query[1],
        num_kv_heads=call.key[1],
        head_dim=call.key[3],
        rope=_ROPE,
        scale=call.scale,
        window=call.window or 0,
        soft_cap=call.soft_cap,
        sinks=bool(call.sinks),
    )


def _whole(config: PreTrainedConfig, key: str, default: int) -> int:
    value = getattr(config, key, None)
    return value if isinstance(value, int) else default


def _longest(config: PreTrainedConfig) -> int:
    """Returns the tokens that the positions support, with YaRN's extension."""
    found: Any = getattr(config, "rope_parameters", None)
    ropes = found.values() if _all_of(found, lambda rope: isinstance(rope, Mapping)) else [found]
    extended = [
        int(rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", 0))
        for rope in ropes
        if isinstance(rope, Mapping) and rope.get("rope_type") == "yarn"
    ]
    return max(int(config.max_position_embeddings), *extended, 0)


def _all_of(found: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(map(holds, found.values()))


def _eos(config: PreTrainedConfig) -> tuple[int, ...]:
    value = config.eos_token_id
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (int(value),)
