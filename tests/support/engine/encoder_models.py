"""Small random encoders, in Hugging Face form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.engine.tiny_shape import VOCAB_SIZE
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GteConfig,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

NUM_LABELS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "num_labels": NUM_LABELS,
}


@dataclass(frozen=True)
class Encoder:
    """A family's config, and what its models take."""

    model: type[PreTrainedModel]
    config: Callable[..., PretrainedConfig]
    more: Mapping[str, Any]
    has_types: bool = False  # has token types, one for each text of a pair

    def make(self, **changed: Any) -> PretrainedConfig:
        return self.config(**{**self.more, **changed})


def _made(encoder: Encoder) -> PreTrainedModel:
    return encoder.model(encoder.make())


def _distil(**more: Any) -> PretrainedConfig:
    sizes = {**_SIZES, **more}
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
             "num_attention_heads": "n_heads"}  # fmt: skip
    return DistilBertConfig(**{names.get(key, key): value for key, value in sizes.items()})


ENCODERS: Mapping[str, Encoder] = {
    "bert": Encoder(BertModel, BertConfig, _SIZES, has_types=True),
    "roberta": Encoder(RobertaModel, RobertaConfig, _SIZES | {"type_vocab_size": 1}),
    "xlm-roberta": Encoder(XLMRobertaModel, XLMRobertaConfig, _SIZES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": Encoder(DistilBertModel, _distil, {}),
    "modernbert": Encoder(
        ModernBertModel,
        ModernBertConfig,
        _SIZES | {"num_hidden_layers": 4, "local_attention": 12, "pad_token_id": 0, "bos_token_id": 1,
                  "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "nomic_bert": Encoder(NomicBertModel, NomicBertConfig, _SIZES, has_types=True),
    "mpnet": Encoder(MPNetModel, MPNetConfig, _SIZES | {"max_position_embeddings": 98}),
    "gte": Encoder(GteModel, GteConfig, _SIZES | {"type_vocab_size": 2}, has_types=True),
    "jina_embeddings_v3": Encoder(JinaEmbeddingsV3Model, JinaEmbeddingsV3Config, _SIZES),
}  # fmt: skip
MAKERS = {name: partial(_made, encoder) for name, encoder in ENCODERS.items()}
