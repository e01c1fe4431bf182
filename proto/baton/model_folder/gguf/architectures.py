"""The architectures of GGUF files that can be loaded: their names in config.json, and what their files do to tensors.

llama.cpp's converter renames all tensors. It also reorders the rows of queries and keys of some architectures, since
it rotates neighbours where Hugging Face rotates halves, and adds 1 to the norms of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.model_folder.gguf import fields
from baton.model_folder.gguf.header import GgufHeader
from baton.model_folder.gguf.layer_names import (
    ERNIE_MOE,
    GEMMA2,
    GEMMA3,
    GRANITE_MOE,
    LLAMA,
    MIXTRAL,
    NORMED,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2_MOE,
    QWEN3_MOE,
    STARCODER2,
)
from baton.model_folder.gguf.metadata import Metadata
from baton.rpc.errors import Unsupported

_LAYERS = "model.layers."
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NO_BIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({})
# Fields of config.json that say which linears have biases, and those linears' names in a layer of the file.
_ATTENTION_BIASES = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
_BIASES = {**_ATTENTION_BIASES, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}
_ALL_BIASES = {"use_bias": (*_ATTENTION_BIASES["attention_bias"], "ffn_up", "ffn_down")}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture of GGUF files."""

    name: str  # general.architecture
    architecture: str  # in config.json
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(LLAMA))
    when: str = ""  # a key, without the prefix of `name`, that only the metadata of this architecture has
    eps: str = "rms_norm_eps"  # the field of the norms' epsilon
    swaps_pairs: bool = False  # the rows of queries and keys are in the order of rotated neighbours
    norm_offset: float = 0.0  # the file adds it to norms
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NO_BIASES)
    rotates_parts: bool = False  # config.json may have a partial_rotary_factor
    longrope_scales: tuple[str, ...] = ("attention_factor",)  # the fields of what longrope scales attention by
    more: Callable[[fields.Reader], Mapping[str, Any]] = fields.nothing  # returns fields that others do not have

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts, whose matrices the file stacks."""
        return any("{}" in name for name in self.layer_names.values())

    def hugging_face_name(self, name: str) -> str | None:
        """Returns the tensor's name in Hugging Face form, or None for a tensor that is not a weight. The name of a
        stack of experts has {} for the expert."""
        stem, _, ending = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{ending}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block != "blk":
            return None
        if whole := self.layer_names.get(f"{part}.{ending}"):
            return f"{_LAYERS}{layer}.{whole}"
        return f"{_LAYERS}{layer}.{self.layer_names[part]}.{ending}" if part in self.layer_names else None

    def file_name(self, name: str) -> str:
        """Returns the name in the file of a tensor in Hugging Face form; an unknown name is itself."""
        stem, _, ending = name.rpartition(".")
        for theirs, ours in _OUTSIDE.items():
            if stem == ours:
                return f"{theirs}.{ending}"
        layer, _, part = stem.removeprefix(_LAYERS).partition(".")
        part = ".".join("{}" if piece.isdecimal() else piece for piece in part.split("."))
        for theirs, ours in self.layer_names.items():
            if ours == part:
                return f"blk.{layer}.{theirs}.{ending}"
            if ours == f"{part}.{ending}":
                return f"blk.{layer}.{theirs}"
        return name


_ALL = (
    GgufArchitecture(
        "llama",
        "MixtralForCausalLM",
        "mixtral",
        MIXTRAL,
        when="expert_count",
        swaps_pairs=True,
        more=fields.experts,
    ),
    GgufArchitecture("llama", "LlamaForCausalLM", "llama", swaps_pairs=True, biases=_BIASES),
    GgufArchitecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
    GgufArchitecture("qwen2moe", "Qwen2MoeForCausalLM", "qwen2_moe", QWEN2_MOE, more=fields.qwen2_moe),
    GgufArchitecture("qwen3", "Qwen3ForCausalLM", "qwen3", NORMED, biases=_ATTENTION_BIASES),
    GgufArchitecture("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", QWEN3_MOE, more=fields.qwen3_moe),
    GgufArchitecture("phi3", "Phi3ForCausalLM", "phi3", PHI3, rotates_parts=True, more=fields.windowed),
    GgufArchitecture("gemma", "GemmaForCausalLM", "gemma", norm_offset=1.0),
    GgufArchitecture("gemma2", "Gemma2ForCausalLM", "gemma2", GEMMA2, norm_offset=1.0, more=fields.gemma2),
    GgufArchitecture("gemma3", "Gemma3ForCausalLM", "gemma3_text", GEMMA3, norm_offset=1.0, more=fields.gemma3),
    GgufArchitecture("granite", "GraniteForCausalLM", "granite", swaps_pairs=True, biases=_BIASES, more=fields.granite),
    GgufArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "granitemoe",
        GRANITE_MOE,
        swaps_pairs=True,
        biases=_ATTENTION_BIASES,
        more=fields.granite_moe,
    ),
    GgufArchitecture(
        "phimoe",
        "PhimoeForCausalLM",
        "phimoe",
        MIXTRAL,
        biases={**_ATTENTION_BIASES, "lm_head_bias": ("output",)},
        longrope_scales=("short_mscale", "long_mscale"),
        more=fields.phi_moe,
    ),
    GgufArchitecture(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        ERNIE_MOE,
        biases={"use_bias": (*_BIASES["attention_bias"], *_BIASES["mlp_bias"])},
        more=fields.ernie_moe,
    ),
    GgufArchitecture("olmo2", "Olmo3ForCausalLM", "olmo3", OLMO2, when="attention.sliding_window", more=fields.olmo3),
    GgufArchitecture("olmo2", "Olmo2ForCausalLM", "olmo2", OLMO2, biases=_ATTENTION_BIASES),
    GgufArchitecture("olmoe", "OlmoeForCausalLM", "olmoe", OLMOE, more=fields.olmoe),
    GgufArchitecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "starcoder2",
        STARCODER2,
        eps="norm_epsilon",
        biases=_ALL_BIASES,
        more=fields.windowed,
    ),
    GgufArchitecture("smollm3", "SmolLM3ForCausalLM", "smollm3", swaps_pairs=True, biases=_BIASES),
    GgufArchitecture(
        "command-r",
        "CohereForCausalLM",
        "cohere",
        NORMED,
        eps="layer_norm_eps",
        biases=_ATTENTION_BIASES,
        more=fields.cohere,
    ),
    GgufArchitecture("cohere2", "Cohere2ForCausalLM", "cohere2", eps="layer_norm_eps", more=fields.cohere2),
)
ARCHITECTURES: Mapping[str, tuple[GgufArchitecture, ...]] = {
    name: tuple(one for one in _ALL if one.name == name) for name in dict.fromkeys(one.name for one in _ALL)
}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file. Raises Unsupported that names it and those that there are."""
    name = Metadata(header.metadata, header.path).text("general.architecture")
    for one in ARCHITECTURES.get(name, ()):
        if not one.when or header.metadata.get(f"{name}.{one.when}"):
            return one
    raise Unsupported(
        f"{header.path}: general.architecture is {name!r}; GGUF files can be loaded of {', '.join(ARCHITECTURES)}",
        field="model",
    )
