"""The architectures of GGUF files that can be loaded: their names in config.json, and what their files do to tensors.

llama.cpp's converter renames all tensors. It also reorders the rows of queries and keys of some architectures, since
it rotates neighbours where Hugging Face rotates halves, and adds 1 to the norms of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.model_folder.gguf.header import GgufHeader
from baton.model_folder.gguf.metadata import Metadata
from baton.rpc.errors import Unsupported

_LAYERS = "model.layers."
# Names in the file, and in Hugging Face form; those of layers are without their prefixes.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WITH_QK_NORMS = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture of GGUF files."""

    name: str  # general.architecture
    architecture: str  # in config.json
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_LLAMA))
    swaps_pairs: bool = False  # the rows of queries and keys are in the order of rotated neighbours
    norm_offset: float = 0.0  # the file adds it to norms

    def hugging_face_name(self, name: str) -> str | None:
        """Returns the tensor's name in Hugging Face form, or None for a tensor that is not a weight."""
        stem, _, ending = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{ending}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block != "blk" or part not in self.layer_names:
            return None
        return f"{_LAYERS}{layer}.{self.layer_names[part]}.{ending}"

    def file_name(self, name: str) -> str:
        """Returns the name in the file of a tensor in Hugging Face form; an unknown name is itself."""
        stem, _, ending = name.rpartition(".")
        for theirs, ours in _OUTSIDE.items():
            if stem == ours:
                return f"{theirs}.{ending}"
        layer, _, part = stem.removeprefix(_LAYERS).partition(".")
        found = next((theirs for theirs, ours in self.layer_names.items() if part == ours), None)
        return name if found is None else f"blk.{layer}.{found}.{ending}"


_ALL = (
    GgufArchitecture("llama", "LlamaForCausalLM", "llama", swaps_pairs=True),
    GgufArchitecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
    GgufArchitecture("qwen3", "Qwen3ForCausalLM", "qwen3", layer_names=_WITH_QK_NORMS),
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = {one.name: one for one in _ALL}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file. Raises Unsupported that names it and those that there are."""
    name = Metadata(header.metadata, header.path).text("general.architecture")
    if name not in ARCHITECTURES:
        raise Unsupported(
            f"{header.path}: general.architecture is {name!r}; GGUF files can be loaded of {', '.join(ARCHITECTURES)}",
            field="model",
        )
    return ARCHITECTURES[name]
