"""AsyncLLM: the tokens of LLM, streamed by kind; aborts, early ends and concurrent requests."""

from __future__ import annotations

import asyncio

import pytest

from baton.llm import AsyncLLM, InvalidParameter, RequestOutputKind, SamplingParams
from baton.rpc.errors import ServiceError

ARGUMENTS = {"threads": 1, "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 128}
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def expected():
    """What LLM returns."""
    from baton.llm import LLM

    with LLM("models/storyteller-7m", **ARGUMENTS) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=1, n=2)
        return llm.generate("Once upon a time", params, use_tqdm=False)[0]


@pytest.fixture
async def llm():
    async with AsyncLLM("models/storyteller-7m", **ARGUMENTS) as one:
        yield one


def params(kind):
    return SamplingParams(temperature=0, max_tokens=16, logprobs=1, n=2, output_kind=kind)


async def test_every_kind_of_output_adds_up_to_the_same(llm, expected):
    found = {
        kind: [output async for output in llm.generate("Once upon a time", params(kind))] for kind in RequestOutputKind
    }
    (final,) = found[RequestOutputKind.FINAL_ONLY]
    last = found[RequestOutputKind.CUMULATIVE][-1]
    parts = found[RequestOutputKind.DELTA]
    assert len(parts) > 2
    assert len(found[RequestOutputKind.CUMULATIVE]) > 2
    assert [output.finished for output in parts] == [False] * (len(parts) - 1) + [True]
    for index, wanted in enumerate(expected.outputs):
        for whole in (final, last):
            assert whole.outputs[index].token_ids == wanted.token_ids
            assert whole.outputs[index].text == wanted.text
            assert whole.outputs[index].logprobs == wanted.logprobs
        assert "".join(part.outputs[index].text for part in parts) == wanted.text
        assert [one for part in parts for one in part.outputs[index].token_ids] == wanted.token_ids
        assert [one for part in parts for one in part.outputs[index].logprobs] == wanted.logprobs


async def test_an_aborted_request_ends_with_its_reason_and_frees_its_blocks(llm):
    outputs = []
    async for output in llm.generate("Once", LONG, "mine"):
        outputs.append(output)
        await llm.abort("mine")
    assert outputs[-1].outputs[0].finish_reason == "abort"
    async for _ in llm.generate("Once", LONG, "again"):
        break
    await llm.abort("unknown")
    async with asyncio.timeout(5):
        while (await llm.get_stats()).num_held_blocks:  # noqa: ASYNC110 - the engine sends no event
            await asyncio.sleep(0.01)


async def test_requests_run_together(llm):
    async def tokens(prompt):
        short = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
        return [output.outputs[0].token_ids async for output in llm.generate(prompt, short)]

    together = await asyncio.gather(*(tokens(f"There were {number} cats") for number in range(12)))
    assert together == [await tokens(f"There were {number} cats") for number in range(12)]


async def test_a_chat_streams(llm):
    chat = [{"role": "user", "content": "Tell me a story."}]
    outputs = [output async for output in llm.chat(chat, SamplingParams(max_tokens=8, seed=1))]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_wrong_requests_are_refused(llm):
    async def first(*arguments):
        return await anext(llm.generate(*arguments))

    with pytest.raises(InvalidParameter, match="a prompt is of type int"):
        await first(3)
    with pytest.raises(ServiceError, match="maximum context length"):
        await first("b " * 600)
    running = llm.generate("Once", LONG, "same")
    await anext(running)
    with pytest.raises(InvalidParameter, match="'same' is running"):
        await first("Once", LONG, "same")
    await running.aclose()


async def test_a_closed_engine_ends_its_requests_with_an_error():
    llm = AsyncLLM("models/storyteller-7m", **ARGUMENTS)
    running = llm.generate("Once", LONG)
    await anext(running)
    await llm.shutdown()
    with pytest.raises(ServiceError, match=r"closed|ended|shut"):
        async for _ in running:
            pass
    await llm.shutdown()


async def test_an_engine_that_cannot_start_says_why():
    llm = AsyncLLM("models/nowhere", **ARGUMENTS)
    with pytest.raises(ServiceError, match="models/nowhere"):
        await llm.start()
    await llm.shutdown()
