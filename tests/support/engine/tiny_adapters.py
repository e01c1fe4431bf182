"""Small random adapters in PEFT's form, and their base with them merged in, which is the workers' oracle."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
WIDTH = 0.3  # of the random values: large enough to change most tokens


def linears_of(model: PreTrainedModel, names: Collection[str] = ()) -> dict[str, nn.Module]:
    """Returns the linears of a model's layers, by their full names: all, or those whose last names are given."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and "layers." in name.replace("h.", "layers.")
        if (not names or name.rpartition(".")[2] in names) and "vision" not in name
    }


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    targets: Sequence[str] = (),
    *,
    rank: int = 4,
    seed: int = 0,
    embedding: bool = False,
    head: bool = False,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Saves a random adapter of these linears, or of all. `config` replaces keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    tensors: dict[str, Tensor] = {}

    def random(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, WIDTH, generator=generator).to(dtype)

    for name, module in linears_of(model, targets).items():
        own = rank_of(values, name)
        outs, ins = weight_of(module).shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = random(own, ins)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = random(outs, own)
    if embedding:
        name = next(name for name, one in model.named_modules() if one is model.get_input_embeddings())
        vocab, hidden = model.get_input_embeddings().weight.shape
        tensors[f"{PREFIX}{name}.lora_embedding_A"] = random(rank, vocab)
        tensors[f"{PREFIX}{name}.lora_embedding_B"] = random(hidden, rank)
    if head:
        name = next(name for name, one in model.named_modules() if one is model.get_output_embeddings())
        vocab, hidden = model.get_output_embeddings().weight.shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = random(rank, hidden)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = random(vocab, rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def rank_of(config: dict[str, Any], name: str) -> int:
    return int(_matching(config.get("rank_pattern", {}), name, config["r"]))


def scale_of(config: dict[str, Any], name: str) -> float:
    alpha, rank = _matching(config.get("alpha_pattern", {}), name, config["lora_alpha"]), rank_of(config, name)
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Returns a copy of the model with W + scale * B @ A for W, as PEFT's merge_and_unload has it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in linears_of(model).items():
            a = tensors.get(f"{PREFIX}{name}.lora_A.weight")
            if a is not None:
                update = tensors[f"{PREFIX}{name}.lora_B.weight"].float() @ a.float()
                weight_of(module).add_(update, alpha=scale_of(config, name))
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is not None:  # an update of a head or of an embedding that share a matrix is of one of them
            head.weight = nn.Parameter(head.weight.clone())
        for name, module in model.named_modules():
            if module is head and f"{PREFIX}{name}.lora_A.weight" in tensors:
                a, b = (tensors[f"{PREFIX}{name}.lora_{one}.weight"].float() for one in "AB")
                head.weight.add_(b @ a, alpha=scale_of(config, name))
            if module is table and f"{PREFIX}{name}.lora_embedding_A" in tensors:
                a, b = (tensors[f"{PREFIX}{name}.lora_embedding_{one}"].float() for one in "AB")
                table.weight.add_((b @ a).t(), alpha=scale_of(config, name))
    return model


def weight_of(module: nn.Module) -> Tensor:
    """Returns the matrix [out_features, in_features], as a view."""
    weight: Tensor = module.weight.data
    return weight.t() if isinstance(module, Conv1D) else weight


def _matching(patterns: dict[str, Any], name: str, otherwise: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)
