"""The offline engine on a GPU: the CPU's greedy tokens, a trainer's tensors on the device, handles, sleep."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoModelForCausalLM

from baton.llm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

MODEL = "models/storyteller-7m"
PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went", "One day a cat saw"]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 1024, "max_model_len": 512, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, executor="cuda", **ARGUMENTS) as one:
        yield one


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def trained(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.std())
    return {name: parameter.detach().to(device) for name, parameter in model.named_parameters()}


def update(llm: LLM, given: Any) -> None:
    llm.start_weight_update()
    llm.update_weights(given)
    llm.finish_weight_update()


def test_outputs_are_those_of_the_cpu(llm):
    with LLM(MODEL, executor="cpu", threads=1, **ARGUMENTS) as other:
        ours, theirs = tokens(llm), tokens(other)
    # In half precision, near ties may fall differently: most beginnings are equal.
    assert sum(one[:8] == other[:8] for one, other in zip(ours, theirs, strict=True)) >= 3


def test_tensors_of_the_device_and_of_the_host_give_the_same_weights(llm):
    before = tokens(llm)
    update(llm, trained("cuda"))
    after = tokens(llm)
    assert after != before
    llm.reload_weights(MODEL)
    assert tokens(llm) == before
    update(llm, trained("cpu"))
    assert tokens(llm) == after
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm) == after
    llm.reload_weights(MODEL)
    assert tokens(llm) == before


def test_weights_come_through_handles_of_another_process(llm):
    update(llm, trained("cuda"))
    expected = tokens(llm)
    llm.reload_weights(MODEL)
    context = torch.multiprocessing.get_context("spawn")
    handles, done = context.Queue(), context.Event()
    trainer = context.Process(target=train, args=(handles, done))
    trainer.start()
    try:
        update(llm, {"update_info": handles.get(timeout=100)})
        assert tokens(llm) == expected
    except queue.Empty:
        pytest.fail(f"the trainer sent nothing; exit code {trainer.exitcode}")
    finally:
        done.set()
        trainer.join(20)
        llm.reload_weights(MODEL)


def train(handles: Any, done: Any) -> None:
    """Runs a trainer's process: sends handles, and keeps the tensors until they were read."""
    tensors = trained("cuda")
    torch.cuda.synchronize()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handles.put(
        {
            "names": list(tensors),
            "dtype_names": ["bfloat16"] * len(tensors),
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "ipc_handles": [{uuid: reduce_tensor(tensor)} for tensor in tensors.values()],
        }
    )
    done.wait(100)


def test_thousands_of_prompts_keep_the_batch_full(llm):
    before = llm.get_stats().counters
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = list(llm.generate_iter((f"There were {number} dogs" for number in range(2000)), params))
    after = llm.get_stats().counters
    assert len(outputs) == 2000
    # 2,000 outputs of 16 tokens in a batch of 16 are at least 2,000 steps.
    assert after.num_steps - before.num_steps < 2000 * 1.15
