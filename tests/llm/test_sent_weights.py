"""Weights that a trainer in another process sends over gloo: the tokens of Transformers with them, and what fails."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.llm_trainer import changed_weights
from support.processes.ports import free_ports
from transformers import AutoModelForCausalLM

from baton.llm import LLM, AsyncLLM, InvalidParameter, SamplingParams, WeightSender
from baton.rpc.errors import DeadlineExceeded, InvalidRequest, Mismatch, Unavailable

MODEL = "models/storyteller-7m"
ARGUMENTS = {"threads": 1, "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPT = "Once upon a time there was a big dog and a little cat who played in the garden."
PROGRAM = Path(__file__).parents[1] / "support" / "llm_trainer.py"


@pytest.fixture
def train():
    """Starts a trainer. Returns its process and the init_info of the engine of rank 1."""
    started = []

    def start(what="sends", world_size=2):
        (port,) = free_ports(1)
        words = [sys.executable, str(PROGRAM), str(port), str(world_size), "cpu", what]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
        return started[-1], {"init_info": {**place, "timeout": 30}}

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **ARGUMENTS) as one:
        yield one


@pytest.fixture(scope="module")
def expected(llm):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict(changed_weights(), strict=False)
    prompt = torch.tensor([llm.get_tokenizer().encode(PROMPT)])
    found = model.generate(prompt, do_sample=False, max_new_tokens=16, attention_mask=torch.ones_like(prompt))
    return found[0, prompt.shape[1] :].tolist()


def tokens(llm):
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_sent_weights_give_the_tokens_of_transformers_and_a_new_epoch(llm, train, expected):
    process, place = train()
    before, state = tokens(llm), llm.get_stats().state
    llm.init_weight_transfer_engine(place)
    llm.start_weight_update()
    for _ in range(2):
        llm.update_weights()
        assert tokens(llm) == before
    llm.finish_weight_update()
    assert tokens(llm) == expected != before
    after = llm.get_stats().state
    assert after.epoch > state.epoch
    assert after.model.digest != state.model.digest
    assert process.wait(30) == 0
    llm.reload_weights(MODEL)


def test_a_trainer_that_dies_during_an_update_is_named_and_the_old_weights_stay(llm, train, expected):
    process, place = train("dies")
    before = tokens(llm)
    llm.init_weight_transfer_engine(place)
    llm.start_weight_update()
    with pytest.raises(Unavailable, match=r"waited for the trainer at 127\.0\.0\.1:\d+ to send"):
        llm.update_weights()
    assert process.wait(30) == 9
    with pytest.raises(Unavailable, match=r"was lost before: .*; call init_weight_transfer_engine again"):
        llm.update_weights()
    assert tokens(llm) == before
    with pytest.raises(Mismatch, match="the update lacks"):
        llm.finish_weight_update()
    assert tokens(llm) == before
    _, place = train()
    llm.init_weight_transfer_engine(place)
    llm.start_weight_update()
    llm.update_weights()
    llm.update_weights()
    llm.finish_weight_update()
    assert tokens(llm) == expected
    llm.reload_weights(MODEL)


async def test_what_does_not_fit_is_refused_by_name_and_the_update_goes_on(train, expected):
    process, place = train("wrong")
    async with AsyncLLM(MODEL, **ARGUMENTS) as llm:
        await llm.init_weight_transfer_engine(place)
        await llm.start_weight_update()
        with pytest.raises(InvalidRequest, match=r"no tensor model\.norms\.weight; did you mean model\.norm\.weight"):
            await llm.update_weights()
        with pytest.raises(InvalidRequest, match=r"has the shape \[3\]; it must be \[256\]"):
            await llm.update_weights({"update_info": {}})
        described = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[256]]}
        problem = "tensor 0 is model.norm.weight of float32 [256], and update_info has model.norm.weight of bfloat16"
        with pytest.raises(InvalidParameter) as caught:
            await llm.update_weights({"update_info": described})
        assert problem in caught.value.message
        await llm.update_weights()
        await llm.update_weights()
        await llm.finish_weight_update()
        last = [output async for output in llm.generate(PROMPT, GREEDY)][-1]
        assert list(last.outputs[0].token_ids) == expected
    told, _ = process.communicate(timeout=30)
    assert f"the engine of rank 1 refused the tensors: {problem}" in told
    assert process.returncode == 0


PLACE = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "timeout": 0.2}
WRONG = {
    "key": ({"master_adress": "a"}, "did you mean master_address"),
    "address": ({"master_address": 7}, "master_address is 7; give the trainer's host"),
    "port": ({"master_port": 0}, "master_port is 0; give a number from 1 to 65535"),
    "type": ({"world_size": "2"}, "world_size is '2'"),
    "rank": ({"rank_offset": 2}, "rank_offset is 2 and world_size 2; ranks are 1 to 1"),
    "timeout": ({"timeout": 0}, "timeout is 0; give seconds over 0"),
    "device": ({"backend": "nccl"}, "backend nccl needs a CUDA device; give gloo"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_place_of_a_trainer_is_refused(llm, case):
    if case == "device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    change, message = WRONG[case]
    listener = None
    if case == "device":
        (port,) = free_ports(1)
        listener = torch.distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        change = {**change, "master_port": port}
    with pytest.raises(InvalidParameter, match=message):
        llm.init_weight_transfer_engine({"init_info": {**PLACE, **change}})
    del listener


def test_an_absent_trainer_and_an_absent_engine_are_named(llm):
    with pytest.raises((DeadlineExceeded, Unavailable), match=r"waited for the trainer at 127\.0\.0\.1:1 to listen"):
        llm.init_weight_transfer_engine({"init_info": PLACE})
    (port,) = free_ports(1)
    with pytest.raises(DeadlineExceeded, match=r"waited for the engine of rank 1 to join: nothing in 0\.2 s"):
        WeightSender("127.0.0.1", port, 2, timeout=0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Unavailable, match="tried to listen on"):
            WeightSender("127.0.0.1", taken.getsockname()[1], 2, timeout=0.2)
    with pytest.raises(InvalidParameter, match="world_size is 1"):
        WeightSender("127.0.0.1", port, 1)
