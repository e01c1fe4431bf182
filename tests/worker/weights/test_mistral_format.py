"""Checkpoints in Mistral's own format run as the models of Transformers that they are written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.random_vectors import with_random_vectors
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import VOCAB_SIZE, generate_greedily, prompts
from support.engine.tiny_shape import SHAPE
from torch import Tensor
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.weights.loading import load_model, read_config

COUNT = 16
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.gate": "feed_forward.gate",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=24, sliding_window=None)),
    "tied": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=11, tie_word_embeddings=True)),
    "ministral3": lambda: Ministral3ForCausalLM(Ministral3Config(**SHAPE, head_dim=24, rope_parameters=YARN)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(name: str) -> PreTrainedModel:
    return with_random_vectors(MODELS[name], seed=11)


def write(folder: Path, model: PreTrainedModel, without: str = "", **more: Any) -> Path:
    """Writes the folder; `without` and `more`: a key of params.json to leave out, and values to set."""
    folder.mkdir()
    config = model.config
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
    }
    if getattr(config, "sliding_window", None):
        params["sliding_window"] = config.sliding_window
    if config.model_type == "ministral3":
        rope = config.rope_parameters
        lengths = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
        params["yarn"] = {**lengths, "factor": 4, "beta": 32, "alpha": 1, "apply_scale": False}
        params["llama_4_scaling"] = {**lengths, "beta": rope["llama_4_scaling_beta"]}
    if config.model_type == "mixtral":
        params["moe"] = {"num_experts": 4, "num_experts_per_tok": 2}
    params = {key: value for key, value in {**params, **more}.items() if key != without}
    (folder / "params.json").write_text(json.dumps(params))
    save_file(mistral_tensors(model), folder / "consolidated.safetensors")
    return folder


def mistral_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        if stem in NAMES:
            found[f"{NAMES[stem]}.{ending}"] = tensor.contiguous()
            continue
        _, _, layer, part = name.split(".", 3)
        if part.startswith("mlp.experts."):
            found |= experts_of(layer, part, tensor)
            continue
        part = part.removesuffix(f".{ending}")
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        if part in heads:
            halves = tensor.view(heads[part], 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        found[f"layers.{layer}.{NAMES[part]}.{ending}"] = tensor.contiguous()
    return found


def experts_of(layer: str, part: str, stack: Tensor) -> dict[str, Tensor]:
    """Returns the matrices of a stack, gates and ups apart."""
    found = {}
    for expert, matrix in enumerate(stack):
        names = ("w1", "w3") if part == "mlp.experts.gate_up_proj" else ("w2",)
        for name, piece in zip(names, matrix.chunk(len(names)), strict=True):
            found[f"layers.{layer}.feed_forward.experts.{expert}.{name}.weight"] = piece.contiguous()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_runs_as_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    folder = write(tmp_path / "model", model)
    config = WorkerConfig(model=str(folder), threads=1, block_size=8, num_blocks=256, max_num_requests=16)
    harness = StepHarness(CpuExecutor(config))
    asked = prompts(3, 40)
    running = [harness.admit(prompt) for prompt in asked]
    harness.run(COUNT, chunk=9)
    expected = [generate_greedily(model, prompt, COUNT) for prompt in asked]
    assert [one.output[:COUNT] for one in running] == expected


def test_a_list_of_windows_is_repeated_by_the_layers(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", random_model("mistral"), sliding_window=[None, 7, None])
    assert json.loads((made_of(folder) / "config.json").read_text())["layer_types"] == [
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]


def made_of(folder: Path) -> Path:
    from baton.model_folder.form import hugging_face_form

    return hugging_face_form(folder)


def test_sharded_checkpoints_are_read_and_towers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "model", random_model("mistral"))
    whole = load_model(str(folder), "auto", torch.float32)
    tensors = load_file(folder / "consolidated.safetensors") | {"vision_encoder.norm.weight": torch.ones(4)}
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"consolidated-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "consolidated.safetensors").unlink()
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_model(str(folder), "auto", torch.float32)
    assert sharded.digest == whole.digest
    assert torch.equal(sharded.weights.embed, whole.weights.embed)
    assert "not used" not in caplog.text


def test_a_folder_with_both_forms_is_read_in_hugging_faces(tmp_path: Path) -> None:
    model = random_model("mistral")
    folder = write(tmp_path / "model", model, vocab_size=7)
    model.save_pretrained(folder)
    assert read_config(str(folder), "auto").vocab_size == VOCAB_SIZE
    assert load_model(str(folder), "auto", torch.float32).weights.embed.shape[0] == VOCAB_SIZE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"without": "n_layers"}, "params.json: n_layers is missing; it must be a positive integer"),
        ({"n_heads": 0}, "params.json: n_heads is 0; it must be a positive integer"),
        ({"norm_eps": "x"}, "params.json: norm_eps is 'x'; it must be a number above 0"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is set; models with multi-head latent attention cannot be loaded"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is set; models with quantized weights cannot"),
        ({"yarn": {"factor": 4}}, "yarn: original_max_position_embeddings is missing"),
        ({"moe": {"num_experts": 4}}, "moe: num_experts_per_tok is missing"),
        ({"sliding_window": [None, 7]}, "sliding_window is [None, 7]; it must be a list with one size"),
        ({"hidden_dim": 95}, "layers.0.feed_forward.w1.weight has shape [96, 64]; by config.json it must be [95, 64]"),
        ({"n_layers": 4}, "no file holds the tensor layers.3."),
    ],
)
def test_what_is_missing_or_wrong_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", random_model("mistral"), **changed)
    with pytest.raises(ServiceError) as caught:
        load_model(str(folder), "auto", torch.float32)
    assert message in caught.value.message


def test_params_that_are_not_json_are_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"params\.json is not JSON"):
        read_config(str(tmp_path), "auto")
