"""`baton doctor` reads GGUF files and checkpoints in Mistral's own format as workers and gateways do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.engine.random_vectors import with_random_vectors
from support.engine.tiny_models import MODELS
from support.gguf.files import write_gguf

from baton.services.doctor.finding import Finding, Level
from baton.services.doctor.service.model import Capacity, check_model, observe_model
from baton.services.doctor.targets import Targets

WORKER = Targets("worker", executor="cuda", needs_weights=True)
GATEWAY = Targets("gateway")
PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 16,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 160,
    "max_seq_len": 512,
}


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", with_random_vectors(MODELS["llama"], seed=3))


def findings(path: Path, targets: Targets = WORKER, memory: int = 1 << 30) -> list[Finding]:
    targets = replace(targets, model=str(path))
    return list(check_model(observe_model(targets), targets, Capacity(gpu=memory)))


def problem(path: Path, targets: Targets = WORKER, memory: int = 1 << 30) -> str:
    (found,) = [one for one in findings(path, targets, memory) if one.level is not Level.OK]
    return found.what


@pytest.mark.parametrize("targets", [WORKER, GATEWAY])
def test_a_gguf_file_and_its_folder_are_fine(targets: Targets, gguf_file: Path) -> None:
    for path in (gguf_file, gguf_file.parent):
        assert {one.level for one in findings(path, targets)} == {Level.OK}


def test_weights_are_counted_as_they_are_in_memory(gguf_file: Path) -> None:
    assert "dequantized from 0.0 GiB do not fit 0.0 GiB" in problem(gguf_file, memory=1000)


def test_a_truncated_file_is_named(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: int(0.97 * len(data))])
    assert "model.gguf is truncated" in problem(gguf_file)


def test_an_architecture_that_is_not_there_is_named(gguf_file: Path) -> None:
    write_gguf(gguf_file, with_random_vectors(MODELS["llama"], seed=3), general__architecture="mamba")
    for targets in (replace(WORKER, needs_weights=False), GATEWAY):
        assert "general.architecture is 'mamba'; GGUF files can be loaded of llama" in problem(gguf_file, targets)


def test_a_missing_part_is_named(gguf_file: Path) -> None:
    part = gguf_file.rename(gguf_file.with_name("model-00001-of-00002.gguf"))
    assert problem(part) == "model-00002-of-00002.gguf is missing, which other files name"


def test_the_package_is_named_that_is_not_installed(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert problem(gguf_file) == "GGUF files need the package gguf: pip install 'baton-inference[gguf]'"
    assert {one.level for one in findings(gguf_file, GATEWAY)} == {Level.OK}


def mistral_folder(folder: Path) -> Path:
    (folder / "params.json").write_text(json.dumps(PARAMS))
    (folder / "tekken.json").write_text("{}")
    save_file({"norm.weight": torch.ones(64)}, folder / "consolidated.safetensors")
    return folder


@pytest.mark.parametrize("targets", [WORKER, GATEWAY])
def test_a_folder_of_mistral_is_fine(targets: Targets, tmp_path: Path) -> None:
    assert {one.level for one in findings(mistral_folder(tmp_path), targets)} == {Level.OK}


def test_params_that_are_not_supported_are_named(tmp_path: Path) -> None:
    mistral_folder(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({**PARAMS, "kv_lora_rank": 8}))
    assert "kv_lora_rank" in problem(tmp_path)
    (tmp_path / "params.json").write_text("{")
    assert "params.json" in problem(tmp_path)


def test_a_folder_of_mistral_without_weights_or_tokenizer(tmp_path: Path) -> None:
    mistral_folder(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "tekken.json").unlink()
    assert problem(tmp_path) == f"{tmp_path} has no consolidated*.safetensors"
    assert "has no tokenizer.json, nor another file" in problem(tmp_path, GATEWAY)
