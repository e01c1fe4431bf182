"""The places of a base model that adapters change: its linears, its embedding, and its head. Knows no values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from baton.rpc.errors import Unsupported
from baton.worker.adapters.expert_sites import (
    ExpertSites,
    Stack,
    expert_modules,
    expert_sites,
    expert_stacks,
    renamed,
)
from baton.worker.adapters.site import Place, Site
from baton.worker.core import HeadKind
from baton.worker.layers.spec import AttentionSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.names import Layout
from baton.worker.quantization.base import LinearShape, Part
from baton.worker.quantization.experts import ExpertsShape
from baton.worker.weights.build import linear_shapes

PARTS_UNIT = 6  # divisible by the parts of every site: the experts of all slots are numbered evenly
_NEAREST = 0.5  # similarity of a name that errors suggest


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What adapters of a model are checked against."""

    architecture: str
    sites: Sequence[Site]
    embedding: str  # the name of its site
    head: str = ""  # the name of its site; empty: the model generates nothing
    refused: Mapping[str, str] = field(default_factory=dict)  # why, by module
    experts: Mapping[str, ExpertSites] = field(default_factory=dict)  # by the prefix of their layer's names
    stacks: Mapping[str, Mapping[str, Stack]] = field(default_factory=dict)  # by module and parameter
    places: Mapping[str, Place] = field(default_factory=dict)  # by module, under every name that checkpoints have
    columns: Mapping[str, int] = field(init=False)  # of each site's first part, among those of all sites
    num_parts: int = field(init=False)  # of all sites, and unused ones up to a multiple of PARTS_UNIT

    def __post_init__(self) -> None:
        counts = [len(site.parts) for site in self.sites]
        firsts = [0, *accumulate(counts)]
        object.__setattr__(self, "columns", {site.name: first for site, first in zip(self.sites, firsts, strict=False)})
        object.__setattr__(self, "num_parts", -(-firsts[-1] // PARTS_UNIT) * PARTS_UNIT)

    def nearest(self, module: str) -> str:
        """Returns the module of the most similar name, or nothing."""
        found = difflib.get_close_matches(module, [*self.places], n=1, cutoff=_NEAREST)
        return found[0] if found else ""


def base_model_of(config: ModelConfig, dtype: torch.dtype) -> BaseModel:
    """Returns the places of a model. Raises Unsupported for models whose layers are not ours."""
    if config.transformers is not None:
        raise Unsupported(
            f"enable_lora=true needs layers of Baton; {config.architecture} is computed by Transformers: set "
            "--model-impl baton if there is a family, or leave adapters off",
            field="enable_lora",
        )
    if not all(isinstance(layer.attention, AttentionSpec) for layer in config.layers):
        raise Unsupported(
            f"enable_lora=true needs layers of queries, keys and values; those of {config.architecture} have no "
            "adapters yet: leave adapters off",
            field="enable_lora",
        )
    if config.experts is not None and config.experts.gate.squares:
        raise Unsupported(
            f"enable_lora=true needs experts with gates; those of {config.architecture} have none: leave adapters off",
            field="enable_lora",
        )
    sites: list[Site] = []
    layers: list[tuple[ExpertsShape, ExpertSites]] = []
    refused: dict[str, str] = {}
    head = config.names.lm_head if HeadKind.GENERATE in config.heads else ""
    for shape in linear_shapes(config, dtype):
        if not isinstance(shape, LinearShape):
            layers.append((shape, expert_sites(shape)))
        elif shape.kind == "head":
            refused |= {part.name: "linears of poolers have no adapters" for part in shape.parts if part.name != head}
        else:
            sites.append(_site(config, shape))
    if head:  # also where it shares the embedding's matrix: an update of one does not change the other
        sites.append(Site(head, (Part(head, config.vocab_size),), config.hidden_size))
    else:
        refused.setdefault(config.names.lm_head, "the model is used without it")
    embedding = Part(config.names.embed, config.hidden_size)
    sites.append(Site(embedding.name, (embedding,), config.vocab_size, is_embedding=True))
    places = {
        spelling: Place(site, index)
        for site in sites
        for index, part in enumerate(site.parts)
        for spelling in _spellings(config, part.name)
    }
    stacks: dict[str, dict[str, Stack]] = {}
    for shape, own in layers:
        sites += own
        for module, place in expert_modules(shape, own):
            places |= dict.fromkeys(_spellings(config, module), place)
        for module, parameter, stack in expert_stacks(shape, own):
            for spelling in _spellings(config, module):
                stacks.setdefault(spelling, {})[parameter] = stack
    experts = {shape.prefix: own for shape, own in layers}
    reasons = {spelling: why for name, why in refused.items() for spelling in _spellings(config, name)}
    return BaseModel(config.architecture, tuple(sites), embedding.name, head, reasons, experts, stacks, places)


def _site(config: ModelConfig, shape: LinearShape) -> Site:
    names, name = config.names, shape.parts[0].name
    fused = len(shape.parts) == 1
    by_head = fused and names.layout is Layout.QKV_BY_HEAD and name.endswith(names.qkv)
    attention = config.layers[0].attention
    head_dim = attention.head_dim if by_head and isinstance(attention, AttentionSpec) else 0
    swapped = fused and names.up_first and name.endswith(names.gate_up)
    return Site(name, tuple(shape.parts), shape.in_features, head_dim, swapped)


def _spellings(config: ModelConfig, name: str) -> list[str]:
    found = [spelling.removesuffix(".weight") for spelling in config.names.spellings(f"{name}.weight")]
    return [spelling for one in found for spelling in renamed(one)]
