"""Reads an EAGLE-3 head: the config and tensors of LlamaForCausalLMEagle3 checkpoints, checked against the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.table import Table, columns_of
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading_rope import read_rope
from baton.worker.models.reading_sizes import read_head_dim
from baton.worker.models.supported.families import read_folder
from baton.worker.weights.files.formats import open_tensors
from baton.worker.weights.tensors import Tensors

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_LAYERS = 3  # of the model, whose hidden states the head reads
_FIELD = "speculative_config"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_UNUSED = ("t2d",)  # which of the model's tokens the head has; d2t says it too


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of a head: one decoder layer over the next token's embedding and the model's hidden states."""

    hidden_size: int
    inner_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    draft_vocab_size: int
    layers: tuple[int, ...]  # of the model, ascending: their inputs are read
    residual_is_normed: bool  # the layer's residual stream begins with the normed hidden state

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor."""
        hidden, inner = self.hidden_size, self.inner_size
        query, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "fc.weight": (hidden, NUM_LAYERS * model.hidden_size),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, query),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """A head's config and tensors."""

    config: Eagle3Config
    weights: dict[str, Tensor]  # by name, in the model's dtype
    embed: Table  # [vocab_size, hidden_size], its own or the model's
    token_ids: Tensor  # [draft_vocab_size] int64: the model's token of each of the head's


def load_eagle3(folder: Path, model: ModelConfig, embed: Table, dtype: torch.dtype) -> Eagle3Head:
    """Reads a head for a model with these embeddings. Raises InvalidRequest with the first thing that does not fit."""
    try:
        config = read_eagle3_config(read_folder(folder), model)
        with open_tensors(folder) as tensors:
            return _load(tensors, config, model, embed, dtype)
    except InvalidRequest as error:
        if error.field == _FIELD:
            raise
        raise InvalidRequest(f"{_FIELD}: {error.message}", field=_FIELD) from error


def read_eagle3_config(fields: Fields, model: ModelConfig) -> Eagle3Config:
    """Reads the shape of a head for a model."""
    named = fields.raw.get("architectures") or [""]
    if not isinstance(named, list) or named[0] not in ARCHITECTURES:
        raise Unsupported(
            f"{_FIELD}: {fields.source} has the architecture {named[0]!r}; method 'eagle3' needs {ARCHITECTURES[0]}",
            field=_FIELD,
        )
    if (count := fields.positive_int("num_hidden_layers", default=1)) != 1:
        raise Unsupported(f"{_FIELD}: {fields.source} has {count} layers; heads of one are supported", field=_FIELD)
    vocab_size = fields.positive_int("vocab_size")
    if vocab_size != model.vocab_size:
        raise _misfit(fields.source, f"vocab_size is {vocab_size}, and {model.vocab_size} of the model")
    hidden_size = fields.positive_int("hidden_size")
    return Eagle3Config(
        hidden_size,
        fields.positive_int("intermediate_size"),
        fields.positive_int("num_attention_heads"),
        fields.positive_int("num_key_value_heads", default=fields.positive_int("num_attention_heads")),
        read_head_dim(fields),
        fields.positive_float("rms_norm_eps", default=1e-6),
        read_rope(fields),
        fields.positive_int("draft_vocab_size", default=vocab_size),
        _read_layers(fields, model),
        fields.flag("norm_before_residual", default=False),
    )


def _read_layers(fields: Fields, model: ModelConfig) -> tuple[int, ...]:
    count = model.num_layers
    inner = fields.inner("eagle_config")
    given = fields.raw.get(_LAYERS_KEY, None if inner is None else inner.raw.get(_LAYERS_KEY))
    layers = [2, count // 2, count - 3] if given is None else given
    found = {each for each in layers if isinstance(each, int) and 0 <= each < count} if isinstance(layers, list) else {}
    if not isinstance(layers, list) or not len(layers) == len(found) == NUM_LAYERS:
        raise _misfit(
            fields.source,
            f"it reads the layers {layers} of a model of {count}; they must be {NUM_LAYERS} of its layers",
        )
    return tuple(sorted(found))


def _load(tensors: Tensors, config: Eagle3Config, model: ModelConfig, embed: Table, dtype: torch.dtype) -> Eagle3Head:
    shapes = config.shapes(model)
    own_embed = "embed_tokens.weight" in tensors
    known = {*shapes, *_UNUSED, "d2t", "embed_tokens.weight"}
    if unknown := sorted(set(tensors.names) - known):
        raise Unsupported(
            f"{_FIELD}: {tensors.source} has the tensor {unknown[0]}, which heads of {ARCHITECTURES[0]} do not have",
            field=_FIELD,
        )
    if not own_embed and columns_of(embed) != config.hidden_size:
        raise _misfit(
            str(tensors.source),
            f"hidden_size is {config.hidden_size}, the model's {columns_of(embed)}, and it has no embed_tokens.weight",
        )
    weights = {name: tensors.tensor(name, shape).to(dtype) for name, shape in shapes.items()}
    if own_embed:
        embed = tensors.tensor("embed_tokens.weight", (model.vocab_size, config.hidden_size)).to(dtype)
    return Eagle3Head(config, weights, embed, _token_ids(tensors, config, model))


def _token_ids(tensors: Tensors, config: Eagle3Config, model: ModelConfig) -> Tensor:
    """Returns the model's token of each of the head's: d2t holds what is added to the head's."""
    own = np.arange(config.draft_vocab_size)
    if "d2t" in tensors:
        entry = tensors.entry("d2t")
        if entry.dtype != "I64" or entry.shape != (config.draft_vocab_size,):
            raise _misfit(
                str(tensors.source),
                f"d2t is {entry.dtype} {list(entry.shape)}; it must be I64 [{config.draft_vocab_size}]",
            )
        own = own + np.frombuffer(tensors.sample("d2t", 0, entry.num_bytes), np.int64)
    wrong = np.flatnonzero((own < 0) | (own >= model.vocab_size))
    if len(wrong):
        raise _misfit(
            str(tensors.source),
            f"its token {wrong[0]} is token {own[wrong[0]]} of the model, which has {model.vocab_size}",
        )
    return torch.from_numpy(own)


def _misfit(source: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD}: the head {source} does not fit the model: {reason}", field=_FIELD)
