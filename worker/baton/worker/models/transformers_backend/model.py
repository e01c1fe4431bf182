"""A model of Transformers on a device: its own modules, with Baton's attention, linears and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import SegmentGraphs, Step
from baton.worker.models.hidden_states import HiddenStates
from baton.worker.models.transformers_backend.attention import PagedLayer, RunningStep
from baton.worker.models.transformers_backend.shortcuts import shorten
from baton.worker.models.transformers_backend.weights import TransformersWeights

S = TypeVar("S", bound=Step)


class TransformersModel(Generic[S]):
    """Implements baton.worker.models.model.Model. A step's tokens are one sequence with positions of their own: nothing
    but attention looks beyond a token."""

    def __init__(self, config: ModelConfig, weights: TransformersWeights, device: Device[S]) -> None:
        assert config.transformers is not None, "configs say what computes them"
        self._config = config
        self._spec = config.transformers
        self._device = device
        self._running: RunningStep[S] = RunningStep()
        self.weights = weights

    @property
    def weights(self) -> TransformersWeights:
        return self._weights

    @weights.setter
    def weights(self, weights: TransformersWeights) -> None:
        """Replaces the weights. Graphs that were recorded before still read the old ones."""
        weights.install()
        self._weights = weights
        self._module: Any = weights.module
        self._bind_attention()
        shorten(self._module, self._device, self._running)
        body = self._module.get_submodule(self._spec.body)
        vars(body).pop("forward", None)
        self._compute = body.forward
        self._head = _Head(self._module, body)

    def forward(
        self,
        step: S,
        graphs: SegmentGraphs[S] | None = None,
        on_written: Callable[[int], None] | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> Tensor:
        """Writes the step's keys and values. Returns the hidden states [num_tokens, hidden_size] for the head."""
        assert graphs is None, "only whole steps are recorded"
        assert hidden_states is None, "no proposer reads those of a model of Transformers"
        token_ids, positions = self._device.inputs(step)
        running = self._running
        running.step, running.on_written = step, on_written
        try:
            output = self._compute(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            running.step = running.on_written = None
        self._head.kind = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the logits [num_rows, vocab_size] of rows that `forward` returned."""
        logits = self._head.logits(hidden)
        return logits if out is None else out.copy_(logits)

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the rows themselves: the body ends with its norm."""
        return hidden

    def pooled(self, vectors: Tensor) -> Tensor:
        """Returns the vectors themselves: models with linears behind them have families of ours."""
        return vectors

    def _bind_attention(self) -> None:
        config, spec = self._config, self._spec
        sinks = [self._module.get_parameter(name) for name in spec.sinks] or [None] * config.num_layers
        for index, (name, layer) in enumerate(zip(spec.attentions, config.layers, strict=True)):
            ops = self._device.attention(index, layer.grouped, None, None, sinks[index])
            PagedLayer(index, ops, self._running, self._device.dtype).attach(self._module.get_submodule(name))


class _Head:
    """What a model computes behind its body: the head with its scales and caps."""

    def __init__(self, module: Any, body: Any) -> None:
        self.kind: Any = None  # what the body returns
        self._module = module
        self._hidden: Tensor | None = None
        body.__dict__["forward"] = self._given

    def logits(self, hidden: Tensor) -> Tensor:
        """Runs the model's own forward with a body that returns `hidden` [num_rows, hidden_size]."""
        self._hidden = hidden[None]
        try:
            logits: Tensor = self._module(inputs_embeds=self._hidden, use_cache=False).logits
        finally:
            self._hidden = None
        return logits[0]

    def _given(self, *_arguments: Any, **_more: Any) -> Any:
        return self.kind(last_hidden_state=self._hidden)
