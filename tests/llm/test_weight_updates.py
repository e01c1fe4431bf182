"""Weights from a trainer's tensors: the tokens of Transformers with them, a new epoch, and what does not fit."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoModelForCausalLM

from baton.llm import LLM, AsyncLLM, InvalidParameter, SamplingParams
from baton.rpc.errors import InvalidRequest, Mismatch, ServiceError

MODEL = "models/storyteller-7m"
ARGUMENTS = {"threads": 1, "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPT = "Once upon a time there was a big dog and a little cat who played in the garden."


@pytest.fixture
def trained():
    """A model whose weights a step of training has changed."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.std())
    return model


@pytest.fixture(scope="module")
def engine():
    with LLM(MODEL, **ARGUMENTS) as one:
        yield one


@pytest.fixture
def llm(engine):
    """An engine with the weights of the folder, and without a begun update."""
    yield engine
    with contextlib.suppress(Mismatch):
        engine.finish_weight_update()
    engine.reload_weights(MODEL)


def tokens(llm):
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def expected(model, llm):
    prompt = torch.tensor([llm.get_tokenizer().encode(PROMPT)])
    found = model.generate(prompt, do_sample=False, max_new_tokens=16, attention_mask=torch.ones_like(prompt))
    return found[0, prompt.shape[1] :].tolist()


def as_handles(model):
    named = list(model.named_parameters())
    return {
        "names": [name for name, _ in named],
        "dtype_names": ["float32"] * len(named),
        "shapes": [list(parameter.shape) for _, parameter in named],
        "ipc_handles": [{"cpu": reduce_tensor(parameter.detach())} for _, parameter in named],
    }


FORMS = {
    "mapping": lambda model: [dict(model.named_parameters())],
    "state": lambda model: [model.state_dict()],
    "pairs": lambda model: [model.named_parameters()],
    "parts": lambda model: [{name: one} for name, one in model.named_parameters()],
    "request": lambda model: [{"update_info": {"tensors": dict(model.named_parameters())}}],
    "handles": lambda model: [{"update_info": as_handles(model)}],
    "double": lambda model: [{name: one.to(torch.float64) for name, one in model.named_parameters()}],
}


@pytest.mark.parametrize("form", FORMS)
def test_updated_weights_give_the_tokens_of_transformers(llm, trained, form):
    before, state = tokens(llm), llm.get_stats().state
    llm.init_weight_transfer_engine({"init_info": {"backend": "ipc"}})
    llm.start_weight_update()
    for part in FORMS[form](trained):
        llm.update_weights(part)
    assert tokens(llm) == before
    llm.finish_weight_update()
    assert tokens(llm) == expected(trained, llm) != before
    after = llm.get_stats().state
    assert after.epoch > state.epoch
    assert after.model.digest != state.model.digest
    assert tokens(llm) == expected(trained, llm)


def test_no_cached_block_of_the_old_weights_is_used(llm, trained):
    tokens(llm)
    llm.start_weight_update()
    llm.update_weights(trained.state_dict())
    llm.finish_weight_update()
    first, second = (llm.generate(PROMPT, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0


def test_engines_with_the_same_updates_have_the_same_digest(trained):
    digests = []
    for _ in range(2):
        with LLM(MODEL, **ARGUMENTS) as llm:
            found = []
            for _ in range(2):
                llm.start_weight_update()
                llm.update_weights(trained.state_dict())
                llm.finish_weight_update()
                found.append(llm.get_stats().state.model.digest)
            digests.append(found)
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


def test_the_trainers_tensors_are_copied(llm, trained):
    llm.start_weight_update()
    llm.update_weights(trained.state_dict())
    llm.finish_weight_update()
    after = tokens(llm)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert tokens(llm) == after


WRONG = {
    "name": (
        lambda state: {"model.embed_token.weight": state["model.embed_tokens.weight"]},
        "did you mean model.embed",
    ),
    "shape": (lambda state: {"model.norm.weight": torch.zeros(3)}, r"has the shape \[3\]; it must be \[256\]"),
    "kind": (lambda state: {"model.norm.weight": torch.zeros(256, dtype=torch.int32)}, "give floating-point values"),
    "type": (lambda state: {"model.norm.weight": [0.0] * 256}, "is of type list; give a tensor"),
    "form": (lambda state: [1, 2], "neither a mapping of names"),
    "key": (lambda state: {"names": [], "handles": []}, "did you mean ipc_handles"),
    "count": (lambda state: {"names": ["a"], "ipc_handles": []}, "0 ipc_handles for 1 names"),
    "device": (lambda state: {"names": ["a"], "ipc_handles": [{"GPU-1": ()}]}, "is for GPU-1, not for cpu"),
    "function": (lambda state: {"names": ["a"], "ipc_handles": [(print, ("run",))]}, "is not of torch.multiprocessing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_the_update_goes_on(llm, trained, case):
    wrong, message = WRONG[case]
    state = trained.state_dict()
    llm.start_weight_update()
    llm.update_weights(state)
    with pytest.raises(InvalidRequest, match=message):
        llm.update_weights(wrong(state))
    llm.finish_weight_update()
    assert tokens(llm) == expected(trained, llm)


def test_an_update_without_all_tensors_changes_nothing(llm, trained):
    before = tokens(llm)
    llm.start_weight_update()
    llm.update_weights({"model.norm.weight": torch.zeros(256)})
    with pytest.raises(Mismatch, match=r"the update lacks model\.embed_tokens\.weight, .* and \d+ more"):
        llm.finish_weight_update()
    assert tokens(llm) == before


def test_calls_out_of_order_are_refused(llm):
    for call in (llm.finish_weight_update, lambda: llm.update_weights({})):
        with pytest.raises(Mismatch, match="start one first"):
            call()
    llm.start_weight_update()
    with pytest.raises(Mismatch, match="has begun already"):
        llm.start_weight_update()
    with pytest.raises(InvalidParameter, match="backend is 'mpi'; give local, ipc, gloo, nccl or auto"):
        llm.init_weight_transfer_engine({"init_info": {"backend": "mpi"}})
    with pytest.raises(InvalidParameter, match="is_checkpoint_format=False"):
        llm.start_weight_update(is_checkpoint_format=False)


async def test_running_outputs_continue_with_the_new_weights(trained):
    async with AsyncLLM(MODEL, **ARGUMENTS) as llm:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        running = llm.generate(PROMPT, params)
        first = await anext(running)
        await llm.start_weight_update()
        await llm.update_weights(trained.state_dict())
        await llm.finish_weight_update()
        last = [output async for output in running][-1]
        assert len(last.outputs[0].token_ids) == 200
        assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
        assert (await llm.get_stats(audit=True)).num_held_blocks == 0


def test_engines_without_weights_say_so():
    with (
        LLM(MODEL, executor="sim", sim_slowness=0.0) as llm,
        pytest.raises(ServiceError, match="executor=sim has no weights"),
    ):
        llm.start_weight_update()
