"""The names of tensors in Mistral's own checkpoints, and in Hugging Face form. Rows of queries and keys are reordered:
Mistral rotates neighbours, Hugging Face rotates halves."""

from __future__ import annotations

from collections.abc import Iterator

_LAYERS, _THEIR_LAYERS = "model.layers.", "layers."
_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_EXPERTS, _THEIR_EXPERTS = "block_sparse_moe.experts.", "feed_forward.experts."
_OUR_OUTSIDE = {ours: theirs for theirs, ours in _OUTSIDE.items()}
_OUR_IN_LAYER = {ours: theirs for theirs, ours in _IN_LAYER.items()}
# Parts of models with images or audio, which are not used: requests are text.
_TOWERS = (
    "vision_encoder.",
    "vision_language_adapter.",
    "vision_language_projection.",
    "patch_merger.",
    "pre_mm_projector_norm.",
    "mm_whisper_embeddings.",
    "mm_streams_embeddings.",
)
SWAPPED = ("attention.wq", "attention.wk")


def is_of_tower(name: str) -> bool:
    """Returns whether the tensor is not of the text model."""
    return name.startswith(_TOWERS)


def hugging_face_name(name: str) -> str | None:
    """Returns a tensor's name in Hugging Face form, or None for an unknown one."""
    stem, _, ending = name.rpartition(".")
    found = next(_renamed(stem, _THEIR_LAYERS, _LAYERS, (_OUTSIDE, _IN_LAYER), (_THEIR_EXPERTS, _EXPERTS)), None)
    return None if found is None else f"{found}.{ending}"


def mistral_name(name: str) -> str:
    """Returns Mistral's name of a tensor in Hugging Face form; an unknown name is itself."""
    stem, _, ending = name.rpartition(".")
    tables = (_OUR_OUTSIDE, _OUR_IN_LAYER)
    found = next(_renamed(stem, _LAYERS, _THEIR_LAYERS, tables, (_EXPERTS, _THEIR_EXPERTS)), None)
    return name if found is None else f"{found}.{ending}"


def _renamed(
    stem: str, layers: str, to_layers: str, tables: tuple[dict[str, str], dict[str, str]], experts: tuple[str, str]
) -> Iterator[str]:
    outside, in_layer = tables
    if stem in outside:
        yield outside[stem]
    elif stem.startswith(layers):
        layer, _, part = stem.removeprefix(layers).partition(".")
        if part in in_layer:
            yield f"{to_layers}{layer}.{in_layer[part]}"
        elif part.startswith(experts[0]):
            yield f"{to_layers}{layer}.{part.replace(*experts, 1)}"
