"""Small random encoders, in Hugging Face form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import transformers
from support.engine.tiny_shape import VOCAB_SIZE
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
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


def _newer() -> dict[str, Encoder]:
    """Returns those that older versions of Transformers lack."""
    encoders = {
        "nomic_bert": ("NomicBert", _SIZES, True),
        "gte": ("Gte", _SIZES | {"type_vocab_size": 2}, True),
        "jina_embeddings_v3": ("JinaEmbeddingsV3", _SIZES, False),
    }
    return {
        name: Encoder(getattr(transformers, f"{prefix}Model"), getattr(transformers, f"{prefix}Config"), sizes, typed)
        for name, (prefix, sizes, typed) in encoders.items()
        if hasattr(transformers, f"{prefix}Config")
    }


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
    "mpnet": Encoder(MPNetModel, MPNetConfig, _SIZES | {"max_position_embeddings": 98}),
    **_newer(),
}  # fmt: skip
MAKERS = {name: partial(_made, encoder) for name, encoder in ENCODERS.items()}
