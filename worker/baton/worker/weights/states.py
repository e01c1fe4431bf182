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
        proj=layer.linear(own.proj, state.projected_sizes, hidden, state.bias),
        tensors=_tensors(layer, state),
        o=layer.linear((own.o,), (hidden,), state.attended_size, state.bias),
        output_norm=layer.norm(names.attention_output_norm, spec.output_norms or spec.sum_norms),
    )


def _tensors(layer: LayerMaker, state: StateSpec) -> StateTensors:
    own, maker, prefix = layer.names.states, layer.maker, layer.prefix
    channels, rates = state.num_channels, state.num_rates
    conv = maker.empty((channels, state.kernel_size))
    maker.fill(f"{prefix}{own.conv}.weight", (channels, 1, state.kernel_size), conv.unsqueeze(1))

    def of_heads(name: str) -> Tensor | None:
        return maker.fill(prefix + name, (rates,), maker.empty((rates,), torch.float32)) if rates else None

    return StateTensors(
        conv=conv,
        conv_bias=maker.tensor(f"{prefix}{own.conv}.bias", (channels,)) if state.conv_bias else None,
        log_rate=of_heads(own.log_rate),
        bias=of_heads(own.bias),
        skip=of_heads(own.skip) if isinstance(state, StateSpaceSpec) else None,
        norm=maker.tensor(f"{prefix}{own.norm}.weight", (state.norm_size,)) if state.norm_size else None,
    )
