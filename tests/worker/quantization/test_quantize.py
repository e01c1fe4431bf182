"""Checkpoints that are rounded hold what their format means, within its bound, and are served as that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.packed import models as packed_models
from support.engine.packed.models import change_config
from support.engine.packed.unpacked import UNPACK
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import MODELS, generate_greedily, prompts
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.weights.quantizing.quantize import Quantized, quantize
from baton.worker.weights.quantizing.scheme import scheme_of
from baton.worker.weights.quantizing.table import SCHEMES

COUNT = 8
LEFT_OUT = ("layers.0.self_attn.k_proj", "re:.*layers.1.*down_proj")


def written(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def rounded(folder: Path, name: str, ignore: tuple[str, ...] = ()) -> tuple[Path, Quantized]:
    out = folder.parent / "out"
    scheme = scheme_of(name, 32 if SCHEMES[name].group_size else None)
    return out, quantize(folder, out, scheme, ignore, shard_bytes=40_000)


def read_back(folder: Path, out: Path, name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors that the packed ones mean, each within its bound of the one that it was."""
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = {one: load_file(out / one) for one in sorted(set(index.values()))}
    assert len(files) > 1
    tensors = {tensor: files[file][tensor] for tensor, file in index.items()}
    meant: dict[str, torch.Tensor] = {}
    for original, values in load_file(folder / "model.safetensors").items():
        stem = original.removesuffix(".weight")
        own = {key.removeprefix(stem): one for key, one in tensors.items() if key.startswith(f"{stem}.")}
        if own.keys() <= {".weight", ".bias"} or values.dim() == 1:
            assert torch.equal(tensors[original], values)
            meant[original] = values
            continue
        found = UNPACK[name](own)
        far = abs(found.weight - values.float().numpy()) - found.bound
        assert far.max() <= 1e-7, (original, far.max())
        meant[original] = torch.from_numpy(found.weight).float()
    return meant


def check_served(folder: Path, out: Path, meant: dict[str, torch.Tensor]) -> None:
    """Compares the tokens with those of Transformers with the weights that the packed ones mean."""
    save_file(meant, folder / "model.safetensors", {"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = WorkerConfig(model=str(out), threads=1, block_size=8, num_blocks=64, max_num_requests=4)
    harness = StepHarness(CpuExecutor(config))
    running = [harness.admit(prompt) for prompt in prompts(2, 20)]
    harness.run(COUNT, chunk=9)
    assert [one.output[:COUNT] for one in running] == [
        generate_greedily(oracle, prompt, COUNT) for prompt in prompts(2, 20)
    ]


@pytest.mark.parametrize("name", UNPACK)
def test_a_rounded_model_is_within_its_bound_and_served_as_what_it_means(name: str, tmp_path: Path) -> None:
    folder = written(packed_models.dense(), tmp_path / "model")
    out, result = rounded(folder, name, LEFT_OUT)
    meant = read_back(folder, out, name)
    originals = load_file(folder / "model.safetensors")
    changed = {key.removesuffix(".weight") for key in meant if not torch.equal(meant[key], originals[key])}
    assert len(changed) == result.num_packed == 3 * 7 - 2
    assert result.left_out == ["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    linears = [key for key in meant if key.removesuffix(".weight") in changed]
    errors = [float((meant[key] - originals[key]).square().sum()) for key in linears]
    squares = [float(originals[key].square().sum()) for key in linears]
    assert result.error == pytest.approx((sum(errors) / sum(squares)) ** 0.5, rel=1e-3)
    check_served(folder, out, meant)


@pytest.mark.parametrize("name", ["w4a16", "nvfp4", "gptq"])
def test_experts_are_rounded_and_routers_are_not(name: str, tmp_path: Path) -> None:
    folder = written(packed_models.with_experts(), tmp_path / "model")
    out, result = rounded(folder, name)
    meant = read_back(folder, out, name)
    assert result.num_packed == 3 * (4 + 3 * 4)
    assert all("gate" in one or one == "lm_head" for one in result.left_out)
    check_served(folder, out, meant)


def test_stacks_of_experts_are_packed_as_gpt_oss_ships_them(tmp_path: Path) -> None:
    folder = written(MODELS["gpt_oss"](), tmp_path / "model")
    out, result = rounded(folder, "mxfp4-experts")
    originals = load_file(folder / "model.safetensors")
    tensors = {key: one for file in out.glob("*.safetensors") for key, one in load_file(file).items()}
    meant = dict(originals)
    stacks = [key for key in originals if key.endswith(("gate_up_proj", "down_proj"))]
    for key in stacks:
        blocks, scales = tensors.pop(f"{key}_blocks"), tensors.pop(f"{key}_scales")
        meant[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        step = torch.exp2(scales.float() - 127).repeat_interleave(32, 2).transpose(1, 2)
        far = (meant[key] - originals[key]).abs() / step
        assert far.max() <= 2
        assert far[meant[key].abs() < 6 * step].max() <= 1
    assert all(torch.equal(one, originals[key]) for key, one in tensors.items())
    assert tensors.keys() == originals.keys() - set(stacks)
    assert result.num_packed == sum(len(originals[key]) for key in stacks)
    assert {"lm_head", "model.layers.0.mlp.router", "model.layers.0.self_attn.q_proj"} <= set(result.left_out)
    check_served(folder, out, meant)


def test_parts_that_are_multiplied_together_share_the_scale_of_nvfp4(tmp_path: Path) -> None:
    out, _ = rounded(written(packed_models.dense(), tmp_path / "model"), "nvfp4")
    tensors = {key: one for file in out.glob("*.safetensors") for key, one in load_file(file).items()}
    scales = {key: float(one) for key, one in tensors.items() if key.endswith("global_scale")}
    for layer in (f"model.layers.{index}." for index in range(3)):
        for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({scales[f"{layer}{part}.weight_global_scale"] for part in parts}) == 1
    assert len(set(scales.values())) > 4


def test_config_json_is_as_llm_compressor_writes_it(tmp_path: Path) -> None:
    folder = written(packed_models.dense(), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.bin").write_text("weights")
    out, _ = rounded(folder, "w4a16")
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    settings = after.pop("quantization_config")
    assert after == before
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "pack-quantized"
    assert settings["ignore"] == ["lm_head"]
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    assert settings["config_groups"] == {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights,
        }
    }  # fmt: skip
    assert sorted(one.name for one in out.iterdir() if not one.name.startswith("model")) == [
        "config.json", "generation_config.json", "tokenizer.json",
    ]  # fmt: skip
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("name", "group", "ignore", "message"),
    [
        ("w4", None, (), r"format=w4: it must be one of fp8, fp8-block"),
        ("mxfp4", 64, (), r"group_size=64: mxfp4 has no choice of it .*give one of the formats w8a16, w4a16"),
        ("awq", 0, (), r"group_size=0: it must be a positive integer"),
        ("gptq", None, (), r"gate_proj, .*up_proj: 64 input features are no multiple of the group size 128"),
        ("fp8", None, ("layers.7.mlp",), r"ignore=layers\.7\.mlp: it names no linear of the model; its 22 linears"),
        ("fp8", None, ("re:(",), r"ignore=re:\(: '\(' is no regular expression"),
        ("mxfp4-experts", None, (), r"Qwen2ForCausalLM has no experts that are stacked and transposed"),
        ("fp8", None, ("re:.*",), r"ignore names all linears of the model"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(
    name: str, group: int | None, ignore: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folder = written(packed_models.dense(), tmp_path / "model")
    with pytest.raises(InvalidRequest, match=message):
        quantize(folder, tmp_path / "out", scheme_of(name, group), ignore)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_other_sources_are_refused(tmp_path: Path) -> None:
    folder = written(packed_models.dense(), tmp_path / "model")
    fp8 = scheme_of("fp8")
    with pytest.raises(InvalidRequest, match=r"model exists already; give the name of a new folder"):
        quantize(folder, folder, fp8)
    out, _ = rounded(folder, "fp8")
    with pytest.raises(InvalidRequest, match="is quantized already: its quant_method is compressed-tensors"):
        quantize(out, tmp_path / "again", fp8)
    change_config(folder, hidden_size=32)
    with pytest.raises(InvalidRequest, match=r"has shape \[\d+, 64\]; by config.json it must be"):
        quantize(folder, tmp_path / "again", fp8)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match="is a GGUF file, whose weights are packed already"):
        quantize(tmp_path / "x.gguf", tmp_path / "again", fp8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gpt2",
            r"model: GPT2LMHeadModel stores linears in another order .*; it has no quantized form",
        ),
        ("granitemoe", r"its experts are stacked in one tensor.* leave them out with --ignore 're:\.\*"),
    ],
)
def test_checkpoints_that_no_format_describes_are_refused(name: str, message: str, tmp_path: Path) -> None:
    folder = written(MODELS[name](), tmp_path / "model")
    with pytest.raises(InvalidRequest, match=message):
        quantize(folder, tmp_path / "out", scheme_of("int8"))
    assert not (tmp_path / "out").exists()


def test_stacked_experts_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    folder = written(MODELS["granitemoe"](), tmp_path / "model")
    out, _ = rounded(folder, "int8", ("re:.*block_sparse_moe.*",))
    check_served(folder, out, read_back(folder, out, "int8"))


def test_a_damaged_weight_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    folder = written(packed_models.dense(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values that are not finite"):
        quantize(folder, tmp_path / "out", scheme_of("w4a16", 32))
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_groups_of_zeros_and_of_tiny_values_keep_their_zeros(tmp_path: Path) -> None:
    folder = written(packed_models.without_biases(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.0.self_attn.o_proj.weight"]
    weight[:, :32] = 0
    weight[0], weight[1, 32:] = 0, 1e-9
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in UNPACK:
        scheme = scheme_of(name, 32 if SCHEMES[name].group_size else None)
        found = scheme.pack(weight.float(), torch.float32, float(weight.abs().max())).weight
        assert torch.isfinite(found).all(), name
        assert (found[:, :32] == 0).all(), name
        assert (found[0] == 0).all(), name
        assert float(found[1].abs().max()) <= 1e-6, name
