"""The catalog says what the registries hold and what the executors accept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_models import MODELS

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cuda.startup.support import check_supported
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config
from baton.worker.models.supported import catalog
from baton.worker.models.supported.capacity import Capacity, kv_bytes_per_token, weight_bytes
from baton.worker.models.supported.cuda_limits import misfit
from baton.worker.models.supported.families import FAMILIES, family_of, nearest
from baton.worker.quantization.formats.table import FORMATS
from baton.worker.quantization.registry import METHODS
from baton.worker.weights import build

STORYTELLER = Path(__file__).parents[3] / "models" / "storyteller-7m"
LLAMA = parse_config(PRESETS["llama-3.1-8b"], "preset")


def _tiny(name: str) -> ModelConfig:
    with torch.device("meta"):
        model = MODELS[name]()
    return parse_config({**model.config.to_dict(), "architectures": [type(model).__name__]}, name)


def test_families_are_loaded_as_they_are_read_and_the_catalog_without_pytorch() -> None:
    code = """
import sys
from pathlib import Path
from baton.worker.models.supported import catalog
from baton.worker.models.supported.families import family_of, read_by, read_folder

def loaded():
    return [name.rpartition(".")[2] for name in sys.modules if name.startswith("baton.worker.models.families.")]

before = loaded()
fields = read_folder(Path(sys.argv[1]))
read_by(family_of(fields), fields)
print(before, [name for name in loaded() if name not in before], len(catalog.families()), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(STORYTELLER)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"[] ['qwen', 'qwen2'] {len(FAMILIES)} False\n"  # a folder and its module


def test_each_family_is_that_of_its_line() -> None:
    assert {name: family.architecture for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    with pytest.raises(KeyError, match="LlamaForCasualLM"):
        FAMILIES["LlamaForCasualLM"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
        ({"architectures": ["PhiMoEForCausalLM"]}, "PhimoeForCausalLM"),
        ({"architectures": ["BloomForCausalLM"]}, None),
        ({"model_type": "bloom"}, None),
        ({}, None),
    ],
)
def test_a_family_is_found_by_its_model_type_and_its_former_name(raw: dict[str, Any], expected: str | None) -> None:
    family = family_of(Fields(raw, "config.json"))
    assert (family and family.architecture) == expected


def test_every_family_is_listed_with_a_summary_of_its_own() -> None:
    listed = catalog.families()
    assert [family.architecture for family in listed] == list(FAMILIES)
    assert all(len(family.summary) > 10 for family in listed)
    assert len({family.summary for family in listed}) == len(listed)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("mistral3")])
def test_every_family_is_accepted_but_for_its_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = _tiny(name)
    try:
        check_supported(WorkerConfig(executor="cuda"), config, torch.bfloat16, torch.device("cuda", 0))
        refusal = ""
    except InvalidRequest as error:
        refusal = error.message
    assert misfit(config) == refusal
    if "cuda" in FAMILIES[config.architecture].executors:
        assert not refusal or "multiples of" in refusal
    else:
        assert "use executor=cpu" in refusal


def test_formats_and_kv_dtypes_are_those_of_the_worker() -> None:
    assert {one.name for one in catalog.WEIGHT_FORMATS} == METHODS.keys() | FORMATS.keys()
    fields = {field.name: field for field in dataclasses.fields(WorkerConfig)}
    assert tuple(one.name for one in catalog.KV_DTYPES) == fields["kv_cache_dtype"].metadata["choices"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LlamaForCasualLM", "LlamaForCausalLM"),
        ("Qwen3NexttForCausalLM", "Qwen3NextForCausalLM"),
        ("Gemma3TextForCausalLM", "Gemma3ForCausalLM"),
        ("phi4", "Phi3ForCausalLM"),
        ("BloomForCausalLM", ""),
        ("", ""),
    ],
)
def test_the_nearest_architecture_differs_in_few_letters_of_its_own(name: str, expected: str) -> None:
    assert nearest(name, FAMILIES) == expected


def test_an_error_names_the_nearest_architecture() -> None:
    raw: dict[str, Any] = {**PRESETS["llama-3.1-8b"], "architectures": ["LlamaForCasualLM"]}
    with pytest.raises(InvalidRequest, match=r"\['LlamaForCasualLM'\].*; the nearest name is LlamaForCausalLM"):
        parse_config(raw, "config.json")


def test_what_fits_is_what_the_weights_leave() -> None:
    capacity = Capacity(memory_bytes=1000, weight_bytes=200, kv_bytes_per_token=4, max_model_len=80)
    assert (capacity.kv_tokens, capacity.concurrency) == (200, 2.5)
    full = Capacity(memory_bytes=1000, weight_bytes=2000, kv_bytes_per_token=4, max_model_len=80)
    assert (full.kv_tokens, full.concurrency) == (0, 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_a_tokens_kv_is_its_part_of_a_block(dtype: str) -> None:
    spec = kv_spec_of(LLAMA, bytes(16), 32, dtype)
    assert kv_bytes_per_token(LLAMA, dtype) * 32 == spec.bytes_per_block


def test_weights_are_as_large_as_those_that_are_allocated() -> None:
    config = parse_config(PRESETS["storyteller-7m"], "preset")
    from baton.services.doctor.service.weight_files import num_values_of

    counted = weight_bytes(num_values_of(STORYTELLER / "model.safetensors"), "float32")
    assert counted == pytest.approx(build.weight_bytes(config, torch.float32), rel=0.01)
