"""The reading of a model folder's ModelConfig: by a family of ours, or by Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.config_overrides import check_read, overridden
from baton.worker.models.both_sides import require_order, with_both_sides
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.plugins import NO_MODEL_PLUGINS, ModelPlugins
from baton.worker.models.supported.families import FAMILIES, family_of, nearest, read_by, read_folder
from baton.worker.models.transformers_backend import installed


def load_config(
    folder: Path,
    implementation: str = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    plugins: ModelPlugins = NO_MODEL_PLUGINS,
) -> ModelConfig:
    """Reads config.json with these overrides, and generation_config.json if it exists.

    `implementation`: auto, baton or transformers.
    """
    fields = read_folder(folder)
    return parse_config(fields.raw, fields.source, implementation, overrides, plugins)


def parse_config(
    raw: Mapping[str, Any],
    source: str,
    implementation: str = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    plugins: ModelPlugins = NO_MODEL_PLUGINS,
) -> ModelConfig:
    """Returns the ModelConfig of a config.json, by a family of ours unless Transformers is asked for, or has the
    architecture alone. Errors name `source`."""
    if not overrides:
        return _read(raw, source, implementation, plugins)
    merged = overridden(raw, overrides, source)
    source_of_merged = f"{source} with hf_overrides"
    config = _read(merged, source_of_merged, implementation, plugins)

    def read(new: Mapping[str, Any]) -> ModelConfig:
        return _read(new, source_of_merged, implementation, plugins)

    check_read(raw, overrides, source, read, config.architecture)
    return config


def _read(raw: Mapping[str, Any], source: str, implementation: str, plugins: ModelPlugins) -> ModelConfig:
    given = Fields(raw, source)
    config = plugins.with_format(_read_layers(plugins.without_format(given), implementation, plugins), given)
    if config.weight_format is not None:
        config.weight_format.made()
    return config


def _read_layers(fields: Fields, implementation: str, plugins: ModelPlugins) -> ModelConfig:
    family = family_of(fields) or plugins.family_of(fields)
    if implementation == "transformers":
        return _read_with_transformers(fields)
    if family is None:
        if implementation == "auto" and _in_transformers(fields):
            return _read_unknown(fields)
        raise _unknown(fields)
    return with_both_sides(read_by(family, fields), fields)


def _in_transformers(fields: Fields) -> bool:
    return installed.architecture_of(fields) in installed.causal_architectures()


def _read_with_transformers(fields: Fields) -> ModelConfig:
    require_order(fields)
    # Imported here, because Transformers is large and optional.
    from baton.worker.models.transformers_backend.reading import read_with_transformers

    return read_with_transformers(fields)


def _read_unknown(fields: Fields) -> ModelConfig:
    try:
        return _read_with_transformers(fields)
    except InvalidRequest as error:
        raise _unknown(fields, f"Transformers' own is refused: {error}") from error


def _unknown(fields: Fields, why: str = "") -> InvalidRequest:
    name = installed.architecture_of(fields) or str(fields.raw.get("model_type"))
    if not why and _in_transformers(fields):
        why = "--model-impl transformers may run it"
    elif not why:
        near = nearest(name, FAMILIES.keys() | installed.causal_architectures())
        more = "" if near in FAMILIES else ", which --model-impl transformers may run"
        why = f"the nearest name is {near}{more}" if near else ""
    if not installed.is_installed():
        why = "; ".join(filter(None, (why, f"Transformers ({installed.INSTALL}) runs more")))
    key = "architectures" if fields.raw.get("architectures") else "model_type"
    why = "; ".join(filter(None, (why, "baton models lists those that there are")))
    return InvalidRequest(
        f"{fields.source}: {key} is {fields.raw.get(key)!r}, of which Baton has no family; {why}", field="model"
    )
