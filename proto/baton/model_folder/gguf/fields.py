"""The fields of config.json that one architecture of GGUF files has and most do not, from the metadata.

Where llama.cpp has a constant of an architecture that no file states, so has the function here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from baton.model_folder.gguf.metadata import Metadata
from baton.rpc.errors import Unsupported

_WINDOW = "attention.sliding_window"
_PERIOD = "attention.sliding_window_pattern"
_SHARED_COUNT, _NUM_DENSE = "expert_shared_count", "leading_dense_block_count"
_SHARED_SIZE = "expert_shared_feed_forward_length"
# The largest models of their kind have scores scaled by hidden_size / num_attention_heads. By their layers.
_LARGEST_GEMMA2, _LARGEST_GEMMA3 = 46, 62


@dataclass(frozen=True, slots=True)
class Reader:
    """The metadata of one architecture, whose keys are without its prefix."""

    metadata: Metadata
    prefix: str
    tensors: Collection[str]  # names in the file

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def has(self, name: str) -> bool:
        """Returns whether the key has a value other than zero, null and the like."""
        return bool(self.metadata.values.get(self.key(name)))

    def count(self, name: str, default: int | None = None) -> int:
        return self.metadata.count(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(self.key(name), default)

    def flag(self, name: str, default: bool) -> bool:
        return self.metadata.flag(self.key(name), default)

    @property
    def num_layers(self) -> int:
        return self.count("block_count")

    @property
    def head_dim(self) -> int:
        return self.count("attention.key_length", default=max(1, self.mean_head_dim))

    @property
    def mean_head_dim(self) -> int:
        """The share of one head in a token's vector."""
        return self.count("embedding_length") // self.count("attention.head_count")


def nothing(reader: Reader) -> dict[str, Any]:
    """Returns no fields."""
    return {}


def windowed(reader: Reader) -> dict[str, Any]:
    """Returns the window of all layers; a length of 0 is none."""
    return {"sliding_window": reader.count(_WINDOW) if reader.has(_WINDOW) else None}


def _windows(reader: Reader, period: int) -> dict[str, Any]:
    """Returns the window, and which layers have it: those that the file lists, else all but each `period`-th."""
    listed = reader.metadata.values.get(reader.key(_PERIOD))
    if isinstance(listed, list):
        if len(listed) != reader.num_layers or not all(isinstance(slides, bool | int) for slides in listed):
            raise reader.metadata.error(
                reader.key(_PERIOD), f"a list of {reader.num_layers} flags, or a positive integer"
            )
        slides = [bool(each) for each in listed]
    else:
        period = reader.count(_PERIOD, default=period)
        slides = [layer % period != 0 for layer in range(1, reader.num_layers + 1)]
    has_window = reader.has(_WINDOW)
    kinds = ["sliding_attention" if has_window and each else "full_attention" for each in slides]
    return {**windowed(reader), "layer_types": kinds}


def gemma2(reader: Reader) -> dict[str, Any]:
    """Returns windows, soft caps and the scale of scores."""
    return {
        **_windows(reader, period=2),
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", default=30.0),
        "query_pre_attn_scalar": _scalar(reader, _LARGEST_GEMMA2),
    }


def gemma3(reader: Reader) -> dict[str, Any]:
    """Returns windows, the RoPE of layers with windows, the soft cap if there is one, and the scale of scores."""
    capped = reader.has("final_logit_softcapping")
    return {
        **_windows(reader, period=6),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", default=10000.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping") if capped else None,
        "query_pre_attn_scalar": _scalar(reader, _LARGEST_GEMMA3),
    }


def _scalar(reader: Reader, largest: int) -> int:
    return reader.mean_head_dim if reader.num_layers == largest else reader.head_dim


def granite(reader: Reader) -> dict[str, Any]:
    """Returns the scales. Raises Unsupported for a model without RoPE."""
    if not reader.flag("rope.scaling.finetuned", default=True):
        raise Unsupported(
            f"{reader.metadata.path}: {reader.key('rope.scaling.finetuned')} is false: GGUF files of Granite models"
            " without RoPE cannot be loaded",
            field="model",
        )
    return {
        "attention_multiplier": reader.number("attention.scale", default=reader.head_dim**-0.5),
        "embedding_multiplier": reader.number("embedding_scale", default=1.0),
        "residual_multiplier": reader.number("residual_scale", default=1.0),
        "logits_scaling": reader.number("logit_scale", default=1.0),
    }


def granite_moe(reader: Reader) -> dict[str, Any]:
    """Returns what `granite` and `experts` do. Raises Unsupported for a model with a shared expert."""
    if reader.has(_SHARED_SIZE):
        raise Unsupported(
            f"{reader.metadata.path}: {reader.key(_SHARED_SIZE)} is {reader.count(_SHARED_SIZE)}: GGUF files of Granite"
            " models with a shared expert cannot be loaded",
            field="model",
        )
    return {**granite(reader), **experts(reader)}


def olmo3(reader: Reader) -> dict[str, Any]:
    """Returns windows, and the base of the RoPE of layers that have them."""
    return {**_windows(reader, period=4), "rope_theta": reader.number("rope.freq_base", default=10000.0)}


def cohere(reader: Reader) -> dict[str, Any]:
    """Returns the scale of logits, and whether queries and keys are normed."""
    return {"logit_scale": reader.number("logit_scale"), "use_qk_norm": "blk.0.attn_q_norm.weight" in reader.tensors}


def cohere2(reader: Reader) -> dict[str, Any]:
    """Returns windows and the scale of logits."""
    return {**_windows(reader, period=4), "logit_scale": reader.number("logit_scale")}


def experts(reader: Reader) -> dict[str, Any]:
    """Returns how many experts there are, and how many a token has."""
    return {"num_local_experts": reader.count("expert_count"), "num_experts_per_tok": reader.count("expert_used_count")}


def phi_moe(reader: Reader) -> dict[str, Any]:
    """Returns the window and what `experts` does."""
    return {**windowed(reader), **experts(reader)}


def ernie_moe(reader: Reader) -> dict[str, Any]:
    """Returns experts, shared experts, and which layers have them: each `interval`-th one from the first of them."""
    return {
        "moe_num_experts": reader.count("expert_count"),
        "moe_k": reader.count("expert_used_count"),
        "moe_intermediate_size": _expert_size(reader),
        "moe_num_shared_experts": reader.count(_SHARED_COUNT) if reader.has(_SHARED_COUNT) else 0,
        "moe_layer_start_index": reader.count(_NUM_DENSE) if reader.has(_NUM_DENSE) else 0,
        "moe_layer_end_index": reader.num_layers - 1,
        "moe_layer_interval": reader.count("interleave_moe_layer_step", default=1),
    }


def olmoe(reader: Reader) -> dict[str, Any]:
    """Returns what `experts` does, by other names, and whether weights are normalized."""
    return _experts(reader, renormalized=False)


def qwen3_moe(reader: Reader) -> dict[str, Any]:
    """Returns what `olmoe` does, and the experts' size."""
    return {**_experts(reader, renormalized=True), "moe_intermediate_size": _expert_size(reader)}


def qwen2_moe(reader: Reader) -> dict[str, Any]:
    """Returns what `qwen3_moe` does, and the shared expert's size."""
    shared = reader.count(_SHARED_SIZE, default=reader.count("feed_forward_length"))
    return {
        **_experts(reader, renormalized=False),
        "moe_intermediate_size": _expert_size(reader),
        "shared_expert_intermediate_size": shared,
    }


def _experts(reader: Reader, renormalized: bool) -> dict[str, Any]:
    return {
        "num_experts": reader.count("expert_count"),
        "num_experts_per_tok": reader.count("expert_used_count"),
        "norm_topk_prob": reader.flag("expert_weights_norm", default=renormalized),
    }


def _expert_size(reader: Reader) -> int:
    """Returns the size, which older files do not state."""
    share = reader.count("feed_forward_length") // reader.count("expert_used_count")
    return reader.count("expert_feed_forward_length", default=share)
