"""The models that the CUDA kernels compute, by their shapes. Knows no device."""

from __future__ import annotations

from baton.kernels.limits import HEAD_DIMS, HEAD_DIMS_TEXT, LATENT_DIMS, WIDTH_STEP
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.supported.families import FAMILIES


def misfit(model: ModelConfig) -> str:
    """Returns why executor=cuda cannot compute the model; empty if it can."""
    if model.weight_format is not None and "cuda" not in model.weight_format.executors:
        return (
            f"the model's weights are in the format {model.weight_format.name}, which executor=cuda does not compute; "
            "use executor=cpu"
        )
    if model.weight_format is not None and model.experts is not None and model.experts.gate.squares:
        return f"executor=cuda has no packed experts without gates, as those of {model.architecture}; use executor=cpu"
    first = model.attention
    if model.state_layers and (isinstance(first, LatentSpec) or not _proven(model)):
        return f"executor=cuda has no layers with states like those of {model.architecture} yet; use executor=cpu"
    if isinstance(first, LatentSpec):
        return _latent_misfit(first) or _width_misfit(model, "v_head_dim")
    if model.head_dim not in HEAD_DIMS:
        return f"the model's head_dim is {model.head_dim}: the CUDA kernels take {HEAD_DIMS_TEXT}"
    if model.transformers is not None:  # whose own linears compute
        return ""
    return _width_misfit(model, "head_dim")


def _proven(model: ModelConfig) -> bool:
    family = FAMILIES.get(model.architecture)
    return family is None or "cuda" in family.executors


def _latent_misfit(attention: LatentSpec) -> str:
    if attention.head_dim not in LATENT_DIMS:
        return (
            f"the model's kv_lora_rank + qk_rope_head_dim is {attention.head_dim}: the CUDA kernels take multiples of "
            f"{LATENT_DIMS.step} from {LATENT_DIMS[0]} to {LATENT_DIMS[-1]}"
        )
    if attention.kv_rank % WIDTH_STEP or attention.q_rank % WIDTH_STEP:
        return (
            f"the model's kv_lora_rank is {attention.kv_rank} and its q_lora_rank {attention.q_rank}: the CUDA kernels "
            f"take multiples of {WIDTH_STEP}"
        )
    return ""


def _width_misfit(model: ModelConfig, value_key: str) -> str:
    widths = {
        ("hidden_size", model.hidden_size),
        (f"num_attention_heads * {value_key}", model.attended_size),
        *(("intermediate_size", width) for layer in model.layers for width in layer.mlp.widths),
    }
    for name, width in sorted(widths):
        if width % WIDTH_STEP:
            return f"the model's {name} is {width}: the CUDA kernels take multiples of {WIDTH_STEP}"
    return ""
