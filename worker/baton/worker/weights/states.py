"""Makes the weights of layers with states."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.worker.layers.device import StateTensors
from baton.worker.layers.recurrent import StateWeights
from baton.worker.layers.spec import LayerSpec
from baton.worker.layers.state_spec import StateSpaceSpec, StateSpec
from baton.worker.weights.layer_maker import LayerMaker


def make_states(layer: LayerMaker, spec: LayerSpec, state: StateSpec) -> StateWeights:
    """Makes one layer's weights."""
    names, own, hidden = layer.names, layer.names.states, layer.hidden
    return StateWeights(
        input_norm=layer.norm(names.attention_input_norm, spec.input_norms and spec.attention_input_norm),
        proj=layer.linear(own.proj, state.first_sizes, hidden, state.bias),
        tensors=_tensors(layer, state),
        o=layer.linear((own.o,), (hidden,), state.attended_size, state.bias),
        output_norm=layer.norm(names.attention_output_norm, spec.output_norms or spec.sum_norms),
        ups=tuple(
            layer.linear((name,), (size,), rank)
            for name, size, rank in zip(own.ups, state.up_sizes, state.up_ranks, strict=True)
        ),
    )


def _tensors(layer: LayerMaker, state: StateSpec) -> StateTensors:
    own, maker, prefix = layer.names.states, layer.maker, layer.prefix
    rates = state.num_rates
    conv = maker.empty((state.num_channels, state.kernel_size))
    for name, part in zip(own.conv, torch.split(conv, list(state.conv_sizes)), strict=True):
        maker.fill(f"{prefix}{name}.weight", (len(part), 1, state.kernel_size), part.unsqueeze(1))

    def in_fp32(name: str, shape: tuple[int, ...]) -> Tensor:
        return maker.fill(prefix + name, shape, maker.empty(shape, torch.float32)).flatten()

    return StateTensors(
        conv=conv,
        conv_bias=maker.tensor(f"{prefix}{own.conv[0]}.bias", (len(conv),)) if state.conv_bias else None,
        log_rate=in_fp32(own.log_rate, state.rate_shape) if rates else None,
        bias=in_fp32(own.bias, (state.num_biases,)) if rates else None,
        skip=in_fp32(own.skip, (rates,)) if isinstance(state, StateSpaceSpec) else None,
        norm=maker.tensor(f"{prefix}{own.norm}.weight", (state.norm_size,)) if state.norm_size else None,
    )
