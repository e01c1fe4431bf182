"""The model families by architecture, and the reading of a model folder's ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields, read_json
from baton.worker.models.reading import Family
from baton.worker.models.transformers_backend import library

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_MODULES = (  # of baton.worker.models.families
    "llama.llama",
    "llama.mistral",
    "llama.ministral",
    "llama.ministral3",
    "llama.mistral3",
    "qwen.qwen2",
    "qwen.qwen3",
    "llama.phi3",
    "granite.granite",
    "olmo.olmo2",
    "olmo.olmo3",
    "llama.smollm3",
    "glm.glm",
    "glm.glm4",
    "granite.granite4",
    "cohere.cohere",
    "cohere.cohere2",
    "olmo.olmo",
    "gemma.gemma",
    "gemma.gemma2",
    "gemma.gemma3",
    "gemma.gemma3_text_part",
    "gpt.gpt2",
    "gpt.gpt_neox",
    "gpt.starcoder2",
)
_WITH_EXPERTS = (
    "moe.mixtral",
    "moe.qwen2",
    "moe.qwen3",
    "moe.olmoe",
    "moe.granite",
    "moe.glm4",
    "moe.ernie4_5",
    "moe.minimax_m2",
    "moe.gpt_oss",
    "moe.phi",
)


def _family(module: str) -> Family:
    family: Family = import_module(f"baton.worker.models.families.{module}").FAMILY
    return family


FAMILIES: Mapping[str, Family] = {family.architecture: family for family in map(_family, _MODULES + _WITH_EXPERTS)}
_BY_MODEL_TYPE = {family.model_type: family.architecture for family in FAMILIES.values()}
_BY_FORMER_NAME = {family.former_name: family.architecture for family in FAMILIES.values() if family.former_name}


def load_config(folder: Path, implementation: str = "auto") -> ModelConfig:
    """Reads config.json, and generation_config.json if it exists. `implementation`: auto, baton or transformers."""
    raw = read_json(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    generation_path = folder / GENERATION_CONFIG_FILE
    generation = read_json(generation_path, "") if generation_path.exists() else {}
    if "eos_token_id" in generation:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    return parse_config(raw, str(folder / CONFIG_FILE), implementation)


def parse_config(raw: Mapping[str, Any], source: str, implementation: str = "auto") -> ModelConfig:
    """Returns the ModelConfig of a config.json, by a family of ours unless Transformers is asked for, or has the
    architecture alone. Errors name `source`."""
    fields = Fields(raw, source)
    family = FAMILIES.get(_architecture_name(fields))
    if implementation == "transformers":
        return _read_with_transformers(fields)
    if family is None:
        if implementation == "auto" and _in_transformers(fields):
            return _read_unknown(fields)
        raise _unknown(fields)
    if raw.get("auto_map") and not family.ignores_auto_map:
        raise fields.error("auto_map", "absent: the model needs code of its own, and no code of a model folder is run")
    if raw.get("quantization_config"):
        raise fields.error("quantization_config", "absent: only unquantized weights can be loaded")
    return family.read(fields)


def _architecture_name(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else _BY_MODEL_TYPE.get(str(fields.raw.get("model_type")))
    return _BY_FORMER_NAME.get(str(name), str(name))


def _in_transformers(fields: Fields) -> bool:
    return library.architecture_of(fields) in library.causal_architectures()


def _read_with_transformers(fields: Fields) -> ModelConfig:
    # Imported here, because Transformers is large and optional.
    from baton.worker.models.transformers_backend.reading import read_with_transformers

    return read_with_transformers(fields)


def _read_unknown(fields: Fields) -> ModelConfig:
    try:
        return _read_with_transformers(fields)
    except InvalidRequest as error:
        raise _unknown(fields, f"Transformers' own is refused: {error}") from error


def _unknown(fields: Fields, why: str = "") -> InvalidRequest:
    name = library.architecture_of(fields) or str(fields.raw.get("model_type"))
    if not why and _in_transformers(fields):
        why = "--model-impl transformers may run it"
    elif not why:
        nearest = library.nearest(name, FAMILIES.keys() | library.causal_architectures())
        more = "" if nearest in FAMILIES else ", which --model-impl transformers may run"
        why = f"the nearest name is {nearest}{more}" if nearest else ""
    if not library.is_installed():
        why = "; ".join(filter(None, (why, f"Transformers ({library.INSTALL}) runs more")))
    key = "architectures" if fields.raw.get("architectures") else "model_type"
    return fields.error(key, "; ".join(filter(None, (f"one of {', '.join(FAMILIES)}", why))))
