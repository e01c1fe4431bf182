"""Small random adapters of experts in PEFT's two forms, and their base with them merged in."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_adapters import PREFIX, merged, save_adapter
from torch import Tensor, nn
from transformers import PreTrainedModel

WIDTH = 0.4
Form = Literal["stacked", "apart"]
PARAMETERS = ("gate_up_proj", "down_proj")
NAMES = ("gate_proj", "up_proj", "down_proj")


class _Experts(NamedTuple):
    name: str
    module: nn.Module

    @property
    def transposed(self) -> bool:
        """Whether matrices are [in_features, out_features]."""
        return getattr(self.module, "is_transposed", False)

    def shape(self, parameter: str) -> tuple[int, int, int]:
        """Returns the number of experts, in_features and out_features."""
        count, first, second = getattr(self.module, parameter).shape
        return (count, first, second) if self.transposed else (count, second, first)


def experts_of(model: PreTrainedModel) -> list[_Experts]:
    """Returns the modules with stacked experts."""
    return [_Experts(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


def save_expert_adapter(
    model: PreTrainedModel,
    folder: Path,
    form: Form = "stacked",
    *,
    parameters: Sequence[str] = PARAMETERS,
    names: Sequence[str] = NAMES,  # of single experts' linears
    old: tuple[str, str] = ("", ""),  # how older versions of Transformers call the module, as (now, then)
    linears: Sequence[str] = ("q_proj", "o_proj"),
    rank: int = 4,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Saves a random adapter of all experts, and of some linears beside them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, WIDTH, generator=generator)

    targets = {"target_parameters": [f"experts.{name}" for name in parameters]} if form == "stacked" else {}
    save_adapter(model, folder, linears, rank=rank, seed=seed, **targets, **config)
    tensors = load_file(folder / "adapter_model.safetensors")
    for experts in experts_of(model):
        if form == "stacked":
            for name, parameter in _wrapped(experts.name, parameters):
                count, ins, outs = experts.shape(parameter)
                tensors[f"{PREFIX}{name}.lora_A.weight"] = random(count * rank, ins)
                tensors[f"{PREFIX}{name}.lora_B.weight"] = random(outs, rank * count)
            continue
        count, hidden, size = experts.shape("gate_up_proj")
        shapes = ((hidden, size // 2), (hidden, size // 2), (size // 2, hidden))
        for module in _modules(experts, old):
            for name, (ins, outs) in zip(names, shapes, strict=True):
                tensors[f"{module}.{name}.lora_A.weight"] = random(rank, ins)
                tensors[f"{module}.{name}.lora_B.weight"] = random(outs, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_experts(
    model: PreTrainedModel,
    folder: Path,
    form: Form = "stacked",
    *,
    parameters: Sequence[str] = PARAMETERS,
    names: Sequence[str] = NAMES,
    old: tuple[str, str] = ("", ""),
) -> PreTrainedModel:
    """Returns a copy of the model with the adapter in it, by PEFT's get_delta_weight."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, tensors = config["lora_alpha"] / config["r"], load_file(folder / "adapter_model.safetensors")
    model = merged(copy.deepcopy(model), folder)
    for experts in experts_of(model):
        if form == "stacked":
            for name, parameter in _wrapped(experts.name, parameters):
                a, b = (tensors[f"{PREFIX}{name}.lora_{one}.weight"] for one in "AB")
                count = experts.shape(parameter)[0]
                a, b = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count)
                delta = torch.einsum("o r e, e r i -> e i o" if experts.transposed else "o r e, e r i -> e o i", b, a)
                getattr(experts.module, parameter).data += delta * scale
            continue
        for expert, module in enumerate(_modules(experts, old)):
            gate, up, down = (
                scale * tensors[f"{module}.{name}.lora_B.weight"] @ tensors[f"{module}.{name}.lora_A.weight"]
                for name in names
            )
            experts.module.gate_up_proj.data[expert] += torch.cat((gate, up))
            experts.module.down_proj.data[expert] += down
    return model


def _modules(experts: _Experts, old: tuple[str, str]) -> Iterator[str]:
    """Yields the name of each expert's module."""
    name = experts.name.replace(*old) if old[0] else experts.name
    for expert in range(experts.shape("down_proj")[0]):
        yield f"{PREFIX}{name}.{expert}"


def _wrapped(name: str, parameters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the names under which PEFT saves parameters: it wraps the second around the first."""
    for index, parameter in enumerate(parameters):
        yield name if index == len(parameters) - 1 else f"{name}.base_layer", parameter
