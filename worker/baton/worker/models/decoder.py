"""The loop over layers on any device: embedding, layers, final norm and head.

A step runs as segments with attention between them: segment 0 is the embedding and the first layer's projection,
segment i ends layer i - 1 and begins layer i, and the last segment ends the last layer. Segments depend only on the
number of tokens, so that graphs can replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor
from torch.nn import functional

from baton.worker.core import HeadKind
from baton.worker.layers.attention import Attention, AttentionWeights
from baton.worker.layers.device import Device
from baton.worker.layers.experts import Experts, ExpertsWeights
from baton.worker.layers.join import Join
from baton.worker.layers.latent_attention import LatentAttention, LatentWeights
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.linear import Linear
from baton.worker.layers.mlp import Mlp, MlpWeights
from baton.worker.layers.norm import norm_of
from baton.worker.layers.recurrent import Recurrent, StateWeights
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.hidden_states import HiddenStates
from baton.worker.models.pooling.spec import Squash
from baton.worker.models.weights import ModelWeights
from baton.worker.quantization.neighbours import Stream


class Step(Protocol):
    """The inputs of a step, prepared by a device's executor."""

    @property
    def fuse_norms(self) -> bool:
        """Whether linears may apply the norms before them."""

    @property
    def token_types(self) -> Tensor | None:
        """The token's text of a pair, 0 or 1, [num_tokens] int64. None: all are 0."""


S = TypeVar("S", bound=Step)
S_contra = TypeVar("S_contra", bound=Step, contravariant=True)


class Buffers(NamedTuple):
    """The memory that recorded segments read and write."""

    residual: Tensor  # [num_tokens, hidden_size]
    qkv: Tensor  # [num_tokens, projected_size]
    attended: Tensor  # [num_tokens, attended_size]


@dataclass(slots=True)
class Flow:
    """The tensors that the segments and attentions of one step pass on, in memory of their own or in `buffers`."""

    stream: Stream | None = None
    query: Tensor | None = None
    attended: Tensor | None = None
    buffers: Buffers | None = None
    hidden: Tensor | None = None  # of an MTP layer: the hidden states that it reads

    @classmethod
    def over(cls, buffers: Buffers) -> Flow:
        """Returns the flow of recorded segments; it holds at each of them."""
        return cls(Stream(buffers.residual), buffers.qkv, buffers.attended, buffers)


class SegmentGraphs(Protocol[S_contra]):
    """The recorded segments."""

    def begin(self, step: S_contra) -> Flow:
        """Copies the inputs of a step. Returns the flow of its tokens."""

    def replay(self, index: int) -> None:
        """Queues segment `index` of the step."""


_Mixer = Attention[S] | LatentAttention[S] | Recurrent[S]


class _Layer(NamedTuple, Generic[S]):
    attention: _Mixer[S]
    mlp: Mlp | Experts | None
    parallel: bool

    def finish(self, stream: Stream, flow: Flow) -> None:
        """Runs the ops behind attention."""
        assert flow.attended is not None
        if self.parallel and self.mlp is not None:
            self.mlp.add(stream)  # before attention's update: both read the same residual
        self.attention.finish(stream, flow.attended)
        if flow.buffers is None:
            flow.query = flow.attended = None  # frees them for the MLP
        if not self.parallel and self.mlp is not None:
            self.mlp.add(stream)


class Decoder(Generic[S]):
    """A model's weights on a device, and the order of its ops."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, device: Device[S]) -> None:
        self._config = config
        self._device = device
        self.weights = weights

    @property
    def weights(self) -> ModelWeights:
        return self._weights

    @weights.setter
    def weights(self, weights: ModelWeights) -> None:
        """Replaces the weights. Graphs that were recorded before still read the old ones."""
        config, device = self._config, self._device
        self._weights = weights
        self._layers = [
            _Layer(
                _attention(index, spec, layer.attention, config.norm, device),
                _mlp(spec, layer.mlp, config.norm, device),
                spec.parallel,
            )
            for index, (spec, layer) in enumerate(zip(config.layers, weights.layers, strict=True))
        ]
        self._embed_norm = norm_of(weights.embed_norm, config.norm)
        self._norm = norm_of(weights.norm, config.norm)
        self._join = None if weights.join is None else Join(weights.join, config.norm, device)
        generates = HeadKind.GENERATE in config.heads
        self._lm_head = Linear(weights.lm_head, device) if generates else None
        dense = () if config.pooler is None else config.pooler.dense
        self._dense = [
            (spec.squash, Linear(each.linear, device), norm_of(each.norm, config.norm))
            for spec, each in zip(dense, weights.dense, strict=True)
        ]

    @property
    def num_segments(self) -> int:
        """Number of layers, plus one."""
        return len(self._layers) + 1

    def forward(
        self,
        step: S,
        graphs: SegmentGraphs[S] | None = None,
        on_written: Callable[[int], None] | None = None,
        hidden_states: HiddenStates | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Writes the step's keys, values and states. Returns the residual stream [num_tokens, hidden_size] before the
        final norm. Calls `on_written` with each layer once these are written or the write is queued. Fills
        `hidden_states`, in steps without graphs; there, an MTP layer reads `hidden` [num_tokens, hidden_size]."""
        flow = Flow(hidden=hidden) if graphs is None else graphs.begin(step)
        run = partial(self.segment, step=step, flow=flow) if graphs is None else graphs.replay
        for index, layer in enumerate(self._layers):
            run(index)
            if on_written is not None and not layer.attention.attend_writes:
                on_written(index)
            if hidden_states is not None and index in hidden_states.layers:
                assert flow.stream is not None
                hidden_states.take(index, flow.stream.settled())
            out = None if flow.buffers is None else flow.buffers.attended
            assert flow.query is not None
            flow.attended = layer.attention.attend(flow.query, step, out)
            if on_written is not None and layer.attention.attend_writes:
                on_written(index)
        run(len(self._layers))
        assert flow.stream is not None
        if hidden_states is not None and len(self._layers) in hidden_states.layers:
            hidden_states.take(len(self._layers), flow.stream.residual)
        return flow.stream.residual

    def segment(self, index: int, step: S, flow: Flow) -> None:
        """Runs the ops between the attentions of layers index - 1 and index."""
        if index == 0:
            stream = flow.stream = self._begun(step, flow)
        else:
            assert flow.stream is not None
            stream = flow.stream
            self._layers[index - 1].finish(stream, flow)
        if index < len(self._layers):
            out = None if flow.buffers is None else flow.buffers.qkv
            flow.query = self._layers[index].attention.project(stream, step, out)
        else:
            stream.settled()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the logits [num_rows, vocab_size] of rows that `forward` returned."""
        assert self._lm_head is not None, "models without this head pool"
        logits = self._lm_head.project(Stream(hidden, fuse_norms=True), self._norm, out)
        divisor, cap = self._config.logits_divisor, self._config.logits_soft_cap
        if divisor != 1:
            logits.div_(divisor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the final norm of rows that `forward` returned."""
        return hidden if self._norm is None else self._norm.apply(hidden, self._device.kernels)

    def pooled(self, vectors: Tensor) -> Tensor:
        """Returns the pooler's linears of vectors [num_vectors, hidden_size]."""
        for squash, linear, norm in self._dense:
            vectors = squashed(linear.multiply(vectors), squash)
            if norm is not None:
                vectors = norm.apply(vectors, self._device.kernels)
        return vectors

    def _begun(self, step: S, flow: Flow) -> Stream:
        stream = self._embedded(step, flow.buffers)
        if self._join is None:
            return stream
        assert flow.hidden is not None, "an MTP layer reads hidden states"
        return Stream(self._join.joined(stream.residual, flow.hidden), fuse_norms=step.fuse_norms)

    def _embedded(self, step: S, buffers: Buffers | None) -> Stream:
        embedded = self._device.embed(self._weights.embed, step)
        if self._config.embedding_scale != 1:
            embedded.mul_(self._config.embedding_scale)
        if self._weights.positions is not None:
            used = self._weights.positions[self._config.position_offset :]
            embedded.add_(self._device.embed_positions(used, step))
        if self._weights.token_types is not None:
            types, table = step.token_types, self._weights.token_types
            embedded.add_(table[0] if types is None else table.index_select(0, types))
        if self._embed_norm is not None:
            embedded = self._embed_norm.apply(embedded, self._device.kernels)
        if buffers is None:
            return Stream(embedded, fuse_norms=step.fuse_norms)
        return Stream(buffers.residual.copy_(embedded))


def squashed(x: Tensor, squash: Squash) -> Tensor:
    """Returns the activation behind a pooler's linear."""
    match squash:
        case "tanh":
            return x.tanh_()
        case "relu":
            return x.relu_()
        case "gelu":
            return functional.gelu(x)
        case _:
            return x


def _attention(
    index: int,
    spec: LayerSpec,
    weights: AttentionWeights | LatentWeights | StateWeights,
    norm: NormSpec,
    device: Device[S],
) -> _Mixer[S]:
    scale, norms_sum = spec.residual_scale, spec.sum_norms
    if isinstance(weights, StateWeights):
        assert isinstance(spec.attention, StateSpec), "weights are built by the layer's spec"
        return Recurrent(index, spec.attention, weights, norm, scale, device, norms_sum=norms_sum)
    if isinstance(weights, LatentWeights):
        assert isinstance(spec.attention, LatentSpec), "weights are built by the layer's spec"
        return LatentAttention(index, spec.attention, weights, norm, scale, device, norms_sum=norms_sum)
    return Attention(index, spec.grouped, weights, norm, scale, device, norms_sum=norms_sum)


def _mlp(
    spec: LayerSpec, weights: MlpWeights | ExpertsWeights | None, norm: NormSpec, device: Device[S]
) -> Mlp | Experts | None:
    if weights is None:
        return None
    if isinstance(weights, MlpWeights):
        assert isinstance(spec.mlp, MlpSpec), "weights are built by the layer's spec"
        return Mlp(spec.mlp, weights, norm, spec.residual_scale, device, norms_sum=spec.sum_norms)
    assert isinstance(spec.mlp, ExpertsSpec), "weights are built by the layer's spec"
    return Experts(spec.mlp, weights, norm, spec.residual_scale, device)
