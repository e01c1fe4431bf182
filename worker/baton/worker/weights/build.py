"""Builds a model's weights from a source of tensors or from random numbers, fused for few launches. Knows no files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.attention import AttentionWeights
from baton.worker.layers.experts import ExpertsWeights, SharedExpertWeights
from baton.worker.layers.join import JoinWeights
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.mlp import MlpWeights
from baton.worker.layers.spec import NO_MLP, AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import PackedTable, Table
from baton.worker.models.config import ModelConfig
from baton.worker.models.names import JoinNames, Layout
from baton.worker.models.weights import DenseWeights, LayerWeights, ModelWeights
from baton.worker.quantization.base import LinearShape, Part, Source
from baton.worker.quantization.experts import ExpertsShape
from baton.worker.quantization.quantized.tensors import fill_dummy
from baton.worker.quantization.registry import UNQUANTIZED
from baton.worker.quantization.weight_format import WeightFormat
from baton.worker.weights.files.safetensors_file import DTYPES
from baton.worker.weights.kv_scales import is_kv_scale
from baton.worker.weights.latent import make_latent_attention
from baton.worker.weights.layer_maker import LayerMaker, make_norm
from baton.worker.weights.layouts import by_columns
from baton.worker.weights.makers import Allocator, Loader, Recorder
from baton.worker.weights.states import make_states

# Constants that models once kept beside their weights: frequencies and masks.
_CONSTANTS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
    "embeddings.position_ids",
)
_CPU = torch.device("cpu")


def dummy_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU) -> ModelWeights:
    """Returns random weights, which are equal for a seed on all devices of a type. The model outputs nonsense.

    Where there are experts, embeddings are large, so that tokens stay different and routers spread them evenly.
    """
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in config.layers)
    spread = {f"{config.names.embed}.weight": 8.0} if has_experts else {}

    def source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        if name.endswith("norm.weight") or (len(shape) == 1 and name.endswith(".weight")):
            is_gated = name.endswith(f"{config.names.states.norm}.weight")
            into.fill_(1 if is_gated else 1 - config.norm.offset)
            return
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        if into.dtype is torch.uint8 and "scale" in name:  # exponents of 2, plus 127
            into.fill_(127 + round(math.log2(config.initializer_range)))
            return
        if into.dtype not in DTYPES.values():
            fill_dummy(into, generator)
            return
        if config.weight_format is not None and "scale" in name:
            into.fill_(config.initializer_range)
            return
        width = spread.get(name, config.initializer_range)
        values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, width, generator=generator)
        into.copy_(values.view(into.shape))

    return build_weights(config, source, dtype, device)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the size of the weights on a device, in their formats. Allocates nothing."""
    return _assemble(config, Allocator(dtype, torch.device("meta"), _format_of(config))).num_bytes


def linear_shapes(config: ModelConfig, dtype: torch.dtype) -> list[LinearShape | ExpertsShape]:
    """Returns the shapes of all linears and experts of a model, in the order of its layers. Allocates nothing."""
    recorder = Recorder(dtype, torch.device("meta"), _format_of(config))
    _assemble(config, recorder)
    return recorder.shapes


def build_weights(
    config: ModelConfig,
    source: Source,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    read: Callable[[], None] = lambda: None,
) -> ModelWeights:
    """Returns weights that `source` fills. `read`: makes the source fill those requested since the last call."""
    maker = Loader(dtype, device, _format_of(config), source, read)
    weights = _assemble(config, maker)
    maker.complete()
    return weights


def _format_of(config: ModelConfig) -> WeightFormat | None:
    return None if config.weight_format is None else config.weight_format.made()


def _assemble(config: ModelConfig, maker: Allocator) -> ModelWeights:
    names, hidden, vocab = config.names, config.hidden_size, config.vocab_size
    embed = maker.table(LinearShape([Part(names.embed, vocab)], hidden, kind="table"))
    lm_head = _lm_head(config, maker, embed)
    relative = _relative(config, maker)
    layers = tuple(_layer(config, maker, index, spec, relative) for index, spec in enumerate(config.layers))
    positions = None
    if config.learned_positions:
        positions = maker.tensor(f"{names.positions}.weight", (config.max_position_embeddings, hidden))
    types = None
    if config.num_token_types:
        types = maker.tensor(f"{names.token_types}.weight", (config.num_token_types, hidden))
    embed_norm = make_norm(maker, names.embed_norm, (hidden,), config.norm) if config.embedding_norm else None
    norm = make_norm(maker, names.norm, (hidden,), config.norm) if config.final_norm else None
    join = None if names.join is None else _join(config, maker, names.join)
    return ModelWeights(embed, layers, norm, lm_head, positions, _dense(config, maker), types, embed_norm, join)


def _join(config: ModelConfig, maker: Allocator, names: JoinNames) -> JoinWeights:
    hidden = config.hidden_size
    return JoinWeights(
        make_norm(maker, names.embed_norm, (hidden,), config.norm),
        make_norm(maker, names.hidden_norm, (hidden,), config.norm),
        maker.linear(LinearShape([Part(names.proj, hidden)], 2 * hidden, kind="head")),
    )


def _relative(config: ModelConfig, maker: Allocator) -> Tensor | None:
    """Makes the scores of distances."""
    attention = config.layers[0].attention
    if not isinstance(attention, AttentionSpec) or not attention.relative_buckets:
        return None
    return maker.tensor(f"{config.names.relative}.weight", (attention.relative_buckets, attention.num_q_heads))


def _dense(config: ModelConfig, maker: Allocator) -> tuple[DenseWeights, ...]:
    specs = () if config.pooler is None else config.pooler.dense
    return tuple(
        DenseWeights(
            maker.linear(LinearShape([Part(spec.name, spec.out_features)], spec.in_features, spec.bias, "head")),
            make_norm(maker, spec.norm, (spec.out_features,), config.norm) if spec.norm else None,
        )
        for spec in specs
    )


def _lm_head(config: ModelConfig, maker: Allocator, embed: Table) -> LinearWeights:
    name, vocab = config.names.lm_head, config.vocab_size
    if not config.tie_embeddings:
        return maker.linear(LinearShape([Part(name, vocab)], config.hidden_size, config.lm_head_bias, "head"))
    bias = maker.tensor(f"{name}.bias", (vocab,)) if config.lm_head_bias else None
    if isinstance(embed, PackedTable):
        return LinearWeights(embed.method, embed.params if bias is None else {**embed.params, "bias": bias}, name)
    return LinearWeights(UNQUANTIZED, UNQUANTIZED.over(embed, bias), name)


def _layer(config: ModelConfig, maker: Allocator, index: int, spec: LayerSpec, relative: Tensor | None) -> LayerWeights:
    names = config.names
    if names.layout is Layout.COLUMNS:
        maker = maker.reading(by_columns)
    prefix, mlp_prefix = names.prefixes(index)
    layer = LayerMaker(maker, names, prefix, config.hidden_size, config.norm)
    mlp = _any_mlp(replace(layer, prefix=mlp_prefix), spec)
    if isinstance(spec.attention, LatentSpec):
        return LayerWeights(make_latent_attention(layer, spec, spec.attention), mlp)
    if isinstance(spec.attention, StateSpec):
        return LayerWeights(make_states(layer, spec, spec.attention), mlp)
    return LayerWeights(replace(_attention(layer, spec), relative=relative), mlp)


def _attention(layer: LayerMaker, spec: LayerSpec) -> AttentionWeights:
    names, hidden, attention = layer.names, layer.hidden, spec.grouped
    normed = attention.qk_norm != "none"
    return AttentionWeights(
        input_norm=layer.norm(names.attention_input_norm, spec.input_norms and spec.attention_input_norm),
        qkv=layer.qkv(attention),
        q_norm=layer.norm(names.q_norm, normed, _qk_norm_shape(attention, attention.num_q_heads)),
        k_norm=layer.norm(names.k_norm, normed, _qk_norm_shape(attention, attention.num_kv_heads)),
        o=layer.linear((names.o,), (hidden,), attention.q_size, attention.o_bias),
        output_norm=layer.norm(names.attention_output_norm, spec.output_norms or spec.sum_norms),
        sinks=layer.maker.tensor(layer.prefix + names.sinks, (attention.num_q_heads,)) if attention.sinks else None,
    )


def _qk_norm_shape(attention: AttentionSpec, num_heads: int) -> tuple[int, ...]:
    head_dim = attention.head_dim
    shapes = {"head": (head_dim,), "each_head": (num_heads, head_dim), "projection": (num_heads * head_dim,)}
    return shapes.get(attention.qk_norm, ())


def _any_mlp(layer: LayerMaker, spec: LayerSpec) -> MlpWeights | ExpertsWeights | None:
    if spec.mlp == NO_MLP:
        return None
    return _experts(layer, spec, spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else _mlp(layer, spec, spec.mlp)


def _mlp(layer: LayerMaker, spec: LayerSpec, mlp: MlpSpec) -> MlpWeights:
    names, hidden, ffn = layer.names, layer.hidden, mlp.intermediate_size
    gate_up = layer.linear(names.gate_up, (ffn, ffn) if mlp.gated else (ffn,), hidden, mlp.bias)
    if names.up_first:
        layer.maker.finish(partial(_put_gates_first, gate_up))
    return MlpWeights(
        input_norm=layer.norm(names.mlp_input_norm, spec.input_norms),
        gate_up=gate_up,
        down=layer.linear((names.down,), (hidden,), ffn, mlp.bias or mlp.down_bias),
        output_norm=layer.norm(names.mlp_output_norm, spec.output_norms or spec.sum_norms),
    )


def _put_gates_first(gate_up: LinearWeights) -> None:
    """Swaps the halves of a linear's rows."""
    if gate_up.method is not UNQUANTIZED:
        raise InvalidRequest(
            f"the gates behind the up projection cannot be moved in the format {gate_up.method.name}; the weights must "
            "be unquantized",
            field="model",
        )
    for tensor in gate_up.params.values():
        tensor.copy_(tensor.roll(len(tensor) // 2, 0))


def _experts(layer: LayerMaker, spec: LayerSpec, experts: ExpertsSpec) -> ExpertsWeights:
    names, hidden, router = layer.names, layer.hidden, experts.router
    shape = ExpertsShape(
        names.experts,
        layer.prefix,
        router.num_experts,
        hidden,
        experts.intermediate_size,
        experts.bias,
        experts.gate,
    )
    router_layer = layer.in_fp32() if experts.router_in_fp32 else layer
    return ExpertsWeights(
        input_norm=layer.norm(names.mlp_input_norm, spec.input_norms),
        router=router_layer.linear((names.router,), (router.num_experts,), hidden, experts.router_bias, "router"),
        correction=_correction(layer, router.num_experts) if router.corrected else None,
        experts=layer.maker.experts(shape),
        shared=None if experts.shared is None else _shared_expert(layer, experts.shared, experts.shared_gate),
        output_norm=layer.norm(names.mlp_output_norm, spec.output_norms),
    )


def _correction(layer: LayerMaker, num_experts: int) -> Tensor:
    """Makes it of full precision: experts differ by little of it."""
    shape = (1, num_experts) if layer.names.correction_is_row else (num_experts,)
    correction = layer.maker.empty(shape, torch.float32)
    return layer.maker.fill(layer.prefix + layer.names.router_correction, shape, correction).flatten()


def _shared_expert(layer: LayerMaker, mlp: MlpSpec, gated: bool) -> SharedExpertWeights:
    names, hidden, ffn = layer.names, layer.hidden, mlp.intermediate_size
    return SharedExpertWeights(
        gate_up=layer.linear(names.shared_gate_up, (ffn, ffn) if mlp.gated else (ffn,), hidden, mlp.bias),
        down=layer.linear((names.shared_down,), (hidden,), ffn, mlp.bias),
        output_gate=layer.linear((names.shared_output_gate,), (1,), hidden, kind="router") if gated else None,
    )


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Returns whether checkpoints may hold a tensor of this name that the model does not need."""
    if name.endswith(_CONSTANTS) or is_kv_scale(name):
        return True
    weight_format = _format_of(config)
    if weight_format is not None and name.endswith(weight_format.unused):
        return True
    return config.tie_embeddings and name in config.names.spellings(f"{config.names.lm_head}.weight")
