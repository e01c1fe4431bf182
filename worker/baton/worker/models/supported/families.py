"""The model families by architecture, and the reading of a model folder's config by one. Loads no PyTorch."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields, read_json
from baton.worker.models.pooling.names import Purpose, base_name, purpose_of
from baton.worker.models.reading import Family

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
_ENCODERS = (
    "encoders.bert",
    "encoders.roberta",
    "encoders.xlm_roberta",
    "encoders.distilbert",
    "encoders.modernbert",
    "encoders.nomic_bert",
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


FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in map(_family, _MODULES + _ENCODERS + _WITH_EXPERTS)
}
_BY_MODEL_TYPE = {family.model_type: family.architecture for family in FAMILIES.values()}
_BY_FORMER_NAME = {family.former_name: family.architecture for family in FAMILIES.values() if family.former_name}
_BY_BASE = {base_name(name): name for name in FAMILIES}
_HEADS = re.compile(r"For[A-Z]\w+$|LMHeadModel$")  # what names of architectures end with


def read_folder(folder: Path) -> Fields:
    """Reads config.json, and generation_config.json if it exists."""
    raw = read_json(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    generation_path = folder / GENERATION_CONFIG_FILE
    generation = read_json(generation_path, "") if generation_path.exists() else {}
    if "eos_token_id" in generation:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    return Fields(raw, str(folder / CONFIG_FILE))


def family_of(fields: Fields) -> Family | None:
    """Returns the family of a config.json; None if its architecture has none."""
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else _BY_MODEL_TYPE.get(str(fields.raw.get("model_type")))
    name = _BY_FORMER_NAME.get(str(name), str(name))
    if name not in FAMILIES and purpose_of(fields) is not Purpose.GENERATE:
        name = _BY_BASE.get(base_name(name), name)  # the same layers under another head
    return FAMILIES.get(name)


def read_by(family: Family, fields: Fields) -> ModelConfig:
    """Returns the ModelConfig of a config.json by its family."""
    raw: Mapping[str, Any] = fields.raw
    if raw.get("auto_map") and not family.ignores_auto_map:
        raise fields.error("auto_map", "absent: the model needs code of its own, and no code of a model folder is run")
    if raw.get("quantization_config"):
        raise fields.error("quantization_config", "absent: only unquantized weights can be loaded")
    return family.read(fields)


def summary_of(family: Family) -> str:
    """Returns the first line of the family's module: which models it covers, and what is special about them."""
    return (sys.modules[family.read.__module__].__doc__ or "").partition("\n")[0].rstrip(".")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known architecture, or that of the model type, that resembles a name most; "" if none does."""
    stems = {_stem(family.model_type): family.architecture for family in FAMILIES.values()}
    stems |= {_stem(each): each for each in sorted(known)}
    found = difflib.get_close_matches(_stem(name), stems, n=1)
    return stems[found[0]] if found else ""


def _stem(name: str) -> str:
    """Returns the part of a name in which architectures differ."""
    return _HEADS.sub("", name).lower().replace("_", "")
