"""The weight format that a config.json names. Loads PyTorch only where a format is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig, WeightsInFormat
from baton.worker.models.fields import Fields
from baton.worker.models.names import Layout
from baton.worker.quantization.formats.table import FORMATS, ONLINE, FormatRow

KEY = "quantization_config"
_FORMER_KEY = "compression_config"


def settings_of(fields: Fields) -> Mapping[str, Any] | None:
    """Returns the settings of the weight format, if there is one; with a vision tower, those of the text part."""
    text = fields.raw.get("text_config")
    for raw in (fields.raw, text if isinstance(text, Mapping) else {}):
        for key in (KEY, _FORMER_KEY):
            if found := raw.get(key):
                return found if isinstance(found, Mapping) else {KEY: found}
    return None


def without_settings(fields: Fields) -> Fields:
    """Returns the fields of the same model with unquantized weights."""
    return Fields({key: value for key, value in fields.raw.items() if key not in (KEY, _FORMER_KEY)}, fields.source)


def with_format(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config with the weight format that the fields name. Raises InvalidRequest for an unknown one."""
    settings = settings_of(fields)
    if settings is None:
        return config
    row = FORMATS.get(str(settings.get("quant_method")))
    if row is None:
        known = ", ".join(FORMATS)
        raise fields.error(KEY, f"absent, or of the quant_method {known}: only unquantized weights and these are read")
    return in_format(config, fields, settings, row.executors, partial(_class_of, row))


def quantized_as(config: ModelConfig, name: str, source: str) -> ModelConfig:
    """Returns the config with the weight format `name`: the checkpoint's own, or one made while it loads; auto: the
    checkpoint's. Raises InvalidRequest for another one."""
    stored = config.weight_format
    if name == "auto" or (stored is not None and stored.name == name):
        return config
    if stored is not None:
        raise _not_quantized_as(name, f"{source} has weights in the format {stored.name}; give that, or auto")
    row = ONLINE.get(name)
    if row is None:
        raise _not_quantized_as(
            name, f"{source} has unquantized weights, of which {', '.join(ONLINE)} is made at load; give that, or auto"
        )
    if config.transformers is not None:
        raise _not_quantized_as(
            name, f"Transformers computes {config.architecture}, with unquantized weights; give auto"
        )
    text = json.dumps({"quant_method": name, "online": True}, sort_keys=True)
    made = cache(lambda: _class_of(row)({}))
    return replace(config, weight_format=WeightsInFormat(name, row.executors, text, made, online=True))


def in_gguf(config: ModelConfig, types: Mapping[str, str], *, planes: bool = False) -> ModelConfig:
    """Returns the config with weights as a GGUF file packs them, or in planes. `types`: of each matrix, by name.

    The weights are those of a model that is dequantized at load, so its digest does not tell them apart.
    """
    if config.transformers is not None or config.names.layout is not Layout.ROWS:
        return config
    row = FORMATS["gguf"]
    made = cache(lambda: _class_of(row)({"tensors": types, "planes": planes}))
    return replace(config, weight_format=WeightsInFormat(row.quant_method, row.executors, "", made))


def _not_quantized_as(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"quantization={name}: {why}", field="quantization")


def _class_of(row: FormatRow) -> Any:
    return import_module(f"baton.worker.quantization.formats.{row.module}").FORMAT


def in_format(
    config: ModelConfig,
    fields: Fields,
    settings: Mapping[str, Any],
    executors: tuple[str, ...],
    load: Callable[[], Any],
) -> ModelConfig:
    """Returns the config with a weight format, whose class `load` returns."""
    name = str(settings.get("quant_method"))
    if config.names.layout is not Layout.ROWS:
        raise fields.error(KEY, f"absent: {config.architecture} stores linears in another order than weight formats")

    @cache
    def made() -> Any:
        kind = load()
        if not kind.covers_experts and any(isinstance(layer.mlp, ExpertsSpec) for layer in config.layers):
            raise fields.error(KEY, f"absent: the weight format {name} covers linears of families, and no experts")
        try:
            return kind(settings)
        except ValueError as error:
            why = f"{KEY} is not what the weight format {name} reads: {error}"
            raise InvalidRequest(f"{fields.source}: {why}", field="model") from error

    text = json.dumps(settings, sort_keys=True, default=str)
    return replace(config, weight_format=WeightsInFormat(name, executors, text, made))
