"""Small random models with the heads of late interaction and of rewards, in the forms that they are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.pooling_models import make_embedder, shape_with
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config

WIDTH = 24  # of the vectors of tokens


def write_colbert(
    folder: Path, config: PretrainedConfig, std: float = 0.3, **changed: Any
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Writes a BERT with a linear beside it, as colbert-ir/colbertv2.0 has it. `changed`: fields of its config."""
    model = make_embedder(config, folder, std=std)
    (folder / "modules.json").unlink()
    linear = _projection(model)
    tensors = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": linear}, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    changed = {"architectures": ["HF_ColBERT"], "dim": WIDTH, **changed}
    (folder / "config.json").write_text(json.dumps({**written, **changed}))
    return model, linear


def write_pylate(folder: Path, config: PretrainedConfig, std: float = 0.3) -> tuple[PreTrainedModel, torch.Tensor]:
    """Writes a ModernBERT whose modules are a Transformer and a linear, as PyLate saves them."""
    model = make_embedder(config, folder, std=std)
    modules = [("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")]
    listed = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    linear = _projection(model)
    dense = {"in_features": linear.shape[1], "out_features": WIDTH, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")
    return model, linear


def write_reward_model(
    folder: Path, architecture: str, num_labels: int, config: PretrainedConfig | None = None, std: float = 0.3
) -> tuple[PreTrainedModel, torch.nn.Module]:
    """Writes a Qwen2 with the head of Qwen2.5-Math's reward models."""
    model = make_embedder(config or Qwen2Config(**shape_with()), folder, std=std)
    (folder / "modules.json").unlink()
    torch.manual_seed(1)
    size = model.config.hidden_size
    head = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, num_labels))
    tensors = {f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors |= {f"score.{name}": value for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    written |= {"architectures": [architecture], "auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}}
    written = {key: value for key, value in written.items() if key not in ("id2label", "label2id", "num_labels")}
    (folder / "config.json").write_text(json.dumps(written))
    return model, head


def _projection(model: PreTrainedModel) -> torch.Tensor:
    size = (WIDTH, model.config.hidden_size)
    return torch.nn.init.normal_(torch.empty(size), generator=torch.Generator().manual_seed(1))
