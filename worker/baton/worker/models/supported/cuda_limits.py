"""The models that the CUDA kernels compute, by their shapes. Knows no device."""

from __future__ import annotations

from baton.kernels.limits import HEAD_DIMS, HEAD_DIMS_TEXT, WIDTH_STEP
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.models.config import ModelConfig


def misfit(model: ModelConfig) -> str:
    """Returns why executor=cuda cannot compute the model; empty if it can."""
    if model.weight_format is not None and "cuda" not in model.weight_format.executors:
        return (
            f"the model's weights are in the format {model.weight_format.name}, which executor=cuda does not compute; "
            "use executor=cpu"
        )
    if any(isinstance(layer.attention, LatentSpec) for layer in model.layers):
        return f"executor=cuda has no kernels for the latent attention of {model.architecture}; use executor=cpu"
    if model.state_layers:
        return f"executor=cuda has no layers with states yet, which {model.architecture} has; use executor=cpu"
    if model.head_dim not in HEAD_DIMS:
        return f"the model's head_dim is {model.head_dim}: the CUDA kernels take {HEAD_DIMS_TEXT}"
    if model.transformers is not None:  # whose own linears compute
        return ""
    widths = {
        ("hidden_size", model.hidden_size),
        ("num_attention_heads * head_dim", model.num_q_heads * model.head_dim),
        *(("intermediate_size", width) for layer in model.layers for width in layer.mlp.widths),
    }
    for name, width in sorted(widths):
        if width % WIDTH_STEP:
            return f"the model's {name} is {width}: the CUDA kernels take multiples of {WIDTH_STEP}"
    return ""
