"""PEFT folders: what is read, and every way in which one can be wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_adapters import PREFIX, linears_of, save_adapter
from support.engine.tiny_models import make_model
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest, Mismatch, NotFound, ServiceError, Unsupported
from baton.worker.adapters.base_model import BaseModel, base_model_of
from baton.worker.adapters.reading import read_adapter, read_digest
from baton.worker.models.registry import load_config

WEIGHTS = "adapter_model.safetensors"
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, BaseModel]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_model("llama", folder)
    return model, base_model_of(load_config(folder), torch.float32)


@pytest.fixture
def adapter(llama: tuple[PreTrainedModel, BaseModel], tmp_path: Path) -> Path:
    return save_adapter(llama[0], tmp_path / "adapter", ["q_proj", "v_proj", "down_proj"])


def change(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, values: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in values.items():
        if tensor is None:
            del tensors[PREFIX + name]
        else:
            tensors[PREFIX + name] = tensor
    save_file(tensors, folder / WEIGHTS)


def read(folder: Path, base: BaseModel, max_rank: int = 64) -> Any:
    return read_adapter(folder, base, max_rank, torch.float32)


def test_parts_of_fused_linears_are_read_each(llama: tuple[PreTrainedModel, BaseModel], adapter: Path) -> None:
    found = read(adapter, llama[1])
    tensors = load_file(adapter / WEIGHTS)
    qkv = found.weights["model.layers.1.self_attn.q_proj"]
    assert sorted(qkv) == [0, 2]
    assert torch.equal(qkv[0].a, tensors[f"{PREFIX}{Q}.lora_A.weight"])
    assert torch.equal(qkv[0].b, tensors[f"{PREFIX}{Q}.lora_B.weight"])
    assert (qkv[0].scale, found.rank) == (2.0, 4)
    assert sorted(found.weights["model.layers.0.mlp.down_proj"]) == [0]
    assert found.num_bytes == sum(one.nbytes for one in tensors.values())
    assert len(found.weights) == 6


def test_scales_follow_the_patterns(llama: tuple[PreTrainedModel, BaseModel], tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"layers.1.*q_proj": 8}, "alpha_pattern": {"v_proj": 3}}
    folder = save_adapter(llama[0], tmp_path / "a", ["q_proj", "v_proj"], use_rslora=True, **patterns)
    found = read(folder, llama[1])
    first, second = (found.weights[f"model.layers.{layer}.self_attn.q_proj"] for layer in (0, 1))
    assert (first[0].rank, second[0].rank, found.rank) == (4, 8, 8)
    assert first[0].scale == pytest.approx(8 / 2)
    assert second[0].scale == pytest.approx(8 / math.sqrt(8))
    assert second[2].scale == pytest.approx(3 / 2)


def test_the_digest_follows_what_changes_the_result(
    llama: tuple[PreTrainedModel, BaseModel], adapter: Path, tmp_path: Path
) -> None:
    first = read_digest(adapter)
    assert read(adapter, llama[1]).digest == first
    moved = Path(shutil.copytree(adapter, tmp_path / "moved"))
    change(moved, base_model_name_or_path="elsewhere", inference_mode=True)
    assert read_digest(moved) == first
    change(moved, lora_alpha=9)
    assert read_digest(moved) != first
    trained = save_adapter(llama[0], tmp_path / "trained", ["q_proj", "v_proj", "down_proj"], seed=1)
    assert read_digest(trained) != first


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"peft_type": "IA3"}, Unsupported, "peft_type is 'IA3'"),
        ({"use_dora": True}, Unsupported, "DoRA is not supported"),
        ({"bias": "all"}, Unsupported, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save is ['lm_head']"),
        ({"init_lora_weights": "pissa_niter_4"}, Unsupported, "changes the base model too"),
        ({"target_parameters": "experts.down_proj"}, InvalidRequest, "target_parameters is 'experts.down_proj'"),
        ({"r": 0}, InvalidRequest, "r is 0; it must be a whole number from 1 to 512"),
        ({"r": 513}, InvalidRequest, "r is 513"),
        ({"r": None}, InvalidRequest, "r is None"),
        ({"r": True}, InvalidRequest, "r is True"),
        ({"lora_alpha": "x"}, InvalidRequest, "lora_alpha is 'x'"),
        ({"rank_pattern": {"(": 4}}, InvalidRequest, "rank_pattern has '(', which is no regular expression"),
        ({"rank_pattern": [4]}, InvalidRequest, "rank_pattern is [4]"),
        ({"r": 128}, InvalidRequest, "rank 128 is above max_lora_rank=64; start workers with --max-lora-rank 128"),
        ({"r": 8}, Mismatch, "the rank or the base model differs"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    llama: tuple[PreTrainedModel, BaseModel],
    adapter: Path,
    values: dict[str, Any],
    kind: type[ServiceError],
    words: str,
) -> None:
    change(adapter, **values)
    with pytest.raises(kind) as raised:
        read(adapter, llama[1])
    assert words in raised.value.message
    assert raised.value.field == "lora_path"


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ({f"{Q}.lora_A.weight": None}, InvalidRequest, f"{Q} has no lora_A"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, Unsupported, "DoRA"),
        ({"lm_head.weight": torch.ones(4, 4)}, Unsupported, "lm_head.weight is no tensor of LoRA"),
        ({f"{Q}.lora_B.weight": torch.ones(60, 4)}, Mismatch, "must be [64, 4]"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), math.nan)}, InvalidRequest, "not finite"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}, InvalidRequest, "dtype I8"),
        (
            {"lm_head.lora_A.weight": torch.ones(4, 64), "lm_head.lora_B.weight": torch.ones(170, 4)},
            Mismatch,
            "lm_head.lora_B.weight has shape [170, 4]; by adapter_config.json and the base model it must be [160, 4]",
        ),
        (
            {f"{Q[:-6]}w_proj.lora_{one}.weight": torch.ones(4, 4) for one in "AB"},
            Mismatch,
            "has no linear model.layers.1.self_attn.w_proj; the nearest is model.layers.1.self_attn.",
        ),
        (
            {
                "model.embed_tokens.lora_embedding_A": torch.ones(4, 170),
                "model.embed_tokens.lora_embedding_B": torch.ones(64, 4),
            },
            Mismatch,
            "the vocabulary or the width differs",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    llama: tuple[PreTrainedModel, BaseModel],
    adapter: Path,
    tensors: dict[str, torch.Tensor | None],
    kind: type[ServiceError],
    words: str,
) -> None:
    change_tensors(adapter, tensors)
    with pytest.raises(kind) as raised:
        read(adapter, llama[1])
    assert words in raised.value.message
    assert raised.value.field == "lora_path"


def test_a_broken_folder_is_refused(llama: tuple[PreTrainedModel, BaseModel], adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        read(tmp_path / "nowhere", llama[1])
    with pytest.raises(NotFound, match=r"holds no adapter_config\.json"):
        read(tmp_path, llama[1])
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(InvalidRequest, match="truncated") as raised:
        read(adapter, llama[1])
    assert raised.value.field == "lora_path"
    (adapter / WEIGHTS).unlink()
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match="is a pickle, which can run code"):
        read(adapter, llama[1])
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="is not JSON"):
        read(adapter, llama[1])


def test_an_adapter_of_a_larger_model_is_refused(
    llama: tuple[PreTrainedModel, BaseModel], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gpt2 = make_model("gpt2", tmp_path_factory.mktemp("gpt2"))
    assert linears_of(gpt2)
    with pytest.raises(Mismatch, match="The adapter is for another model"):
        read(save_adapter(gpt2, tmp_path / "a"), llama[1])
