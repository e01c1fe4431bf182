"""Families and weight formats of plugins: the tokens of Transformers with the same weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.plugins.packages import install, install_example
from transformers import AutoModelForCausalLM

from baton.llm import LLM, SamplingParams
from baton.plugins.kinds import MODEL_FAMILIES
from baton.rpc.errors import InvalidRequest

from .conftest import MODEL

SIZES = {"threads": 1, "max_num_seqs": 4, "max_model_len": 96, "num_blocks": 24}
PROMPTS = ["Once upon a time", "The big dog"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    for kind in ("model_families", "weight_formats"):
        install_example(folder, kind)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def check(folder, oracle, plugins):
    with LLM(str(folder), plugins=plugins, **SIZES) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        mask = torch.ones_like(prompt)
        found = oracle.generate(prompt, do_sample=False, max_new_tokens=16, attention_mask=mask, eos_token_id=None)
        assert list(output.outputs[0].token_ids) == found[0, prompt.shape[1] :].tolist()


def test_a_model_runs_with_the_family_of_a_plugin(packages, folder):
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle.get_input_embeddings().register_forward_hook(lambda module, inputs, embedded: embedded * 1.5)
    change_config(folder, architectures=["TaleForCausalLM"], model_type="tale", embedding_scale=1.5)
    check(folder, oracle, ["tale"])
    with pytest.raises(InvalidRequest, match="TaleForCausalLM"):
        LLM(str(folder), **SIZES)
    change_config(folder, embedding_scale=-1)
    with pytest.raises(InvalidRequest, match="embedding_scale"):
        LLM(str(folder), plugins=["tale"], **SIZES)


def test_a_model_runs_with_the_weight_format_of_a_plugin(packages, folder):
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.detach().abs().amax(1) / 127
            rounded = (module.weight.detach() / scale[:, None]).round()
            tensors[f"{name}.weight"] = rounded.to(torch.int8)
            tensors[f"{name}.weight_scale"] = scale
            module.weight.data = rounded * scale[:, None]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match="has dtype I8; it must be one of F32, BF16, F16"):
        LLM(str(folder), **SIZES)
    change_config(folder, quantization_config={"quant_method": "row-int8", "ignore": ["lm_head"]})
    check(folder, oracle, ["row-int8"])
    with pytest.raises(InvalidRequest, match="quantization_config"):
        LLM(str(folder), **SIZES)
    change_config(folder, quantization_config={"quant_method": "row-int8", "group_size": 128})
    with pytest.raises(InvalidRequest, match="the weight format row-int8 reads: group_size is unknown"):
        LLM(str(folder), plugins=["row-int8"], **SIZES)


def test_a_family_cannot_replace_one_of_ours(packages):
    source = "from baton.worker.models.reading import Family\nFAMILY = Family('LlamaForCausalLM', 'mine', print)\n"
    install(packages, "my-llama", source, {MODEL_FAMILIES.group: {"my-llama": "FAMILY"}})
    with pytest.raises(InvalidRequest, match="there is a family of the architecture LlamaForCausalLM already"):
        LLM(str(MODEL), plugins=["my-llama"], **SIZES)
