"""vLLM's and OpenAI's rarer fields over REST: the generation's request, and the client's response."""

import pytest
from support.gateway.rest_harness import INFO, rest_side, say
from support.gateway.scripted_gateway import model_folder

from baton.gateway.config import GatewayConfig
from baton.gateway.core import TokenLogprob, TopLogprob
from baton.gateway.fields.extra_args import xargs_of
from baton.gateway.models.served import TemplateFlags, load_served_model
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.format_choice import FormatFlags
from baton.gateway.server import served_model
from baton.rpc.errors import InvalidRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
ASSISTANT = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "Once upon"}]


def entry(token_id, text, value, *top):
    tops = tuple(TopLogprob(name, name.encode(), number, one) for number, name, one in top)
    return TokenLogprob(text, text.encode(), token_id, value, 1, tops)


def pieces(*choices):
    """A script: for each choice its (text, token id, log-probability) in turn."""

    def script(generation):
        for index, each in enumerate(choices):
            for text, token_id, value in each:
                logprobs = [entry(token_id, text, value, (token_id, text, value), (9, "z", -7.0))]
                generation.emit(text, index, token_ids=(token_id,), logprobs=logprobs)
            generation.finish(index)
        generation.done(sum(map(len, choices)))

    return script


DOGS = pieces([("a", 5, -1.0), (" dog", 6, -0.5)])


async def asked(path, fields, script=None):
    base = HI if path == CHAT else {"prompt": "Hi"}
    async with rest_side(script or say("ok")) as rest:
        answer = await rest.post(path, base | fields)
        assert answer.status == 200, answer.body
        return rest.generator.started[0].request, answer


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_wishes_reach_the_generation_side(path):
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 2}
    fields = {
        "bad_words": ["dog", " cat"],
        "logprob_token_ids": [7, 5],
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3},
        **logprobs,
    }
    request, _ = await asked(path, fields)
    assert list(request.sampling.bad_words) == ["dog", " cat"]
    assert list(request.sampling.logprob_token_ids) == [7, 5]
    wanted = request.stop.repetition_detection
    assert (wanted.min_pattern_size, wanted.max_pattern_size, wanted.min_count) == (2, 8, 3)


async def test_tokens_are_called_by_their_ids():
    _, answer = await asked(CHAT, {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}, DOGS)
    first = answer.json["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:5", [97])
    assert [one["token"] for one in first["top_logprobs"]] == ["token_id:5", "token_id:9"]
    _, answer = await asked(COMPLETION, {"logprobs": 1, "return_tokens_as_token_ids": True}, DOGS)
    columns = answer.json["choices"][0]["logprobs"]
    assert columns["tokens"] == ["token_id:5", "token_id:6"]
    assert columns["top_logprobs"] == [{"token_id:5": -1.0}, {"token_id:6": -0.5}]
    assert columns["text_offset"] == [0, 1]  # in the text, whatever tokens are called
    _, answer = await asked(CHAT, {"logprobs": True, "return_tokens_as_token_ids": True, "stream": True}, DOGS)
    told = [event["choices"][0]["logprobs"] for event in answer.events]
    assert [one["content"][0]["token"] for one in told if one] == ["token_id:5", "token_id:6"]


async def test_all_named_alternatives_are_returned():
    _, answer = await asked(CHAT, {"logprobs": True, "logprob_token_ids": [5, 9]}, DOGS)
    assert len(answer.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    _, answer = await asked(COMPLETION, {"logprobs": 0, "logprob_token_ids": [5, 9]}, DOGS)
    assert answer.json["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -1.0, "z": -7.0}


@pytest.mark.parametrize("more", [{}, {"stream_options": {"continuous_usage_stats": True}}, {"logprobs": True}])
async def test_a_chats_stream_has_token_ids(more):
    fields = {"stream": True, "return_token_ids": True, "return_prompt_text": True, "n": 2, **more}
    script = pieces([("a", 5, -1.0), ("", 6, -0.5)], [("b", 7, -1.0)])
    request, answer = await asked(CHAT, fields, script)
    first, *others = answer.events
    assert first["prompt_token_ids"] == request.prompt_token_ids
    assert "Hi" in first["prompt_text"]
    assert not any("prompt_token_ids" in event for event in others)
    told = [(choice["index"], choice.get("token_ids")) for event in others for choice in event["choices"]]
    assert [one for one in told if one[1]] == [(0, [5]), (0, [6]), (1, [7])]
    assert all("usage" in event for event in answer.events) == ("stream_options" in more)


async def test_a_document_has_the_prompts_token_ids():
    request, answer = await asked(CHAT, {"return_token_ids": True, "return_prompt_text": True}, DOGS)
    assert answer.json["prompt_token_ids"] == request.prompt_token_ids
    assert answer.json["choices"][0]["token_ids"] == [5, 6]
    assert "Hi" in answer.json["prompt_text"]
    _, answer = await asked(CHAT, {}, DOGS)
    assert not {"prompt_text", "prompt_token_ids"} & answer.json.keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_assistants_last_message_is_echoed(stream):
    fields = {"messages": ASSISTANT, "continue_final_message": True, "echo": True, "stream": stream}
    _, answer = await asked(CHAT, fields, say(" a time"))
    if stream:
        texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events]
        assert texts[:3] == ["", "Once upon", " a time"]
    else:
        assert answer.json["choices"][0]["message"]["content"] == "Once upon a time"
    _, answer = await asked(CHAT, {"echo": True}, say("a time"))
    assert answer.json["choices"][0]["message"]["content"] == "a time"


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8]), (None, [7, 8]), ("right", [5, 6])])
async def test_a_prompt_is_truncated_at_the_given_side(side, kept):
    fields = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": side}
    request, _ = await asked(COMPLETION, fields)
    assert request.prompt_token_ids == kept


async def test_best_of_gives_the_likeliest_choices():
    choices = [[("a", 5, -3.0)], [("b", 6, -1.0), ("b", 6, -1.0)], [("c", 7, -0.5), ("c", 7, -4.0)], [("d", 8, -2.0)]]
    request, answer = await asked(COMPLETION, {"best_of": 4, "n": 2}, pieces(*choices))
    assert (request.n, request.sampling.logprobs) == (4, 0)
    told = answer.json["choices"]
    assert [(one["index"], one["text"], one["logprobs"]) for one in told] == [(0, "bb", None), (1, "d", None)]
    assert answer.json["usage"]["completion_tokens"] == 6
    request, _ = await asked(COMPLETION, {"best_of": 1})
    assert not request.sampling.HasField("logprobs")


WRONG = {
    "an empty word": (CHAT, {"bad_words": [""]}, "bad_words.0"),
    "words that are none": (COMPLETION, {"bad_words": [5]}, "bad_words.0"),
    "too many words": (CHAT, {"bad_words": ["a"] * 1025}, "bad_words"),
    "words for beams": (CHAT, {"bad_words": ["a"], "use_beam_search": True}, "bad_words"),
    "alternatives of nothing": (CHAT, {"logprob_token_ids": [5]}, "logprob_token_ids"),
    "alternatives of no column": (COMPLETION, {"logprob_token_ids": [5]}, "logprob_token_ids"),
    "two numbers of them": (CHAT, {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [5]}, "top_logprobs"),
    "the same in columns": (COMPLETION, {"logprobs": 3, "logprob_token_ids": [5]}, "logprobs"),
    "too many of them": (CHAT, {"logprobs": True, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
    "a pattern too long": (CHAT, {"repetition_detection": {"max_pattern_size": 9999}},
                           "repetition_detection.max_pattern_size"),
    "best of fewer": (COMPLETION, {"best_of": 1, "n": 2}, "best_of"),
    "best of a stream": (COMPLETION, {"best_of": 3, "stream": True}, "best_of"),
    "a side that is none": (CHAT, {"truncation_side": "top"}, "truncation_side"),
    "a template": (CHAT, {"chat_template": "x"}, "chat_template"),
    "a budget for nothing": (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
    "a transfer": (CHAT, {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    "a plugin's argument that is an object": (COMPLETION, {"vllm_xargs": {"a": {}}}, "vllm_xargs"),
    "a list in a list for a plugin": (CHAT, {"vllm_xargs": {"a": [[1]]}}, "vllm_xargs.0"),
    "a plugin's argument for beams": (CHAT, {"vllm_xargs": {"a": 1}, "use_beam_search": True}, "vllm_xargs"),
    "a web search": (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), WRONG.values(), ids=WRONG)
async def test_invalid_values_are_refused_by_name(path, fields, field):
    base = HI if path == CHAT else {"prompt": "Hi"}
    async with rest_side() as rest:
        answer = await rest.post(path, base | fields)
        assert not rest.generator.started
        assert rest.admission.in_use == 0
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses", "/inference/v1/generate"])
async def test_arguments_of_plugins_reach_the_workers(path):
    xargs = {"text": "a", "whole": 3, "half": 0.5, "flag": True, "list": [1, "b", False]}
    base = {CHAT: HI, COMPLETION: {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, {"token_ids": [5]})
    fields = {"vllm_xargs": xargs}
    async with rest_side(say("ok")) as rest:
        fields = {"sampling_params": fields} if path == "/inference/v1/generate" else fields
        answer = await rest.post(path, base | fields)
        assert answer.status == 200, answer.body
        sampling = rest.generator.started[0].request.sampling
    assert xargs_of(sampling.extra_args) == xargs
    assert [each.WhichOneof("value") for each in sampling.extra_args["list"].list.values] == ["integer", "text", "flag"]


async def test_neutral_values_are_accepted():
    fields = {"kv_transfer_params": {}, "vllm_xargs": {}, "thinking_token_budget": -1, "repetition_detection": {}}
    request, _ = await asked(CHAT, fields | {"logprob_token_ids": [], "spaces_between_special_tokens": False})
    assert not request.sampling.HasField("reasoning_limit")


async def test_token_generation_takes_them_too():
    params = {"bad_words": ["dog"], "logprobs": 0, "logprob_token_ids": [5, 9], "return_tokens_as_token_ids": True}
    async with rest_side(DOGS) as rest:
        answer = await rest.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": params})
        (generation,) = rest.generator.started
    assert list(generation.request.sampling.bad_words) == ["dog"]
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["token_id:5", "token_id:9"]


async def test_responses_take_them_too():
    fields = {
        "bad_words": ["dog"],
        "allowed_token_ids": [5, 6],
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
    }
    async with rest_side(say("ok")) as rest:
        assert (await rest.post("/v1/responses", {"input": "Hi", **fields})).status == 200
        request = rest.generator.started[0].request
    assert (list(request.sampling.bad_words), list(request.sampling.allowed_token_ids)) == (["dog"], [5, 6])
    assert request.stop.repetition_detection.max_pattern_size == 4


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/responses", {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/responses", {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ("/v1/responses", {"previous_input_messages": [{}]}, "previous_input_messages"),
        ("/inference/v1/generate", {"features": {"a": 1}}, "features"),
        ("/inference/v1/generate", {"sampling_params": {"vllm_xargs": {"a": {}}}}, "sampling_params.vllm_xargs"),
        (
            "/inference/v1/generate",
            {"sampling_params": {"logprob_token_ids": [5]}},
            "sampling_params.logprob_token_ids",
        ),
        (
            "/inference/v1/generate",
            {"sampling_params": {"thinking_token_budget": 5}},
            "sampling_params.thinking_token_budget",
        ),
    ],
)
async def test_other_routes_refuse_by_name(path, fields, field):
    async with rest_side() as rest:
        answer = await rest.post(path, {"input": "Hi", "token_ids": [5], **fields})
        assert not rest.generator.started
    assert (answer.status, answer.error["param"]) == (400, field)


async def test_messages_refuse_transfers():
    body = {"model": "storyteller-7m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    async with rest_side() as rest:
        answer = await rest.post("/v1/messages", body | {"kv_transfer_params": {"a": 1}})
    assert answer.status == 400
    assert "kv_transfer_params" in answer.error["message"]


TEMPLATE = "{{ word or 'none' }}:{% for message in messages %}{{ message.content }}{% endfor %}"


async def test_trusted_requests_bring_their_own_template():
    async with rest_side(say("ok"), trust_request_chat_template=True) as rest:
        for word in ("dog", None):
            body = HI | {"chat_template": TEMPLATE, "chat_template_kwargs": {"word": word}, "return_prompt_text": True}
            answer = await rest.post(CHAT, body)
            assert answer.json["prompt_text"] == f"{word or 'none'}:Hi"
        broken = await rest.post(CHAT, HI | {"chat_template": "{% if %}"})
        tokens = await rest.post("/tokenize", HI | {"chat_template": "Hi"})
    assert (broken.status, broken.error["param"]) == (400, "chat_template")
    assert tokens.json["count"] == 1
    async with rest_side() as rest:
        refused = await rest.post("/tokenize", HI | {"chat_template": "Hi"})
    assert (refused.status, refused.error["param"]) == (400, "chat_template")


async def test_the_operators_template_and_variables_come_first(tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    folder = model_folder(tmp_path / "model", "{{ messages[0].content }}")
    config = GatewayConfig(
        model=str(folder),
        chat_template=str(tmp_path / "mine.jinja"),
        default_chat_template_kwargs='{"word": "cat"}',
    )
    model = served_model(config)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    messages = HI["messages"]
    assert tokenizer.decode(await model.encode_chat(messages)) == "cat:Hi"
    assert tokenizer.decode(await model.encode_chat(messages, variables={"word": "dog"})) == "dog:Hi"


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_template_variables_are_a_json_object(text):
    with pytest.raises(InvalidRequest) as caught:
        GatewayConfig(default_chat_template_kwargs=text).validate()
    assert caught.value.field == "default_chat_template_kwargs"


def test_a_template_that_is_not_there_is_refused(tmp_path):
    folder = model_folder(tmp_path / "model", "")
    with pytest.raises(InvalidRequest) as caught:
        load_served_model(str(folder), templates=TemplateFlags(str(tmp_path / "none.jinja")))
    assert caught.value.field == "chat_template"


THINKER = "{% for message in messages %}{{ message.content }}{% endfor %}<s>{{ '<think>' if open }}{# </think> #}"


@pytest.mark.parametrize(("opened", "start"), [(True, None), (False, 4096)])
async def test_a_reasoning_budget_uses_the_models_tags(tmp_path, opened, start):
    folder = model_folder(tmp_path / "thinker", THINKER, ["<think>", "</think>"])
    model = load_served_model(str(folder), ("storyteller-7m",), FormatFlags(reasoning="qwen3"))
    async with rest_side(say("ok")) as rest:
        info = type(INFO)()
        info.CopyFrom(INFO)
        info.vocab_size += 2
        rest.catalog._models["storyteller-7m"] = rest.catalog._by_any_name["storyteller-7m"] = model
        rest.catalog.update([info])
        body = HI | {"thinking_token_budget": 12, "chat_template_kwargs": {"open": opened}}
        assert (await rest.post(CHAT, body)).status == 200
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = HI | {"model": "storyteller-7m", "max_tokens": 1025, "thinking": thinking}
        body["chat_template_kwargs"] = {"open": opened}
        assert (await rest.post("/v1/messages", body)).status == 200
        limits = [one.request.sampling.reasoning_limit for one in rest.generator.started]
    assert [limit.max_tokens for limit in limits] == [12, 1024]
    for limit in limits:
        assert list(limit.end_token_ids) == [4097]
        assert (limit.start_token_id if limit.HasField("start_token_id") else None) == start
