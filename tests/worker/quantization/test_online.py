"""Weights rounded at load are those that Transformers gets by the format's definition; other names are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.packed.models import FORMATS, dense, write
from support.engine.packed.weights import scaled
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import MODELS, generate_greedily, prompts
from torch import Tensor
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.weights.build import is_redundant, weight_bytes
from baton.worker.weights.loading import ModelOptions, load_model, read_config
from baton.worker.weights.stream.streaming import Streamed, TensorStream
from baton.worker.weights.tensor_update import TensorUpdate

COUNT = 10
PROMPTS = prompts(2, 20)
ONLINE = ModelOptions(quantization="fp8")
ROW = (1, 10_000)
# Weights as Transformers has them: [out, in], or [in, out].
ROWS = re.compile(r".*(_proj|fc\d?|query_key_value|dense\w*|attention\.dense)\.weight|.*experts\.(gate_up|down)_proj")
COLUMNS = re.compile(r"transformer\.h\..*(c_attn|c_proj|c_fc)\.weight")
GPT_OSS_EXPERTS = re.compile(r".*experts\.(gate_up|down)_proj")


def rounded(weight: Tensor) -> Tensor:
    """Rounds the rows of a matrix, or of a stack of them."""
    if weight.dim() == 3:
        return torch.stack([rounded(one) for one in weight])
    return scaled(weight, ROW, torch.float8_e4m3fn, 448)[2]


def round_linears(model: PreTrainedModel, columns: re.Pattern[str]) -> int:
    """Rounds a model's linears. Returns how many."""
    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if columns.fullmatch(name):
                parameter.copy_(rounded(parameter.transpose(-1, -2).contiguous()).transpose(-1, -2))
            elif ROWS.fullmatch(name):
                parameter.copy_(rounded(parameter))
            else:
                continue
            count += 1
    return count


@pytest.mark.parametrize(
    ("name", "count"), [("qwen2", 21), ("mixtral", 18), ("gpt_oss", 18), ("gpt2", 12), ("gpt_neox", 12)]
)
def test_a_model_has_the_tokens_of_its_rounded_weights(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.worker.weights.makers._MOST_STAGED_BYTES", 100_000)  # more than one round of reads
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path)
    assert round_linears(model, GPT_OSS_EXPERTS if name == "gpt_oss" else COLUMNS) == count
    made = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=1, num_blocks=64, quantization="fp8"))
    harness = StepHarness(made)
    running = [harness.admit(prompt) for prompt in PROMPTS]
    harness.run(COUNT, chunk=9)
    assert [one.output[:COUNT] for one in running] == [generate_greedily(model, each, COUNT) for each in PROMPTS]
    assert made.facts.weight_bytes == weight_bytes(read_config(str(tmp_path), "auto", ONLINE), torch.float32)
    assert "rounded at load" in made.facts.weight_format


def test_rounding_holds_a_bounded_part_of_the_unquantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    read: list[int] = []  # bytes that each round of reads fills
    run = TensorStream.run

    def counted(stream: TensorStream, *arguments: Any) -> Streamed:
        read.append(sum(fill.into.nbytes for fill in stream._fills))
        return run(stream, *arguments)

    monkeypatch.setattr(TensorStream, "run", counted)
    monkeypatch.setattr("baton.worker.weights.makers._MOST_STAGED_BYTES", 60_000)
    load_model(str(tmp_path), "auto", torch.bfloat16, options=ONLINE)
    assert len(read) > 3
    assert max(read[1:]) < 120_000  # the first one reads embeddings too


def test_digests_tell_whether_weights_were_rounded(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    plain, online = (load_model(str(tmp_path), "auto", torch.float32, options=one) for one in (ModelOptions(), ONLINE))
    assert plain.digest != online.digest


def test_tensors_of_an_update_are_rounded_too(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "auto", torch.float32, options=ONLINE)
    update = TensorUpdate(loaded.config, lambda name: is_redundant(name, loaded.config))
    update.add(load_file(tmp_path / "model.safetensors"))
    found = update.build(torch.float32, torch.device("cpu")).layers[1].mlp.gate_up.params
    expected = loaded.weights.layers[1].mlp.gate_up.params
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        load_model(str(tmp_path), "auto", torch.float32, options=ONLINE)


@pytest.mark.parametrize(
    ("stored", "asked", "wrong"),
    [
        (None, "awq", r"quantization=awq: .* has unquantized weights, of which fp8 is made at load"),
        ("gptq", "fp8", r"quantization=fp8: .* has weights in the format gptq; give that, or auto"),
    ],
)
def test_a_format_that_the_checkpoint_does_not_have_is_refused(
    stored: str | None, asked: str, wrong: str, tmp_path: Path
) -> None:
    if stored is None:
        dense().save_pretrained(tmp_path)
    else:
        write(tmp_path, dense(), FORMATS[stored])
    with pytest.raises(InvalidRequest, match=wrong):
        read_config(str(tmp_path), "auto", ModelOptions(quantization=asked))


def test_a_checkpoints_own_format_may_be_named(tmp_path: Path) -> None:
    write(tmp_path, dense(), FORMATS["gptq"])
    named, auto = (read_config(str(tmp_path), "auto", ModelOptions(quantization=one)) for one in ("gptq", "auto"))
    assert named == auto


def test_models_of_transformers_are_not_rounded(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    options = ModelOptions(implementation="transformers", quantization="fp8")
    with pytest.raises(InvalidRequest, match="quantization=fp8: Transformers computes LlamaForCausalLM"):
        read_config(str(tmp_path), "auto", options)
