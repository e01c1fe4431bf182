"""Layers of multi-token prediction (MTP): where checkpoints keep them, and the model that one is. Knows no tensors.

From the model's hidden state of a token and the embedding of the next one, such a layer predicts the token behind it
(DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.rpc.errors import Unsupported
from baton.worker.layers.state_spec import StateSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import JoinNames

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of an MTP layer's tensors without ".weight", and what else differs between families."""

    layer: str = "model.layers.{}."  # with the number of the model's layers
    prefix: str = "model.layers.{}."  # of the names below
    embed: str = "embed_tokens"
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    proj: str = "eh_proj"
    norm: str = "shared_head.norm"
    lm_head: str = "shared_head.head"
    count_key: str = "num_nextn_predict_layers"  # of config.json
    default_count: int = 0
    reads_normed: bool = False  # for further tokens, the layer reads its normed output


_AT_THE_END = MtpNames()
_APART = MtpNames(
    layer="mtp.layers.0.",
    prefix="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    proj="fc",
    norm="norm",
    lm_head="lm_head",
    default_count=1,
    reads_normed=True,
)
# By architecture. The layer is like the last one of the model that has attention.
MTP_LAYERS: Mapping[str, MtpNames] = {
    "DeepseekV3ForCausalLM": _AT_THE_END,
    "Glm4MoeForCausalLM": _AT_THE_END,
    "Glm4MoeLiteForCausalLM": _AT_THE_END,
    "Qwen3NextForCausalLM": _APART,
    "Qwen3_5ForCausalLM": replace(_APART, count_key="mtp_num_hidden_layers"),
}


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Says where an MTP layer is and what it is like."""

    model: ModelConfig  # of the layer alone
    prefix: str  # of the names of the layer's own tensors
    reads_normed: bool


def read_mtp(fields: Fields, model: ModelConfig) -> MtpConfig:
    """Returns the MTP layer of config.json. Raises Unsupported if there is none."""
    names = MTP_LAYERS.get(model.architecture)
    if names is None:
        raise _refused(f"{model.architecture} has none that is read; {', '.join(MTP_LAYERS)} may have one")
    text = fields.inner("text_config") or fields
    count = text.raw.get(names.count_key)
    count = names.default_count if count is None else count
    if count != 1:
        raise _refused(f"{fields.source}: {names.count_key} is {count}; models with one are supported")
    return MtpConfig(_layer_alone(model, names), names.prefix.format(model.num_layers), names.reads_normed)


def _layer_alone(model: ModelConfig, names: MtpNames) -> ModelConfig:
    """Returns the config of the layer, which takes the model's embedding and head if it has none of its own."""
    own, index = model.names, model.num_layers
    prefix = names.prefix.format(index)
    embed, head = prefix + names.embed, prefix + names.lm_head
    embeds = own.spellings(own.embed)
    heads = embeds if model.tie_embeddings else own.spellings(own.lm_head)
    others = (*((embed, each) for each in embeds), *((head, each) for each in heads))
    layer = replace(
        own,
        embed=embed,
        lm_head=head,
        norm=prefix + names.norm,
        layer=names.layer,
        places=((index, index),),
        aliases=(*own.aliases, *others),
        join=JoinNames(prefix + names.embed_norm, prefix + names.hidden_norm, prefix + names.proj),
    )
    spec = next(spec for spec in reversed(model.layers) if not isinstance(spec.attention, StateSpec))
    return replace(model, layers=(spec,), tie_embeddings=False, names=layer)


def _refused(reason: str) -> Unsupported:
    return Unsupported(f"{_FIELD}: method 'mtp' needs a layer that predicts further tokens: {reason}", field=_FIELD)
