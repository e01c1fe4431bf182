"""Text completions over REST: prompts of every form, echo, log-probability columns, both forms of the answer."""

import asyncio
import json

import msgspec
import pytest
from support.gateway.rest_harness import logprob, rest_side, say
from support.processes.cpu_seconds import cheapest_of
from support.processes.loop_stalls import loop_stalls

from baton.gateway.schemas import answers
from baton.rpc.errors import Unavailable


async def test_a_whole_answer_has_openais_shape():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await rest.complete("Once", model="storyteller-7m")
    body = answer.json
    assert answer.status == 200
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["completion_tokens"] == 2
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_is_pieces_then_end_then_usage():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await rest.complete(stream=True, stream_options={"include_usage": True})
    events = [msgspec.convert(event, answers.Completion) for event in answer.events]
    assert [(c.text, c.finish_reason) for event in events for c in event.choices] == [
        ("Hel", None),
        ("lo", None),
        ("", "stop"),
    ]
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 2
    assert all(event["usage"] is None for event in answer.events[:-1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["Once", "upon"], ["Once", "upon"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_a_prompt_is_text_texts_tokens_or_lists_of_tokens(prompt, expected):
    async with rest_side(say("x")) as rest:
        assert (await rest.complete(prompt)).status == 200
        tokenizer = rest.catalog.get("").tokenizer
        asked = [generation.request.prompt_token_ids for generation in rest.generator.started]
    wanted = [tokenizer.encode(one, add_special_tokens=True) if isinstance(one, str) else one for one in expected]
    assert asked == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_counted_over_prompts_and_usage_summed(stream):
    def script(generation):
        for index in range(2):
            generation.emit(f"{generation.request.prompt_token_ids[0]}.{index}", index)
            generation.finish(index)
        generation.done(2, cached_tokens=1)

    async with rest_side(script) as rest:
        answer = await rest.complete([[5], [6, 6]], n=2, stream=stream, stream_options={} if stream else None)
        names = [generation.request.request_id for generation in rest.generator.started]
    if stream:
        texts = {}
        for event in answer.events:
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        texts = {choice["index"]: choice["text"] for choice in answer.json["choices"]}
        assert answer.json["usage"]["prompt_tokens"] == 3
        assert answer.json["usage"]["completion_tokens"] == 4
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert texts == {0: "5.0", 1: "5.1", 2: "6.0", 3: "6.1"}
    assert len(set(names)) == 2


async def test_one_prompts_failure_ends_the_others():
    async with rest_side() as rest:
        waiting = asyncio.create_task(rest.complete([[5], [6]]))
        second = await rest.generator.next(1)
        second.sink.on_error(Unavailable("worker died"))
        assert (await waiting).status == 503
        assert rest.generator.started[0].aborted.is_set()
        assert rest.admission.in_use == 0


async def test_max_tokens_is_16_unless_given():
    async with rest_side(say("x")) as rest:
        await rest.complete()
        await rest.complete(max_tokens=99)
        limits = [generation.request.stop.max_tokens for generation in rest.generator.started]
    assert limits == [16, 99]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(stream):
    async with rest_side(say(" upon")) as rest:
        answer = await rest.complete("Once", echo=True, n=2, stream=stream)
    if stream:
        texts = ["", ""]
        for event in answer.events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == ["Once upon"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_tokens_asks_no_worker(stream):
    async with rest_side() as rest:
        answer = await rest.complete(["a", "b"], echo=True, max_tokens=0, stream=stream)
        assert not rest.generator.started
        assert rest.admission.in_use == 0
    assert answer.status == 200
    if not stream:
        assert [choice["text"] for choice in answer.json["choices"]] == ["a", "b"]
        assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"length"}
        assert answer.json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_columns_with_running_offsets(stream):
    def script(generation):
        assert generation.request.sampling.logprobs == 1
        generation.emit("He", logprobs=[logprob("He", -1.0, ("Ha", -0.5), ("He", -1.0))])
        generation.emit("llo", logprobs=[logprob("llo", -0.25, ("llo", -0.25), ("x", -3.0))])
        generation.finish()
        generation.done()

    async with rest_side(script) as rest:
        answer = await rest.complete("Once", logprobs=1, stream=stream)
    if stream:
        pieces = [event["choices"][0]["logprobs"] for event in answer.events if event["choices"][0]["logprobs"]]
        assert len(pieces) == 2
        columns = {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
    else:
        columns = answer.json["choices"][0]["logprobs"]
    assert columns == {
        "text_offset": [0, 2],
        "token_logprobs": [-1.0, -0.25],
        "tokens": ["He", "llo"],
        "top_logprobs": [{"Ha": -0.5, "He": -1.0}, {"llo": -0.25}],
    }


def scored(generation, num_top=1):
    """Log-probabilities of the prompt's tokens but the first: -1, -2.. and so on."""
    assert generation.request.sampling.prompt_logprobs == num_top
    token_ids = generation.request.prompt_token_ids
    return [logprob(f"<{one}>", -float(place), ("top", -0.5)) for place, one in enumerate(token_ids[1:], 1)]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_its_log_probabilities(stream, max_tokens):
    def script(generation):
        assert generation.request.stop.max_tokens == 1
        entries = scored(generation)
        if generation.request.n > 1:
            generation.emit("!", 1, logprobs=[logprob("!", -9.0)])
        generation.emit("!", logprobs=[logprob("!", -9.0)], prompt_logprobs=entries)
        for index in range(generation.request.n):
            generation.finish(index, "length")
        generation.done(generation.request.n)

    async with rest_side(script) as rest:
        answer = await rest.complete([5, 6, 7], echo=True, logprobs=1, max_tokens=max_tokens, n=2, stream=stream)
        tokenizer = rest.catalog.get("").tokenizer
        first, text = tokenizer.token_text(5), tokenizer.decode([5, 6, 7])
        assert rest.admission.in_use == 0
    choices = [{}, {}]
    if stream:
        for event in answer.events:
            for piece in event["choices"]:
                choice = choices[piece["index"]]
                choice["text"] = choice.get("text", "") + piece["text"]
                for name, column in (piece["logprobs"] or {}).items():
                    choice.setdefault(name, []).extend(column)
    else:
        choices = [{"text": choice["text"], **choice["logprobs"]} for choice in answer.json["choices"]]
        assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"length"}
        assert answer.json["usage"]["completion_tokens"] == 2 * max_tokens
    for choice in choices:
        assert choice["text"] == text + "!" * max_tokens
        assert choice["tokens"] == [first, "<6>", "<7>"] + ["!"] * max_tokens
        assert choice["token_logprobs"] == [None, -1.0, -2.0] + [-9.0] * max_tokens
        assert choice["top_logprobs"][:2] == [None, {"top": -0.5, "<6>": -1.0}]
        assert choice["text_offset"][:3] == [0, len(first), len(first) + 3]


async def test_prompt_logprobs_are_given_by_token_id():
    def script(generation):
        generation.emit("x", prompt_logprobs=scored(generation, 2))
        generation.finish()
        generation.done()

    async with rest_side(script) as rest:
        answer = await rest.complete([5, 6], prompt_logprobs=2)
        chat = await rest.chat(prompt_logprobs=2)
    nothing, entry = answer.json["choices"][0]["prompt_logprobs"]
    assert nothing is None
    assert entry["1"] == {"logprob": -1.0, "rank": 1, "decoded_token": "<6>"}
    assert chat.json["prompt_logprobs"][0] is None
    assert len(chat.json["prompt_logprobs"]) == chat.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_where_asked_for(stream):
    def script(generation):
        generation.emit("a", token_ids=(8, 9))
        generation.emit("b", token_ids=(10,))
        generation.finish()
        generation.done(3)

    async with rest_side(script) as rest:
        answer = await rest.complete([5, 6], return_token_ids=True, stream=stream)
        plain = await rest.complete([5, 6])
    pieces = [choice for event in answer.events for choice in event["choices"]] if stream else answer.json["choices"]
    assert [one for piece in pieces for one in piece.get("token_ids", ())] == [8, 9, 10]
    assert [one for piece in pieces for one in piece.get("prompt_token_ids", ())] == [5, 6]
    assert "token_ids" not in plain.json["choices"][0]


async def test_chats_return_token_ids_too():
    async with rest_side(say("a", "b")) as rest:
        body = (await rest.chat(return_token_ids=True)).json
        assert body["prompt_token_ids"] == rest.generator.started[0].request.prompt_token_ids
    assert body["choices"][0]["token_ids"] == [7, 7]


@pytest.mark.parametrize(("most", "kept"), [(2, [6, 7]), (9, [5, 6, 7]), (-1, [5, 6, 7])])
async def test_a_truncated_prompt_keeps_its_end(most, kept):
    async with rest_side(say("x")) as rest:
        answer = await rest.complete([5, 6, 7], truncate_prompt_tokens=most, echo=True)
        assert rest.generator.started[0].request.prompt_token_ids == kept
        assert answer.json["choices"][0]["text"] == rest.catalog.get("").tokenizer.decode(kept) + "x"


async def test_a_prompt_beyond_the_context_is_truncated():
    async with rest_side(say("x")) as rest:
        assert (await rest.complete([5] * 3000, truncate_prompt_tokens=-1)).status == 200
        assert len(rest.generator.started[0].request.prompt_token_ids) == 2047


@pytest.mark.parametrize(
    ("prompts", "fields", "seconds"),
    [
        (["12345" * 400] * 250, {"truncate_prompt_tokens": 1}, 1.0),
        (["12345" * 400] * 250, {}, 1.0),
        (["12345" * 2400] * 1000, {"truncate_prompt_tokens": 1}, 0.4),  # their bytes say enough
        ([[5] * 2000] * 250, {}, 0.4),
    ],
    ids=["truncated", "texts", "large texts", "ids"],
)
async def test_the_tokens_of_all_prompts_are_bounded_before_they_are_truncated(prompts, fields, seconds):
    async with rest_side(say("x")) as rest:

        async def refused():
            answer = await rest.complete(prompts, max_tokens=1, **fields)
            assert answer.status == 400
            assert "tokens together; at most 327680 are allowed" in answer.json["error"]["message"]

        assert await cheapest_of(refused, seconds) < seconds


async def test_counting_the_bytes_of_many_prompts_leaves_the_event_loop_free():
    """Of a tokenizer that has tokens which take the white space beside them, every kind of it is counted."""
    prompts = ["\u0e01" * 5000] * 1000
    async with rest_side(say("x")) as rest:
        rest.catalog.models()[0].tokenizer.bound._swallows_spaces = True
        assert (await rest.complete(["a b"] * 2, max_tokens=1)).status == 200
        async with loop_stalls() as stalls:
            answer = await rest.post("/v1/completions", json.dumps({"prompt": prompts}, ensure_ascii=False).encode())
        assert answer.status == 400
        assert "tokens together" in answer.json["error"]["message"]
        assert stalls.longest < 0.05
