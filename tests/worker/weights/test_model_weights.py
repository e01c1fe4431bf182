"""Weights from a folder, whole and sharded, broken in every way; and the digest that names them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_models import make_model

from baton.rpc.errors import InvalidRequest
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import load_config, parse_config
from baton.worker.weights.build import dummy_weights, weight_bytes
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.digest import DIGEST_BYTES, model_digest
from baton.worker.weights.loading import load_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_model("qwen2", folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_model("qwen2", folder, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def sharded_copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def digest_of(folder: Path) -> bytes:
    with Checkpoint(folder) as checkpoint:
        return model_digest(load_config(folder), checkpoint)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    content = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del content[name]
        else:
            content[name] = tensor
    save_file(content, folder / WEIGHTS)


def test_weights_are_the_files_tensors_fused(whole: Path) -> None:
    loaded = load_model(str(whole), "auto", torch.float32)
    tensors = load_file(whole / WEIGHTS)
    layer, prefix = loaded.weights.layers[1], "model.layers.1."
    qkv, gate_up = layer.attention.qkv.params, layer.mlp.gate_up.params
    for fused, names in (
        (qkv["weight"], ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
        (qkv["bias"], ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),
        (gate_up["weight"], ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        (layer.mlp.down.params["weight"], ("mlp.down_proj.weight",)),
    ):
        assert torch.equal(fused, torch.cat([tensors[prefix + name] for name in names]))
    assert loaded.weights.lm_head.params["weight"] is loaded.weights.embed


def test_experts_are_stacked_by_one_tensor_each(tmp_path: Path) -> None:
    make_model("mixtral", tmp_path)
    layer = load_model(str(tmp_path), "auto", torch.float32).weights.layers[1]
    tensors = load_file(tmp_path / WEIGHTS)
    experts, prefix = layer.mlp.experts.params, "model.layers.1.block_sparse_moe."
    assert torch.equal(layer.mlp.router.params["weight"], tensors[prefix + "gate.weight"])
    assert experts["gate_up"].shape == (8, 192, 64)
    for expert in range(8):
        gate, down, up = (tensors[f"{prefix}experts.{expert}.w{index}.weight"] for index in (1, 2, 3))
        assert torch.equal(experts["gate_up"][expert], torch.cat((gate, up)))
        assert torch.equal(experts["down"][expert], down)


def test_stacks_of_experts_are_laid_out_by_rows_with_gates_first(tmp_path: Path) -> None:
    make_model("gpt_oss", tmp_path)
    ours = load_model(str(tmp_path), "auto", torch.float32).weights.layers[0].mlp.experts.params
    prefix, tensors = "model.layers.0.mlp.experts.", load_file(tmp_path / WEIGHTS)
    wide, bias = tensors[prefix + "gate_up_proj"].transpose(1, 2), tensors[prefix + "gate_up_proj_bias"]
    assert torch.equal(ours["gate_up"], torch.cat((wide[:, ::2], wide[:, 1::2]), 1))
    assert torch.equal(ours["gate_up_bias"], torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
    assert torch.equal(ours["down"], tensors[prefix + "down_proj"].transpose(1, 2))
    assert torch.equal(ours["down_bias"], tensors[prefix + "down_proj_bias"])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make_model("mixtral", tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
    change(tmp_path, **{name.replace(".", "__"): None})
    with pytest.raises(InvalidRequest, match=rf"no file holds the tensor {name} \[96, 64\]"):
        load_model(str(tmp_path), "auto", torch.float32)


def test_a_checkpoint_without_the_prefix_of_its_names_is_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("gpt2", tmp_path)
    expected = load_model(str(tmp_path), "auto", torch.float32).weights
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    mask = torch.ones(1, 1, 512, 512).tril()
    save_file({**tensors, "h.0.attn.bias": mask}, tmp_path / WEIGHTS)
    found = load_model(str(tmp_path), "auto", torch.float32).weights
    assert all(map(torch.equal, found.tensors(), expected.tensors()))
    assert "are not used" not in caplog.text


def test_queries_keys_and_values_of_each_head_are_put_apart(tmp_path: Path) -> None:
    make_model("gpt_neox", tmp_path)
    qkv = load_model(str(tmp_path), "auto", torch.float32).weights.layers[1].attention.qkv.params
    tensors = load_file(tmp_path / WEIGHTS)
    for part in ("weight", "bias"):
        by_head = tensors[f"gpt_neox.layers.1.attention.query_key_value.{part}"].chunk(4)
        for which in range(3):
            expected = torch.cat([head.chunk(3)[which] for head in by_head])
            assert torch.equal(qkv[part].chunk(3)[which], expected)


def test_norms_that_keep_the_distance_from_1_are_added_in_fp32(tmp_path: Path) -> None:
    make_model("gemma", tmp_path)
    norm = load_model(str(tmp_path), "auto", torch.bfloat16).weights.norm
    stored = load_file(tmp_path / WEIGHTS)["model.norm.weight"]
    assert norm.dtype == torch.float32
    assert torch.equal(norm, stored + 1)


def test_shards_make_the_same_model(whole: Path, sharded: Path) -> None:
    one, many = (load_model(str(folder), "safetensors", torch.float32) for folder in (whole, sharded))
    assert one.digest == many.digest
    for ours, theirs in zip(one.weights.tensors(), many.weights.tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_narrow_checkpoints_are_widened(copy: Path) -> None:
    expected = load_file(copy / WEIGHTS)["model.norm.weight"].bfloat16()
    change(copy, model__norm__weight=expected)
    loaded = load_model(str(copy), "auto", torch.float32)
    assert loaded.weights.norm.dtype == torch.float32
    assert torch.equal(loaded.weights.norm, expected.float())


def test_unused_tensors_are_logged(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(copy, vision__weight=torch.zeros(3))
    with caplog.at_level(logging.WARNING):
        load_model(str(copy), "auto", torch.float32)
    assert "1 tensors of" in caplog.text
    assert "vision.weight" in caplog.text


def test_a_missing_tensor_is_named(copy: Path) -> None:
    change(copy, **{O_PROJ.replace(".", "__"): None})
    with pytest.raises(InvalidRequest, match=rf"no file holds the tensor {O_PROJ} \[64, 64\]"):
        load_model(str(copy), "auto", torch.float32)


def test_a_misshapen_tensor_is_named_with_the_right_shape(copy: Path) -> None:
    change(copy, **{O_PROJ.replace(".", "__"): torch.zeros(64, 32)})
    with pytest.raises(InvalidRequest, match=rf"{O_PROJ} has shape \[64, 32\]; by config.json it must be \[64, 64\]"):
        load_model(str(copy), "auto", torch.float32)


def test_a_tensor_of_another_dtype_is_named(copy: Path) -> None:
    change(copy, **{O_PROJ.replace(".", "__"): torch.zeros(64, 64, dtype=torch.int32)})
    with pytest.raises(InvalidRequest, match=rf"{O_PROJ} has dtype I32; it must be one of F32, BF16, F16"):
        load_model(str(copy), "auto", torch.float32)


def test_a_folder_without_weights_is_an_error_with_a_fix(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "adapter.safetensors")
    with pytest.raises(
        InvalidRequest, match=rf"neither {WEIGHTS} nor .*it holds adapter.safetensors.*--load-format dummy"
    ):
        load_model(str(copy), "auto", torch.float32)


@pytest.mark.parametrize("kept", [0.9, 0.5])
def test_a_truncated_file_is_reported(copy: Path, kept: float) -> None:
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(InvalidRequest, match=rf"{WEIGHTS} is truncated: \d+ bytes, its header describes {len(data)}"):
        load_model(str(copy), "auto", torch.float32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a complete safetensors file: 0 bytes"),
        (b"\xff" * 64, "not a complete safetensors file"),
        (b"\x04\0\0\0\0\0\0\0nope", "broken safetensors header"),
        (b"\x0c\0\0\0\0\0\0\0" + b'{"a": "bcd"}', "broken safetensors header"),
        (b"\x02\0\0\0\0\0\0\0[]", "broken safetensors header"),
    ],
)
def test_other_files_than_safetensors_are_reported(copy: Path, data: bytes, message: str) -> None:
    (copy / WEIGHTS).write_bytes(data)
    with pytest.raises(InvalidRequest, match=message):
        load_model(str(copy), "auto", torch.float32)


def test_an_inconsistent_header_is_reported(copy: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (copy / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InvalidRequest, match=r"w has 8 bytes; F32 \[3\] has 12"):
        load_model(str(copy), "auto", torch.float32)


def test_a_missing_shard_is_named(sharded_copy: Path) -> None:
    shard = sorted(sharded_copy.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InvalidRequest, match=rf"{shard.name} is missing: {INDEX} names it"):
        load_model(str(sharded_copy), "auto", torch.float32)


def test_an_index_with_the_wrong_shard_is_reported(sharded_copy: Path) -> None:
    index = json.loads((sharded_copy / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    tensor = next(name for name, file in index["weight_map"].items() if file == names[0])
    index["weight_map"][tensor] = names[1]
    (sharded_copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match=rf"{names[1]} does not hold {tensor}"):
        load_model(str(sharded_copy), "auto", torch.float32)


@pytest.mark.parametrize("weight_map", [None, {}, {"model.norm.weight": "../../etc/passwd"}, {"model.norm.weight": 3}])
def test_an_index_without_a_usable_map_is_reported(sharded_copy: Path, weight_map: object) -> None:
    (sharded_copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match=r"weight_map is missing|it must be a file name"):
        load_model(str(sharded_copy), "auto", torch.float32)


def test_the_digest_distinguishes_models(whole: Path, copy: Path) -> None:
    original = digest_of(whole)
    assert len(original) == DIGEST_BYTES
    assert digest_of(copy) == original
    weight = load_file(copy / WEIGHTS)["model.norm.weight"]
    weight[0] += 0.5
    change(copy, model__norm__weight=weight)
    changed = digest_of(copy)
    assert changed != original
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert digest_of(copy) not in (original, changed)


def test_the_digest_omits_properties_without_effect_on_kv(whole: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": 9, "_name_or_path": "elsewhere"}))
    (copy / "generation_config.json").unlink()
    assert digest_of(copy) == digest_of(whole)


def test_dummy_weights_are_a_function_of_the_seed(whole: Path) -> None:
    config = load_config(whole)
    first, again, other = (dummy_weights(config, torch.float32, seed) for seed in (1, 1, 2))
    one, same, another = (weights.layers[0].attention.qkv.params["weight"] for weights in (first, again, other))
    assert torch.equal(one, same)
    assert not torch.equal(one, another)
    assert not torch.equal(one, first.layers[1].attention.qkv.params["weight"])


def test_dummy_models_have_digests_of_their_own(whole: Path) -> None:
    dummy = load_model(str(whole), "dummy", torch.float32)
    assert dummy.digest == load_model(str(whole), "dummy", torch.float32).digest
    assert dummy.digest != digest_of(whole)


def test_weights_are_counted_before_they_are_loaded() -> None:
    config = parse_config(PRESETS["llama-3.1-8b"], "preset")
    assert weight_bytes(config, torch.bfloat16) == pytest.approx(16.06e9, rel=0.001)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3", "phi3", "granite", "olmo2"])
def test_the_count_is_that_of_the_loaded_weights_with_biases_and_norms(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    weights = load_model(str(tmp_path), "auto", torch.float32).weights
    assert weight_bytes(load_config(tmp_path), torch.float32) == weights.num_bytes
