"""`truncation: auto` drops the oldest items in whole units, and keeps instructions."""

from functools import partial

import pytest
from support.gateway.rest_harness import INFO, rest_side, say
from support.processes.cpu_seconds import cheapest_of

from baton.gateway.models.served import ServedModel
from baton.gateway.responses.truncation import MANY_ITEMS, longest_that_fits, parted, units_of
from baton.v1 import types_pb2

CONTEXT = INFO.max_model_len


def message(text, role="user"):
    return {"type": "message", "role": role, "content": text}


def call(call_id, kind="function_call"):
    return {"type": kind, "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id, kind="function_call_output"):
    return {"type": kind, "call_id": call_id, "output": "ok"}


REASONING = {"type": "reasoning", "summary": []}


@pytest.mark.parametrize(
    ("items", "sizes"),
    [
        ([message("a"), message("b")], [1, 1]),
        ([message("a"), call("1"), output("1"), message("b")], [1, 2, 1]),
        ([REASONING, call("1"), call("2"), output("2"), output("1"), message("b")], [5, 1]),
        ([call("1", "custom_tool_call"), message("a"), output("1", "custom_tool_call_output")], [3]),
        ([REASONING, REASONING, message("a", "assistant")], [3]),
        ([output("0"), call("1"), message("a")], [1, 1, 1]),
        ([call("1"), call("1"), output("1")], [3]),
        ([], []),
    ],
)
def test_calls_stay_with_their_results(items, sizes):
    assert [len(unit) for unit in units_of(items)] == sizes


class Kept(list):
    num_tokens = property(len)


@pytest.mark.parametrize("room", range(40))
async def test_the_fewest_of_the_oldest_go(room):
    items = [message("s", "system"), *(message(str(index)) for index in range(30)), call("1"), output("1")]
    tries = []

    async def tried(kept):
        tries.append(kept)
        return Kept(kept) if len(kept) <= room else None

    found = await longest_that_fits(parted(items), room, tried)
    if room < 3:
        assert found is None  # the instructions and the last unit stay
    else:
        expected = [items[0], *items[1:][-(min(room, 32) - 1) :]]
        if expected[1] == items[-1]:
            expected = [items[0], *items[-2:]]
        assert found == expected or (room >= 33 and found == [items[0], *items[2:]])
    assert len(tries) <= 6


class Fitting:
    def __init__(self, kept, num_tokens):
        self.kept, self.num_tokens = kept, num_tokens


@pytest.mark.parametrize("texts", ["a", "the little dog ran home " * 40, "mixed"])
@pytest.mark.parametrize("room", [300, 5000, 30_000])
async def test_a_long_conversation_is_cut_in_few_tries(texts, room):
    items = [message("word " * (index % 90) if texts == "mixed" else texts) for index in range(12_000)]
    costs = [3 + len(item["content"]) // 4 for item in items]
    fits = next(first for first in range(len(items)) if sum(costs[first:]) <= room)
    tries = []

    async def tried(kept):
        tries.append(len(kept))
        num_tokens = sum(costs[-len(kept) :])
        return Fitting(kept, num_tokens) if num_tokens <= room else None

    found = await longest_that_fits(parted(items), room, tried)
    num_missing = len(items) - fits - len(found.kept)
    assert num_missing == 0 or (sum(tries) > 10_000 and 0 < num_missing < len(items) // 50)
    assert len(tries) <= 9  # halving took 14, from 6,000 items on
    assert sum(tries) <= 9 * len(found.kept)


async def test_of_very_many_items_more_than_the_fewest_may_go():
    items = [message("a") for _ in range(60_000)]
    tries = []

    async def tried(kept):
        tries.append(len(kept))
        return Fitting(kept, 1 + len(kept) // 1000) if len(kept) < 25_000 else None

    found = await longest_that_fits(parted(items), 40, tried)
    assert 1000 < len(found.kept) < 25_000
    assert sum(tries) < 60_000


async def test_where_the_whole_may_fit_it_is_tried_too():
    items = [message("a") for _ in range(3000)]

    async def tried(kept, most):
        return Fitting(kept, len(kept)) if len(kept) <= most else None

    for most, least in ((3100, 3000), (3000, 3000), (2999, 2999), (1700, 1698)):
        found = await longest_that_fits(parted(items), most, partial(tried, most=most), 0)
        assert least <= len(found.kept) <= min(most, 3000)


async def ask(rest, given, **fields):
    return await rest.post("/v1/responses", {"input": given, **fields})


def long_chat(number=60):
    words = "the little dog ran home " * 12
    return [message("Be kind.", "developer"), *(message(f"{index}: {words}") for index in range(number))]


async def test_a_truncated_prompt_leaves_tokens_for_its_answer():
    async with rest_side(say("ok")) as rest:
        answer = await ask(rest, long_chat(), truncation="auto")
        assert answer.status == 200, answer.body
        num_tokens = len(rest.generator.started[0].request.prompt_token_ids)
        assert CONTEXT // 2 < num_tokens <= CONTEXT - CONTEXT // 8
        answer = await ask(rest, long_chat(), truncation="auto", max_output_tokens=900)
        assert len(rest.generator.started[1].request.prompt_token_ids) <= CONTEXT - 900
        text = rest.catalog.models()[0].tokenizer.decode(rest.generator.started[0].request.prompt_token_ids)
        assert "Be kind." in text
        assert "59: the" in text
        assert "\n0: the" not in text
        listed = await rest.request("GET", f"/v1/responses/{answer.json['id']}/input_items?limit=100")
        assert len(listed.json["data"]) == 61  # what was left out is kept with the response


async def test_a_conversation_of_many_items_stays_whole_where_it_fits():
    info = types_pb2.ModelInfo()
    info.CopyFrom(INFO)
    info.max_model_len = 65_536
    items = [message("a") for _ in range(MANY_ITEMS + 1)]
    async with rest_side(say("ok")) as rest:
        rest.catalog.models()[0].info = info
        for given, num_kept in ((items, len(items)), ([*items, message("dog " * 70_000)], None)):
            answers = [await ask(rest, given, truncation=truncation) for truncation in ("auto", "disabled")]
            if num_kept is None:
                assert [answer.status for answer in answers] == [400, 400]
                assert all("maximum context length" in answer.error["message"] for answer in answers)
            else:
                auto, disabled = (one.request.prompt_token_ids for one in rest.generator.started)
                assert auto == disabled


async def test_of_many_items_the_whole_is_not_rendered_where_it_cannot_fit(monkeypatch):
    numbers = []
    encode = ServedModel.encode_chat

    async def counted(model, messages, **fields):
        numbers.append(len(messages))
        return await encode(model, messages, **fields)

    monkeypatch.setattr(ServedModel, "encode_chat", counted)
    async with rest_side(say("ok")) as rest:
        answer = await ask(rest, [message("a") for _ in range(16_000)], truncation="auto")
        assert answer.status == 200, answer.body
    assert sum(numbers) < 4000


async def test_one_item_that_is_too_long_is_an_error():
    async with rest_side(say("ok")) as rest:
        for truncation in ("auto", "disabled"):
            answer = await ask(rest, "the little dog ran home " * 2000, truncation=truncation)
            assert answer.status == 400
            assert "maximum context length" in answer.error["message"]
        assert rest.admission.in_use == 0
        # It fits, without room for more than a few tokens.
        answer = await ask(rest, [message("a"), message("dog " * 1990)], truncation="auto")
        assert answer.status == 200, answer.body


def calls(number):
    """Calls with their results: text without a place to cut."""
    items = []
    for index in range(number // 2):
        call = {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": '{"a": 1}'}
        items += [call, {"type": "function_call_output", "call_id": f"c{index}", "output": "ok"}]
    return items


LONG = {
    "messages": [message("a")] * 16_000,
    "calls": calls(16_000),
    "calls without results": calls(32_000)[::2],
    "digits": [message("1234567890" * 40)] * 16_000,
    "control tokens": [message("<|im_end|>")] * 16_000,
}


@pytest.fixture
async def large_context():
    info = types_pb2.ModelInfo()
    info.CopyFrom(INFO)
    info.max_model_len = 65_536
    async with rest_side(say("ok")) as rest:
        rest.catalog.models()[0].info = info
        await ask(rest, [message("a")] * 100, truncation="auto")  # imports, and what is compiled once
        yield rest


async def ask_within(enough, rest, items, **fields):
    """An answer that takes this many CPU seconds at most."""
    answers = []

    async def ask_once():
        answers.append(await ask(rest, items, **fields))

    assert await cheapest_of(ask_once, enough) < enough
    return answers[-1]


@pytest.mark.parametrize("name", LONG)
async def test_many_items_are_truncated_within_a_second_of_cpu(large_context, name):
    answer = await ask_within(1.0, large_context, LONG[name], truncation="auto", stream=True)
    assert answer.status == 200, answer.body
    num_tokens = len(large_context.generator.started[-1].request.prompt_token_ids)
    room = 65_536 - 65_536 // 8
    assert 0.95 * room <= num_tokens <= room


@pytest.mark.parametrize("name", LONG)
async def test_many_items_whose_last_is_too_long_are_refused_within_half_a_second_of_cpu(large_context, name):
    items = [*LONG[name][:-1], message("dog " * 70_000)]
    answer = await ask_within(0.5, large_context, items, truncation="auto")
    assert answer.status == 400
    assert "maximum context length" in answer.error["message"]
