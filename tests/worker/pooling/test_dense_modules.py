"""Linears that sentence-transformers keeps in folders of their own: loaded, applied, and refused where they misfit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engine.encoder_models import ENCODERS
from support.engine.pooled_runs import assert_same, make_pooling_engine, normalized, run_pooled
from support.engine.pooling_models import make_embedder
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.core import PoolingParams, PoolingTask

EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)
WIDTH = 24
LISTED = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
TEXT = [5, 9, 11, 30]


def write_modules(folder: Path, listed: list[tuple[str, str]]) -> None:
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, PreTrainedModel, torch.nn.Linear]:
    """A BERT with a linear from 64 to 24 values behind its mean."""
    model = make_embedder(ENCODERS["bert"].make(), tmp_path, ["mean_tokens"])
    write_modules(tmp_path, LISTED)
    torch.manual_seed(1)
    linear = torch.nn.Linear(64, WIDTH)
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    write_config(folder)
    save_file({f"linear.{name}": value for name, value in linear.state_dict().items()}, folder / "model.safetensors")
    return tmp_path, model, linear


def write_config(folder: Path, **changed: Any) -> None:
    config = {"in_features": 64, "out_features": WIDTH, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config | activation | changed))


@torch.inference_mode()
def test_a_linear_in_a_folder_of_its_own_is_applied(made: tuple[Path, PreTrainedModel, torch.nn.Linear]) -> None:
    folder, model, linear = made
    found = run_pooled(make_pooling_engine(folder), [TEXT], EMBED)[0]
    mean = model(torch.tensor([TEXT])).last_hidden_state[0].mean(0)
    assert_same(found, normalized(linear(mean).tanh()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"in_features": 32}, "in_features is 32; it must be 64, which is the width before it"),
        ({"out_features": 25}, r"linear.weight has shape \[24, 64\]; by config.json it must be \[25, 64\]"),
        ({"bias": None, "activation_function": "torch.nn.SiLU"}, "activation_function is 'torch.nn.SiLU'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ],
)
def test_a_linear_that_contradicts_the_model_is_named(
    made: tuple[Path, PreTrainedModel, torch.nn.Linear], changed: dict[str, Any], message: str
) -> None:
    folder, *_ = made
    write_config(folder / "2_Dense", **changed)
    with pytest.raises(InvalidRequest, match=message) as refused:
        make_pooling_engine(folder)
    assert "2_Dense" in refused.value.message


def test_a_linear_without_safetensors_is_named(made: tuple[Path, PreTrainedModel, torch.nn.Linear]) -> None:
    folder, *_ = made
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match=r"2_Dense does not hold model.safetensors .*pickles"):
        make_pooling_engine(folder)


def test_modules_in_another_order_are_refused(made: tuple[Path, PreTrainedModel, torch.nn.Linear]) -> None:
    folder, *_ = made
    write_modules(folder, [*LISTED[:2], LISTED[3], LISTED[2]])
    with pytest.raises(InvalidRequest, match="the modules are Transformer, Pooling, Normalize, Dense; they must be"):
        make_pooling_engine(folder)
