"""Offline requests with LoRA adapters, beside others, against the model with them merged in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.tiny_adapters import merged, save_adapter
from support.engine.tiny_models import generate_greedily, load_transformers
from support.processes.stack import MODEL

from baton.llm import LLM, AsyncLLM, InvalidParameter, LoRARequest, SamplingParams
from baton.rpc.errors import InvalidRequest, NotFound

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 90, 41, 17], [300, 12, 9], [77, 78, 79, 80, 81]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_transformers(MODEL)
    for seed, name in enumerate("ab"):
        save_adapter(model, folder / name, rank=4 + seed, seed=seed, lora_alpha=4)
    return [LoRARequest(name, seed + 1, str(folder / name)) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), enable_lora=True, max_loras=2, device="cpu") as llm:
        yield llm


def test_each_prompt_may_have_its_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    model = load_transformers(MODEL)
    wanted = [None, *adapters]
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=wanted, use_tqdm=False)
    for prompt, request, output in zip(PROMPTS, wanted, outputs, strict=True):
        oracle = model if request is None else merged(model, Path(request.lora_path))
        assert list(output.outputs[0].token_ids) == generate_greedily(oracle, prompt, 12)
    chosen = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY, lora_request=adapters[0])]
    plain = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]
    assert all(one != other for one, other in zip(chosen, plain, strict=True)), "one for all"


def test_chats_have_adapters_too(llm: LLM, adapters: list[LoRARequest]) -> None:
    chat = [{"role": "user", "content": "A dog."}]
    plain, adapted = (llm.chat(chat, GREEDY, lora_request=one, use_tqdm=False)[0] for one in (None, adapters[1]))
    assert plain.prompt_token_ids == adapted.prompt_token_ids
    assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids


def test_wrong_adapters_are_refused(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("c", 3, str(tmp_path / "none")))
    with pytest.raises(InvalidParameter, match="give a LoRARequest"):
        llm.generate(PROMPTS, GREEDY, lora_request="a")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lora_request"):
        llm.generate(PROMPTS, GREEDY, lora_request=adapters)


async def test_async_requests_have_adapters(adapters: list[LoRARequest]) -> None:
    expected = generate_greedily(merged(load_transformers(MODEL), Path(adapters[0].lora_path)), PROMPTS[0], 12)
    llm = AsyncLLM(str(MODEL), enable_lora=True, device="cpu")
    try:
        outputs = [one async for one in llm.generate(PROMPTS[0], GREEDY, lora_request=adapters[0])]
    finally:
        await llm.shutdown()
    assert list(outputs[-1].outputs[0].token_ids) == expected


def test_without_enable_lora_there_are_none(adapters: list[LoRARequest]) -> None:
    with LLM(str(MODEL), device="cpu") as llm, pytest.raises(InvalidParameter, match="enable_lora=True"):
        llm.generate(PROMPTS, GREEDY, lora_request=adapters[0])
