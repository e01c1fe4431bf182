"""Scales of a quantized KV cache, under the names that checkpoints have them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_models import make_model

from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.kv_scales import load_kv_scales
from baton.worker.weights.loading import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama", tmp_path)
    return tmp_path


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def test_without_scales_all_are_one(folder: Path) -> None:
    assert torch.equal(load_model(str(folder), "auto", torch.float32).kv_scales, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("self_attn.k_scale", "self_attn.v_scale", [0.5, 2.0]),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", [0.5, 2.0]),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale", [0.5, 2.0]),
        ("self_attn.kv_scale", "self_attn.kv_scale", [2.0, 2.0]),
    ],
)
def test_a_layers_scales_are_found_and_are_no_unused_tensors(
    folder: Path, key: str, value: str, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    prefix = "model.layers.1."
    add(folder, {prefix + key: torch.tensor([0.5]), prefix + value: torch.tensor(2.0, dtype=torch.bfloat16)})
    loaded = load_model(str(folder), "auto", torch.float32)
    assert loaded.kv_scales.tolist() == [[1.0, 1.0], expected, [1.0, 1.0]]
    assert not caplog.records


def test_half_a_pair_is_none(folder: Path) -> None:
    add(folder, {"model.layers.0.self_attn.k_scale": torch.tensor(3.0)})
    with Checkpoint(folder) as checkpoint:
        assert torch.equal(load_kv_scales(checkpoint, 3), torch.ones(3, 2))
