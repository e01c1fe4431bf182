"""`baton models`: the list, and what it says of folders, presets and hub ids."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import types
from pathlib import Path

import pytest

from baton.services import cli
from baton.services.machine import gpus
from baton.services.tools import model_fit
from baton.worker.models.supported.families import FAMILIES

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
GPU_LINE = "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 81000, 9.0, 0, Not Active, 35"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(model_fit, "observe_gpus", lambda *_, **__: gpus.GpuFacts())


@pytest.fixture
def ask(capsys):
    def run(*words):
        code = cli.main(["models", *map(str, words)], {})
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(SAMPLE / name, copy / name)
    return copy


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_list_has_every_family_for_people_and_for_programs(ask):
    code, text, _ = ask()
    assert code == 0
    assert all(f"  {architecture} " in text for architecture in FAMILIES)
    assert "fp8_e4m3" in text
    assert "--model-impl transformers" in text, "architectures without a family run too"
    listed = json.loads(ask("--json")[1])
    assert [family["architecture"] for family in listed["families"]] == list(FAMILIES)
    assert {"other_architectures", "weight_formats", "kv_dtypes", "limits", "presets"} <= set(listed)


def test_a_folder_is_said_to_run_with_what_fits(ask, folder):
    code, text, _ = ask(folder, "--memory-gib", 4)
    assert code == 0
    assert "under --executor cpu" in text
    assert "Qwen2ForCausalLM" in text
    assert "8,192 bytes a token as float32" in text
    facts = json.loads(ask(folder, "--memory-gib", 4, "--json")[1])
    capacity = facts["capacity"]
    assert facts["runs"] is True
    assert capacity["kv_tokens"] == ((4 << 30) - capacity["weight_bytes"]) // capacity["kv_bytes_per_token"]
    assert capacity["concurrency"] == pytest.approx(capacity["kv_tokens"] / 65536, abs=0.01)


def test_a_gpu_here_is_the_default(ask, folder, monkeypatch):
    monkeypatch.setattr(model_fit, "observe_gpus", lambda *_, **__: gpus.GpuFacts(gpus.parse_gpus(GPU_LINE)))
    facts = json.loads(ask(folder, "--json")[1])
    assert (facts["executor"], facts["dtype"], facts["kv_dtype"]) == ("cuda", "bfloat16", "bfloat16")
    assert facts["capacity"]["memory_bytes"] == int(0.9 * 81559 * (1 << 20))
    narrow = json.loads(ask(folder, "--json", "--kv-cache-dtype", "fp8_e4m3")[1])
    assert narrow["capacity"]["kv_bytes_per_token"] * 2 == facts["capacity"]["kv_bytes_per_token"]


def test_a_shape_that_no_gpu_computes_runs_on_a_cpu_alone(ask, folder):
    change(folder, head_dim=12)
    code, text, _ = ask(folder, "--executor", "cuda", "--memory-gib", 80)
    assert code == 1
    assert "not under --executor cuda: the model's head_dim is 12" in text
    assert ask(folder, "--executor", "cpu")[0] == 0


def test_a_folder_that_is_not_whole_does_not_run(ask, folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    code, text, _ = ask(folder)
    assert code == 1
    assert "model.safetensors (7 bytes are missing)" in text
    weights.write_bytes(struct.pack("<Q", 5) + b"{nope")
    assert "no safetensors file" in ask(folder)[1]
    weights.unlink()
    assert "has no *.safetensors" in ask(folder)[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "the nearest name is LlamaForCausalLM"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a positive integer"),
    ],
)
def test_a_model_that_no_executor_runs_is_refused_by_its_reason(ask, folder, fields, said):
    change(folder, **fields)
    code, _, error = ask(folder)
    assert code == 1
    assert said in error
    facts = json.loads(ask(folder, "--json")[1])
    assert facts["runs"] is False
    assert said in facts["refusal"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-model-len", 99_999_999), "--max-model-len: 99999999 is not allowed; give 0 to 65536"),
        (("--executor", "cuda"), "give its memory by --memory-gib"),
    ],
)
def test_a_wrong_flag_is_named(ask, folder, words, said):
    code, _, error = ask(folder, *words)
    assert code == 1
    assert said in error


def test_memory_must_be_a_number_above_0(ask, folder):
    with pytest.raises(SystemExit):
        ask(folder, "--memory-gib", "-1")


def test_a_preset_has_no_weights_here(ask):
    code, text, _ = ask("llama-3.1-8b", "--executor", "cuda", "--memory-gib", 80)
    assert code == 0
    assert "of unknown size" in text
    assert "less weights and the memory of steps" in text


def test_of_a_hub_id_only_the_json_files_are_read(ask, folder, monkeypatch):
    asked = []
    hub = types.ModuleType("huggingface_hub")
    names = ("RevisionNotFoundError", "RepositoryNotFoundError", "GatedRepoError", "RemoteEntryNotFoundError")
    hub.errors = types.SimpleNamespace(**dict.fromkeys(names, KeyError))
    hub.snapshot_download = lambda hub_id, revision, allow_patterns: (
        asked.append((hub_id, revision, allow_patterns)) or str(folder)
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1 << 30}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = json.loads(ask("org/name", "--executor", "cuda", "--memory-gib", 8, "--json")[1])
    assert asked == [("org/name", None, ["*.json"])]
    assert facts["runs"] is True
    assert facts["capacity"]["weight_bytes"] == 1 << 30


def test_a_model_of_transformers_is_described_by_another_process(ask, tmp_path):
    llama = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"vocab_size": 160, "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**llama, **more, "model_type": "llama"}))
    code, text, _ = ask(tmp_path, "--executor", "cpu", "--model-impl", "transformers", "--memory-gib", 1, "--json")
    facts = json.loads(text)
    assert code == 1  # it has no weights
    assert facts["implementation"].startswith("Transformers 5")
    assert facts["capacity"]["kv_bytes_per_token"] == 3 * 2 * 64 * 4
