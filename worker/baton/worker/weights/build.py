"""Builds a model's weights from a checkpoint or from random numbers, fused for few launches. Knows no file formats."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.worker.layers.attention import AttentionWeights
from baton.worker.layers.experts import ExpertsWeights, SharedExpertWeights, StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.mlp import MlpWeights
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.names import TensorNames
from baton.worker.models.weights import LayerWeights, ModelWeights
from baton.worker.quantization.base import LinearShape, Part, QuantMethod, Source
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.kv_scales import is_kv_scale

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_METHOD: QuantMethod = UNQUANTIZED
_EXPERTS_METHOD: ExpertsMethod = UNQUANTIZED_EXPERTS


def load_weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU
) -> ModelWeights:
    """Copies a checkpoint's tensors to the device, converted. Raises InvalidRequest if one is missing or misshapen."""
    used: set[str] = set()

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        used.add(name)
        return checkpoint.tensor(name, shape)

    weights = build_weights(config, source, dtype, device)
    unused = [name for name in checkpoint.names if name not in used and not _is_redundant(name, config)]
    if unused:
        _log.warning("%d tensors of %s are not used: %s", len(unused), checkpoint.folder, ", ".join(unused[:4]))
    return weights


def dummy_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU) -> ModelWeights:
    """Returns random weights, which are equal for a seed on all devices of a type. The model outputs nonsense."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(shape, dtype=dtype, device=device).normal_(
            0.0, config.initializer_range, generator=generator
        )

    return build_weights(config, source, dtype, device)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the size of the weights on a device, in their formats. Allocates nothing."""
    return _assemble(config, _Allocator(dtype, torch.device("meta"))).num_bytes


def build_weights(config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device = _CPU) -> ModelWeights:
    """Returns weights of the tensors that `source` returns."""
    return _assemble(config, _Loader(dtype, device, source))


@dataclass(frozen=True, slots=True)
class _Allocator:
    """Allocates weights without values."""

    dtype: torch.dtype
    device: torch.device

    def linear(self, shape: LinearShape) -> LinearWeights:
        return LinearWeights(_METHOD, _METHOD.create(shape, self.dtype, self.device))

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        return StackedWeights(_EXPERTS_METHOD, _EXPERTS_METHOD.create(shape, self.dtype, self.device))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Loader(_Allocator):
    """Allocates weights and fills them from `source`."""

    source: Source

    def linear(self, shape: LinearShape) -> LinearWeights:
        weights = _Allocator.linear(self, shape)
        weights.method.load(weights.params, shape, self.source)
        return weights

    def experts(self, shape: ExpertsShape) -> StackedWeights:
        weights = _Allocator.experts(self, shape)
        weights.method.load(weights.params, shape, self.source)
        return weights

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return _Allocator.tensor(self, name, shape, dtype).copy_(self.source(name, shape))


def _assemble(config: ModelConfig, maker: _Allocator) -> ModelWeights:
    names, hidden, vocab = config.names, config.hidden_size, config.vocab_size
    embed = maker.tensor(f"{names.embed}.weight", (vocab, hidden))
    lm_head = _lm_head(config, maker, embed)
    layers = tuple(_layer(config, maker, index, spec) for index, spec in enumerate(config.layers))
    return ModelWeights(embed, layers, maker.tensor(f"{names.norm}.weight", (hidden,)), lm_head)


def _lm_head(config: ModelConfig, maker: _Allocator, embed: Tensor) -> LinearWeights:
    name, vocab = config.names.lm_head, config.vocab_size
    if not config.tie_embeddings:
        return maker.linear(LinearShape([Part(name, vocab)], config.hidden_size, config.lm_head_bias))
    bias = maker.tensor(f"{name}.bias", (vocab,)) if config.lm_head_bias else None
    return LinearWeights(UNQUANTIZED, UNQUANTIZED.over(embed, bias))


@dataclass(frozen=True, slots=True)
class _LayerMaker:
    """Makes the linears and norms of one layer."""

    maker: _Allocator
    names: TensorNames
    prefix: str
    hidden: int

    def linear(
        self, suffixes: tuple[str, ...], sizes: tuple[int, ...], in_features: int, bias: bool = False
    ) -> LinearWeights:
        sizes = sizes if len(suffixes) > 1 else (sum(sizes),)
        parts = [Part(self.prefix + suffix, size) for suffix, size in zip(suffixes, sizes, strict=True)]
        return self.maker.linear(LinearShape(parts, in_features, bias))

    def norm(self, suffix: str, size: int, wanted: bool) -> Tensor | None:
        return self.maker.tensor(f"{self.prefix}{suffix}.weight", (size,)) if wanted else None


def _layer(config: ModelConfig, maker: _Allocator, index: int, spec: LayerSpec) -> LayerWeights:
    names = config.names
    layer = _LayerMaker(maker, names, names.layer.format(index), config.hidden_size)
    mlp = _experts(layer, spec, spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else _mlp(layer, spec, spec.mlp)
    return LayerWeights(_attention(layer, spec), mlp)


def _attention(layer: _LayerMaker, spec: LayerSpec) -> AttentionWeights:
    names, hidden, attention = layer.names, layer.hidden, spec.attention
    qk_sizes = {"none": (0, 0), "head": (attention.head_dim,) * 2, "projection": (attention.q_size, attention.kv_size)}
    q_norm_size, k_norm_size = qk_sizes[attention.qk_norm]
    return AttentionWeights(
        input_norm=layer.norm(names.attention_input_norm, hidden, spec.input_norms),
        qkv=layer.linear(names.qkv, (attention.q_size, *(attention.kv_size,) * 2), hidden, attention.qkv_bias),
        q_norm=layer.norm(names.q_norm, q_norm_size, q_norm_size > 0),
        k_norm=layer.norm(names.k_norm, k_norm_size, k_norm_size > 0),
        o=layer.linear((names.o,), (hidden,), attention.q_size, attention.o_bias),
        output_norm=layer.norm(names.attention_output_norm, hidden, spec.output_norms),
    )


def _mlp(layer: _LayerMaker, spec: LayerSpec, mlp: MlpSpec) -> MlpWeights:
    names, hidden, ffn = layer.names, layer.hidden, mlp.intermediate_size
    return MlpWeights(
        input_norm=layer.norm(names.mlp_input_norm, hidden, spec.input_norms),
        gate_up=layer.linear(names.gate_up, (ffn, ffn), hidden, mlp.bias),
        down=layer.linear((names.down,), (hidden,), ffn, mlp.bias),
        output_norm=layer.norm(names.mlp_output_norm, hidden, spec.output_norms),
    )


def _experts(layer: _LayerMaker, spec: LayerSpec, experts: ExpertsSpec) -> ExpertsWeights:
    names, hidden, router = layer.names, layer.hidden, experts.router
    shape = ExpertsShape(
        names.experts, layer.prefix, router.num_experts, hidden, experts.intermediate_size, experts.bias
    )
    return ExpertsWeights(
        input_norm=layer.norm(names.mlp_input_norm, hidden, spec.input_norms),
        router=layer.linear((names.router,), (router.num_experts,), hidden, experts.router_bias),
        correction=_correction(layer, router.num_experts) if router.corrected else None,
        experts=layer.maker.experts(shape),
        shared=None if experts.shared is None else _shared_expert(layer, experts.shared, experts.shared_gate),
        output_norm=layer.norm(names.mlp_output_norm, hidden, spec.output_norms),
    )


def _correction(layer: _LayerMaker, num_experts: int) -> Tensor:
    """Makes it of full precision: experts differ by little of it."""
    shape = (1, num_experts) if layer.names.correction_is_row else (num_experts,)
    return layer.maker.tensor(layer.prefix + layer.names.router_correction, shape, torch.float32).flatten()


def _shared_expert(layer: _LayerMaker, mlp: MlpSpec, gated: bool) -> SharedExpertWeights:
    names, hidden, ffn = layer.names, layer.hidden, mlp.intermediate_size
    return SharedExpertWeights(
        gate_up=layer.linear(names.shared_gate_up, (ffn, ffn), hidden, mlp.bias),
        down=layer.linear((names.shared_down,), (hidden,), ffn, mlp.bias),
        output_gate=layer.linear((names.shared_output_gate,), (1,), hidden) if gated else None,
    )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq") or is_kv_scale(name):
        return True
    return config.tie_embeddings and name == f"{config.names.lm_head}.weight"
