"""Layers of multi-token prediction (MTP): where checkpoints keep them, and the model that one is. Knows no tensors.

From the model's hidden state of a token and the embedding of the next one, such a layer predicts the token behind it
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.rpc.errors import Unsupported
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import JoinNames

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of an MTP layer's tensors without ".weight", within the layer."""

    count_key: str = "num_nextn_predict_layers"  # of config.json
    embed: str = "embed_tokens"
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    proj: str = "eh_proj"
    norm: str = "shared_head.norm"
    lm_head: str = "shared_head.head"


# By architecture. The layer follows the model's own ones, and is like the last of them.
MTP_LAYERS: Mapping[str, MtpNames] = {
    "DeepseekV3ForCausalLM": MtpNames(),
    "Glm4MoeForCausalLM": MtpNames(),
    "Glm4MoeLiteForCausalLM": MtpNames(),
}


def read_mtp(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Returns the model of the MTP layer of config.json, without the others. Raises Unsupported if there is none."""
    names = MTP_LAYERS.get(model.architecture)
    if names is None:
        raise _refused(f"{model.architecture} has none that is read; {', '.join(MTP_LAYERS)} may have one")
    count = fields.raw.get(names.count_key) or 0
    if count != 1:
        raise _refused(f"{fields.source}: {names.count_key} is {count}; models with one are supported")
    return _layer_alone(model, names)


def mtp_prefix(layer: ModelConfig) -> str:
    """Returns the beginning of the names of the layer's own tensors."""
    return layer.names.prefixes(0)[0]


def _layer_alone(model: ModelConfig, names: MtpNames) -> ModelConfig:
    """Returns the config of the layer, which takes the model's embedding and head if it has none of its own."""
    own, index = model.names, model.num_layers
    prefix = own.layer.format(index)
    embed, head = prefix + names.embed, prefix + names.lm_head
    others = ((embed, own.embed), (head, own.embed if model.tie_embeddings else own.lm_head))
    layer = replace(
        own,
        embed=embed,
        lm_head=head,
        norm=prefix + names.norm,
        places=((index, index),),
        aliases=(*own.aliases, *others),
        join=JoinNames(prefix + names.embed_norm, prefix + names.hidden_norm, prefix + names.proj),
    )
    return replace(model, layers=model.layers[-1:], tie_embeddings=False, names=layer)


def _refused(reason: str) -> Unsupported:
    return Unsupported(f"{_FIELD}: method 'mtp' needs a layer that predicts further tokens: {reason}", field=_FIELD)
