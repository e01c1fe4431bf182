"""Weights that a trainer in another process sends over NCCL to an engine on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llm_trainer import changed_weights
from support.processes.ports import free_ports

from baton.llm import LLM, SamplingParams
from baton.rpc.errors import ServiceError

pytestmark = pytest.mark.gpu

MODEL = "models/storyteller-7m"
PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went", "One day a cat saw"]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 1024, "max_model_len": 512, "max_num_seqs": 16}
PROGRAM = Path(__file__).parents[2] / "support" / "llm_trainer.py"


@pytest.fixture
def llm():
    with LLM(MODEL, executor="cuda", **ARGUMENTS) as one:
        yield one


@pytest.fixture
def train():
    """Starts a trainer on the last GPU. Returns its process and the init_info of the engine."""
    started = []

    def start(what: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        (port,) = free_ports(1)
        device = f"cuda:{torch.cuda.device_count() - 1}"
        started.append(subprocess.Popen([sys.executable, str(PROGRAM), str(port), "2", device, what]))
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "timeout": 60}
        return started[-1], {"init_info": place}

    yield start
    for process in started:
        process.kill()
        process.wait()


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def update(llm: LLM, *parts: Any) -> None:
    llm.start_weight_update()
    for part in parts:
        llm.update_weights(part)
    llm.finish_weight_update()


# NCCL refuses two ranks on one GPU; gloo takes the way over the host.
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sent_weights_are_those_that_are_given(llm, train, backend):
    before = tokens(llm)
    update(llm, changed_weights(torch.bfloat16))
    expected = tokens(llm)
    llm.reload_weights(MODEL)
    process, place = train("sends")
    place["init_info"]["backend"] = backend
    llm.init_weight_transfer_engine(place)
    update(llm, {}, {})
    assert tokens(llm) == expected != before
    assert process.wait(60) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_old_weights_stay_when_the_trainer_dies(llm, train, backend):
    before = tokens(llm)
    process, place = train("dies")
    place["init_info"]["backend"] = backend
    llm.init_weight_transfer_engine(place)
    llm.start_weight_update()
    with pytest.raises(ServiceError, match="waited for the trainer at"):
        llm.update_weights()
    assert process.wait(60) == 9
    assert tokens(llm) == before
