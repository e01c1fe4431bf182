"""Small random models that pool, in Hugging Face form, and their vectors in Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.engine.tiny_shape import SHAPE
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

NUM_LABELS = 3


def make_embedder(
    config: Any, folder: Path, modes: Sequence[str] = ("lasttoken",), *, normalize: bool = True, std: float = 0.3
) -> PreTrainedModel:
    """Writes a model without a head, and what sentence-transformers keeps beside it."""
    model = _made(AutoModel, config, folder, std)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *((("Normalize", "2_Normalize"),) if normalize else ())]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": config.hidden_size, **{f"pooling_mode_{mode}": True for mode in modes}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


def make_classifier(config: Any, folder: Path, *, by_token: bool = False, std: float = 0.3) -> PreTrainedModel:
    kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    return _made(kind, config, folder, std)


def _made(kind: Any, config: Any, folder: Path, std: float) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = kind.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, std) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def hidden_of(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Returns the last hidden states [num_tokens, hidden_size]."""
    found: torch.Tensor = model(
        torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt))
    ).last_hidden_state[0]
    return found


@torch.inference_mode()
def scores_of(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Returns the scores of the classes before their activation."""
    found: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0]
    return found


def shape_with(**more: Any) -> dict[str, Any]:
    return {**SHAPE, "pad_token_id": 0, **more}
