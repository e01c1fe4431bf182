"""A small random model with the sample model's tokenizer, and what guesses for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.engine.eagle3_heads import write_head
from support.engine.spec_runs import MODEL, VOCAB_SIZE
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 64
NUM_LAYERS = 3


def write_small_model(folder: Path) -> None:
    """Writes a model whose steps take a tenth of the sample model's time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)


def write_first_layers(folder: Path, model: Path, num_layers: int) -> None:
    """Writes a model's first layers: another model with the same tokenizer."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    others = tuple(f"model.layers.{layer}." for layer in range(num_layers, NUM_LAYERS))
    save_file({name: one for name, one in load_file(path).items() if not name.startswith(others)}, path)


def write_small_head(folder: Path) -> None:
    """Writes an EAGLE-3 head for the small model."""
    write_head(folder, VOCAB_SIZE, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, hidden=HIDDEN)
