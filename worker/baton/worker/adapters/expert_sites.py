"""The experts of a layer as places of adapters, under the names that PEFT has for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.worker.adapters.site import Place, Site
from baton.worker.quantization.base import Part
from baton.worker.quantization.experts import ExpertsShape

# Transformers 5 stacks the matrices of experts that checkpoints have apart, in these parameters of one module.
_STACKED = ("gate_up_proj", "down_proj")
_RENAMED = (".block_sparse_moe.", ".mlp.")  # as (a checkpoint's, Transformers 5's)


class ExpertSites(NamedTuple):
    """The two sites of a layer's experts."""

    gate_up: Site  # two parts an expert
    down: Site


class Stack(NamedTuple):
    """A parameter that has a matrix for each expert, as PEFT's `target_parameters` name it."""

    site: Site
    interleaved: bool = False  # rows of gates and of ups alternate; else gates come first


def expert_sites(shape: ExpertsShape) -> ExpertSites:
    """Returns the sites of a layer's experts."""
    size, hidden, prefix = shape.intermediate_size, shape.hidden_size, shape.prefix
    experts = range(shape.num_experts)
    gate_up = [Part(f"{prefix}experts.{expert}.{half}", size) for expert in experts for half in ("gate", "up")]
    down = [Part(f"{prefix}experts.{expert}.down", hidden) for expert in experts]
    return ExpertSites(
        Site(f"{prefix}experts.gate_up", gate_up, hidden, num_experts=shape.num_experts),
        Site(f"{prefix}experts.down", down, size, num_experts=shape.num_experts),
    )


def expert_modules(shape: ExpertsShape, sites: ExpertSites) -> Iterator[tuple[str, Place]]:
    """Yields the modules of single experts, which older versions of Transformers have."""
    names, prefix = shape.names, shape.prefix
    if "{}" not in names.down or len(names.gate_up) != 2:
        return
    for expert in range(shape.num_experts):
        for half, template in enumerate(names.gate_up):
            yield prefix + _module(template.format(expert)), Place(sites.gate_up, 2 * expert + half)
        yield prefix + _module(names.down.format(expert)), Place(sites.down, expert)


def expert_stacks(shape: ExpertsShape, sites: ExpertSites) -> Iterator[tuple[str, str, Stack]]:
    """Yields the modules that hold stacks, and the names of these in them."""
    names, stacks = shape.names, (Stack(sites.gate_up, shape.names.interleaved), Stack(sites.down))
    if "{}" in names.down:
        module = shape.prefix + names.down.partition(".{}")[0]
        for parameter, stack in zip(_STACKED, stacks, strict=True):
            yield module, parameter, stack
        return
    for name, stack in zip((names.gate_up[0], names.down), stacks, strict=True):
        module, _, parameter = (shape.prefix + name).rpartition(".")
        yield module, parameter, stack


def renamed(module: str) -> list[str]:
    """Returns the module's name, and that of Transformers 5 if it differs."""
    ours, theirs = _RENAMED
    return [module, module.replace(ours, theirs)] if ours in module else [module]


def _module(name: str) -> str:
    return name.removesuffix(".weight")
