"""The model families by architecture, and the reading of a model folder's config by one. Loads no PyTorch."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields, read_json
from baton.worker.models.pooling.names import Purpose, base_name, purpose_of
from baton.worker.models.reading import Family
from baton.worker.models.weight_formats import KEY, settings_of, with_format
from baton.worker.quantization.formats.table import SIDE_FILES

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_MODULES: Mapping[str, str] = {  # of baton.worker.models.families, each imported when its family is first used
    "LlamaForCausalLM": "llama.llama",
    "MistralForCausalLM": "llama.mistral",
    "MinistralForCausalLM": "llama.ministral",
    "Ministral3ForCausalLM": "llama.ministral3",
    "Mistral3ForConditionalGeneration": "llama.mistral3",
    "Qwen2ForCausalLM": "qwen.qwen2",
    "Qwen3ForCausalLM": "qwen.qwen3",
    "Phi3ForCausalLM": "llama.phi3",
    "GraniteForCausalLM": "granite.granite",
    "Olmo2ForCausalLM": "olmo.olmo2",
    "Olmo3ForCausalLM": "olmo.olmo3",
    "SmolLM3ForCausalLM": "llama.smollm3",
    "GlmForCausalLM": "glm.glm",
    "Glm4ForCausalLM": "glm.glm4",
    "GraniteMoeHybridForCausalLM": "granite.granite4",
    "CohereForCausalLM": "cohere.cohere",
    "Cohere2ForCausalLM": "cohere.cohere2",
    "OlmoForCausalLM": "olmo.olmo",
    "GemmaForCausalLM": "gemma.gemma",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3_text_part",
    "GPT2LMHeadModel": "gpt.gpt2",
    "GPTNeoXForCausalLM": "gpt.gpt_neox",
    "Starcoder2ForCausalLM": "gpt.starcoder2",
    "BertModel": "encoders.bert",
    "RobertaModel": "encoders.roberta",
    "XLMRobertaModel": "encoders.xlm_roberta",
    "DistilBertModel": "encoders.distilbert",
    "ModernBertModel": "encoders.modernbert",
    "NomicBertModel": "encoders.nomic_bert",
    "MPNetModel": "encoders.mpnet",
    "GteModel": "encoders.gte",
    "JinaEmbeddingsV3Model": "encoders.jina_v3",
    "MixtralForCausalLM": "moe.mixtral",
    "Qwen2MoeForCausalLM": "moe.qwen2",
    "Qwen3MoeForCausalLM": "moe.qwen3",
    "OlmoeForCausalLM": "moe.olmoe",
    "GraniteMoeForCausalLM": "moe.granite",
    "Glm4MoeForCausalLM": "moe.glm4",
    "Ernie4_5_MoeForCausalLM": "moe.ernie4_5",
    "MiniMaxM2ForCausalLM": "moe.minimax_m2",
    "GptOssForCausalLM": "moe.gpt_oss",
    "PhimoeForCausalLM": "moe.phi",
    "Qwen3NextForCausalLM": "qwen.qwen3_next",
    "Qwen3_5ForCausalLM": "qwen.qwen3_5",
    "Lfm2ForCausalLM": "lfm.lfm2",
    "NemotronHForCausalLM": "nemotron.nemotron_h",
    "DeepseekV2ForCausalLM": "deepseek.deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek.deepseek_v3",
    "Glm4MoeLiteForCausalLM": "deepseek.glm4_moe_lite",
    "YoutuForCausalLM": "deepseek.youtu",
    "MiniCPM3ForCausalLM": "deepseek.minicpm3",
    "KimiLinearForCausalLM": "kimi.kimi_linear",
}


class Families(Mapping[str, Family]):
    """The families by architecture. Imports the module of one when it is first looked up."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, architecture: str) -> Family:
        family: Family = import_module(f"baton.worker.models.families.{self._modules[architecture]}").FAMILY
        return family

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


FAMILIES: Mapping[str, Family] = Families(_MODULES)
# What checkpoints of remote code have and no family computes, and what would do instead.
_REMOTE_FEATURES = {
    "lora_adaptations": (
        "absent: adapters inside the weights, as jinaai/jina-embeddings-v3 has them, are not read. Use "
        "jinaai/jina-embeddings-v3-hf for embeddings without an adapter, or a copy of it into which PEFT merged the "
        "adapter of one task (merge_and_unload)"
    ),
}
_BY_BASE = {base_name(name): name for name in FAMILIES}
_HEADS = re.compile(r"For[A-Z]\w+$|LMHeadModel$")  # what names of architectures end with


def read_folder(folder: Path) -> Fields:
    """Reads config.json, and generation_config.json if it exists."""
    raw = read_json(folder / CONFIG_FILE, "a Hugging Face model folder has one")
    generation_path = folder / GENERATION_CONFIG_FILE
    generation = read_json(generation_path, "") if generation_path.exists() else {}
    if "eos_token_id" in generation:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    fields = Fields(raw, str(folder / CONFIG_FILE))
    return fields if settings_of(fields) is not None else _with_side_file(fields, folder)


def _with_side_file(fields: Fields, folder: Path) -> Fields:
    """Returns the fields with the weight format that a file beside config.json describes, if there is one."""
    for name, method in SIDE_FILES.items():
        if (folder / name).exists():
            settings = {**read_json(folder / name, ""), "quant_method": method}
            return Fields({**fields.raw, KEY: settings}, fields.source)
    return fields


def family_of(fields: Fields) -> Family | None:
    """Returns the family of a config.json; None if its architecture has none."""
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else _architecture_of_type(fields.raw.get("model_type"))
    name = str(name)
    if name not in FAMILIES:
        name = _present_name(name)
    if name not in FAMILIES and purpose_of(fields) is not Purpose.GENERATE:
        name = _BY_BASE.get(base_name(name)) or _of_former_base(name)  # the same layers under another head
    return FAMILIES.get(name)


def _architecture_of_type(model_type: object) -> str:
    """Returns the architecture of a model type; "" for a type of no family."""
    return next((one.architecture for one in FAMILIES.values() if one.model_type == model_type), "")


def _present_name(architecture: str) -> str:
    """Returns the name of an architecture that had this one in older checkpoints; an unknown name is itself."""
    former = {one.former_name: one.architecture for one in FAMILIES.values() if one.former_name}
    return former.get(architecture, architecture)


def _of_former_base(name: str) -> str:
    """Returns the architecture whose older name has the same layers under another head; else the name itself."""
    former = {base_name(one.former_name): one.architecture for one in FAMILIES.values() if one.former_name}
    return former.get(base_name(name), name)


def read_by(family: Family, fields: Fields) -> ModelConfig:
    """Returns the ModelConfig of a config.json by its family."""
    raw: Mapping[str, Any] = fields.raw
    for key, allowed in _REMOTE_FEATURES.items():
        if raw.get(key):
            raise fields.error(key, allowed)
    # The heads of reward models are always the same.
    if raw.get("auto_map") and not (family.ignores_auto_map or purpose_of(fields).rewards):
        raise fields.error("auto_map", "absent: the model needs code of its own, and no code of a model folder is run")
    return with_format(family.read(fields), fields)


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
