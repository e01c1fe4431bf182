"""Tools and reasoning through the whole gateway: OpenAI's client, and an engine whose tokens are scripted."""

import json

import openai
import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import model_folder
from support.gateway.tools_rig import (
    CALL,
    HARMONY,
    HARMONY_TOKENS,
    MESSAGES,
    MISTRAL,
    NAME,
    PLAIN,
    QWEN,
    SECOND_CALL,
    THOUGHT,
    TOOLS,
    rig,
)

from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.rpc.errors import InvalidRequest


@pytest.fixture
async def qwen(tmp_path):
    async with rig(model_folder(tmp_path / "qwen", QWEN)) as made:
        yield made


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def test_a_call_has_openais_shape(qwen):
    answer = await qwen.chat(THOUGHT + CALL + SECOND_CALL, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    assert all(call.type == "function" and call.id.startswith("call_") for call in choice.message.tool_calls)
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.message.reasoning == choice.message.reasoning_content == "The user wants the weather, naïve 😀."


async def test_a_streamed_call_has_openais_deltas(qwen):
    chunks = await qwen.chunks("Let me look.\n" + CALL + SECOND_CALL, tools=TOOLS)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me look."
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(call) == 1 for call in calls)
    assert all(delta.keys() == {"tool_calls"} for delta in deltas if "tool_calls" in delta)
    first, *rest = [call[0] for call in calls if call[0]["index"] == 0]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
    assert len(rest) > 1
    assert json.loads("".join(call["function"]["arguments"] for call in rest)) == {"city": "Paris"}
    assert [call[0]["index"] for call in calls] == sorted(call[0]["index"] for call in calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert deltas[-1] == {}


async def test_the_clients_stream_helper_sums_calls_up(qwen):
    qwen.says = THOUGHT + CALL
    async with qwen.client.chat.completions.stream(model=NAME, messages=MESSAGES, tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)
    assert calls_of(final.choices[0].message) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("tokens_a_step", [1, 7, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_returned_and_counted(qwen, stream, tokens_a_step):
    qwen.gateway.worker.tokens_a_step = tokens_a_step
    says = THOUGHT + "It is sunny."
    if stream:
        chunks = await qwen.chunks(says, stream_options={"include_usage": True})
        usage = chunks[-1].usage
        deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks[:-1]]
        for delta in deltas:
            assert delta.get("reasoning") == delta.get("reasoning_content")
        reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
    else:
        answer = await qwen.chat(says)
        usage, message = answer.usage, answer.choices[0].message
        reasoning, content = message.reasoning, message.content
        assert message.tool_calls is None
    assert (reasoning, content) == ("The user wants the weather, naïve 😀.", "It is sunny.")
    num_thought = len(qwen.tokenizer.encode(THOUGHT.rstrip(), add_special_tokens=False))
    assert abs(usage.completion_tokens_details.reasoning_tokens - num_thought) <= 1


async def test_reasoning_can_be_left_out(qwen):
    answer = await qwen.chat(THOUGHT + "Sunny.", extra_body={"include_reasoning": False})
    assert answer.choices[0].message.content == "Sunny."
    assert not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


async def test_a_chat_without_thinking_has_only_an_answer(qwen):
    answer = await qwen.chat("Sunny.", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.choices[0].message.content == "Sunny."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_tools_and_calls_are_in_the_prompt_as_the_template_writes_them(qwen):
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    await qwen.chat("Sunny.", messages=messages, tools=TOOLS)
    prompt = qwen.prompt()
    assert '"name": "get_weather", "description": "The weather somewhere."' in prompt
    assert '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny" in prompt


async def test_tools_that_must_not_be_called_are_not_in_the_prompt(qwen):
    answer = await qwen.chat(CALL, tools=TOOLS, tool_choice="none")
    assert "get_weather" not in qwen.prompt()
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


async def test_one_call_at_most(qwen):
    answer = await qwen.chat(CALL + SECOND_CALL, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]
    chunks = await qwen.chunks(CALL + SECOND_CALL, tools=TOOLS, parallel_tool_calls=False)
    indices = {call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()}
    assert indices == {0}


async def test_a_truncated_call_finishes_with_length(qwen):
    qwen.says = CALL
    num_tokens = len(qwen.token_ids) - 6
    answer = await qwen.chat(CALL, tools=TOOLS, max_tokens=num_tokens)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


async def test_every_choice_has_calls_of_its_own(qwen):
    answer = await qwen.chat("Ok." + CALL, tools=TOOLS, n=3)
    for choice in answer.choices:
        assert (choice.message.content, calls_of(choice.message)) == ("Ok.", [("get_weather", {"city": "Paris"})])
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


async def test_logprobs_cover_every_token_of_a_call(qwen):
    chunks = await qwen.chunks(CALL, tools=TOOLS, logprobs=True)
    entries = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert len(entries) == len(qwen.token_ids)


async def test_a_stop_string_ends_a_call_too(qwen):
    answer = await qwen.chat(CALL + "\nHello", tools=TOOLS, stop=["</tool_call>"])
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]
    assert answer.choices[0].stop_reason == "</tool_call>"
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_harmonys_special_tokens_are_read_and_others_skipped(tmp_path):
    async with rig(model_folder(tmp_path / "gpt-oss", HARMONY, HARMONY_TOKENS)) as oss:
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            '<|constrain|>json<|message|>{"city": "Paris"}<|im_start|>'
        )
        chunks = await oss.chunks(text, tools=TOOLS)
        deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == ""
        arguments = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
        assert json.loads(arguments) == {"city": "Paris"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        answer = await oss.chat(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        )
        assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == ("Hm.", "Hi")


async def test_mistrals_special_tokens_are_read(tmp_path):
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    async with rig(model_folder(tmp_path / "mistral", MISTRAL, tokens)) as mistral:
        answer = await mistral.chat('[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', tools=TOOLS)
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert calls_of(message) == [("get_weather", {"city": "Paris"})]
    assert len(message.tool_calls[0].id) == 9


async def test_a_model_of_no_known_format_takes_no_tools(tmp_path):
    async with rig(model_folder(tmp_path / "plain", PLAIN)) as plain:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as refused:
            await plain.chat("Hi", tools=TOOLS)
        assert refused.value.param == "tools"
        for name in (*TOOL_FORMATS, "chat template", "--chat-template"):
            assert name in refused.value.message
        assert (await plain.chat("Hi", tools=TOOLS, tool_choice="none")).choices[0].message.content == "Hi"
        answer = await plain.chat('{"city": "Rome"}', tools=TOOLS, tool_choice=NAMED)
        assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Rome"})]


async def test_the_operator_chooses_the_parsers(tmp_path):
    folder = model_folder(tmp_path / "plain", PLAIN)
    async with rig(folder, tool_call_parser="pythonic", reasoning_parser="deepseek_r1") as plain:
        answer = await plain.chat("Hm.</think>[get_weather(city='Paris')]", tools=TOOLS)
    assert answer.choices[0].message.reasoning == "Hm."
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                },
            },
            "tool_choice.allowed_tools.tools.0",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
    ],
)
async def test_wrong_tools_are_named(qwen, fields, param):
    async with RawClient.connect(qwen.gateway.port) as client:
        answer = await client.request("POST", "/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def constraint_of(rig):
    return rig.gateway.worker.submits[-1].constraint


async def test_a_named_function_constrains_the_worker(qwen):
    answer = await qwen.chat('{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert (choice.message.content, calls_of(choice.message)) == (None, [("get_weather", {"city": "Paris"})])
    assert json.loads(constraint_of(qwen).json_schema) == TOOLS[0]["function"]["parameters"]
    assert not constraint_of(qwen).reasoning_end_token_ids
    chunks = await qwen.chunks('{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_required_call_constrains_the_worker(qwen):
    says = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'
    answer = await qwen.chat(says, tools=TOOLS, tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    schema = json.loads(constraint_of(qwen).json_schema)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["get_weather", "get_time"]
    assert (schema["minItems"], "maxItems" in schema) == (1, False)
    await qwen.chat(says, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(constraint_of(qwen).json_schema)["maxItems"] == 1


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_allowed_tools_are_given(qwen):
    answer = await qwen.chat(CALL, tools=TOOLS, tool_choice=allowed("auto", "get_weather"))
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]
    assert "get_weather" in qwen.prompt()
    assert "get_time" not in qwen.prompt()
    says = '[{"name": "get_time", "parameters": {}}]'
    answer = await qwen.chat(says, tools=TOOLS, tool_choice=allowed("required", "get_time"))
    assert calls_of(answer.choices[0].message) == [("get_time", {})]
    schema = json.loads(constraint_of(qwen).json_schema)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["get_time"]
    asked = {"tools": [{"type": "function", **tool["function"]} for tool in TOOLS], "input": "Hi"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    async with RawClient.connect(qwen.gateway.port) as client:
        answer = await client.request("POST", "/v1/responses", {**asked, "tool_choice": choice})
        assert (answer.status, answer.json["tool_choice"]) == (200, choice)
        assert ("get_time" in qwen.prompt(), "get_weather" in qwen.prompt()) == (True, False)
        for wrong, param in (
            ({**choice, "mode": "none"}, "tool_choice.mode"),
            ({**choice, "tools": []}, "tool_choice.tools"),
            ({**choice, "tools": [{"type": "function", "name": "x"}]}, "tool_choice.tools.0"),
        ):
            answer = await client.request("POST", "/v1/responses", {**asked, "tool_choice": wrong})
            assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_chat_without_forced_tools_is_free(qwen):
    await qwen.chat("Hi", tools=TOOLS)
    await qwen.chat("Hi", tools=STRICT, tool_choice="none")
    assert not any(submit.HasField("constraint") for submit in qwen.gateway.worker.submits)


async def test_strict_arguments_constrain_the_worker(qwen):
    answer = await qwen.chat("Ok." + CALL, tools=STRICT)
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]
    form = json.loads(constraint_of(qwen).structural_tag)["format"]
    (tag,) = form["tags"]
    strict, free = [element["elements"] for element in tag["content"]["elements"]]
    assert tag["triggers"] == [{"type": "const_string", "value": "<tool_call>"}]
    assert strict[0]["value"] == '\n{"name": "get_weather", "arguments": '
    assert strict[1]["json_schema"] == TOOLS[0]["function"]["parameters"]
    assert free[1]["json_schema"] == {"type": "object"}


async def test_a_call_is_forced_behind_the_reasoning(tmp_path):
    template = PLAIN + "<think>\n{# </think> #}"
    async with rig(model_folder(tmp_path / "thinker", template, ("<think>", "</think>"))) as thinker:
        answer = await thinker.chat('Hm.</think>{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED)
        assert list(constraint_of(thinker).reasoning_end_token_ids) == [4097]
    assert answer.choices[0].message.reasoning == "Hm."
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]


async def test_a_model_may_reason_before_a_forced_call(tmp_path):
    async with rig(model_folder(tmp_path / "qwen3", QWEN, ("<think>", "</think>"))) as qwen3:
        await qwen3.chat('<think>Hm.</think>{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED)
        constraint = constraint_of(qwen3)
        assert (constraint.reasoning_start_token_id, list(constraint.reasoning_end_token_ids)) == (4096, [4097])
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        await qwen3.chat('{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED, extra_body=off)
        assert not constraint_of(qwen3).reasoning_end_token_ids


async def test_no_constraint_waits_for_a_reasoning_that_only_prompts_open(tmp_path):
    template = PLAIN + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    forms = {"structured_outputs": {"regex": "<a>"}}
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    async with rig(model_folder(tmp_path / "asked", template, ("<think>", "</think>"))) as asked:
        await asked.chat("<a>", extra_body=forms)
        assert not constraint_of(asked).reasoning_end_token_ids
        await asked.chat("Hm.</think><a>", extra_body={**forms, **on})
        constraint = constraint_of(asked)
        assert list(constraint.reasoning_end_token_ids) == [4097]
        assert not constraint.HasField("reasoning_start_token_id")


async def test_tools_without_a_grammar_are_refused_by_name(tmp_path):
    async with rig(model_folder(tmp_path / "oss", HARMONY, HARMONY_TOKENS), tool_call_parser="none") as oss:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser gpt-oss") as refused:
            await oss.chat("x", tools=TOOLS, tool_choice="required")
        assert refused.value.param == "tool_choice"
        assert not oss.gateway.worker.submits
    function = TOOLS[0]["function"]
    schema = {**function["parameters"], "minProperties": 1}
    tools = [TOOLS[1], {"type": "function", "function": {**function, "strict": True, "parameters": schema}}]
    async with rig(model_folder(tmp_path / "coder", PLAIN), tool_call_parser="qwen3_coder") as coder:
        with pytest.raises(openai.BadRequestError, match="minProperties") as refused:
            await coder.chat("x", tools=tools)
        assert refused.value.param == "tools.1.function.parameters"


async def test_strict_calls_among_messages_are_about_the_whole_output(tmp_path):
    async with rig(model_folder(tmp_path / "oss", HARMONY, HARMONY_TOKENS)) as oss:
        says = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
        answer = await oss.chat(says, tools=STRICT)
        assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Paris"})]
        constraint = constraint_of(oss)
        assert constraint.structural_tag
        assert not constraint.reasoning_end_token_ids
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        await oss.chat("<|channel|>final<|message|>{}", tools=STRICT, response_format=form)
        assert not constraint_of(oss).reasoning_end_token_ids


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_calls_are_demanded_among_messages(tmp_path, choice, reason):
    async with rig(model_folder(tmp_path / "oss", HARMONY, HARMONY_TOKENS)) as oss:
        call = 'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
        says = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>{call}"
        answer = (await oss.chat(says, tools=TOOLS, tool_choice=choice)).choices[0]
        assert answer.message.reasoning == "Hm."
        assert calls_of(answer.message) == [("get_weather", {"city": "Paris"})]
        assert answer.finish_reason == reason
        constraint = constraint_of(oss)
        assert constraint.structural_tag
        assert constraint.lenient
        assert not constraint.reasoning_end_token_ids


async def test_markup_of_special_tokens_can_be_held_to(tmp_path):
    special = model_folder(tmp_path / "hermes", QWEN, ("<tool_call>", "</tool_call>"))
    async with rig(special) as hermes:
        await hermes.chat("x", tools=STRICT)
        (tag,) = json.loads(constraint_of(hermes).structural_tag)["format"]["tags"]
        assert tag["triggers"][0] == {"type": "token", "token_id": 4096}


async def test_a_schema_that_cannot_be_held_to_is_the_tools_fault(qwen):
    qwen.gateway.worker.refusal = InvalidRequest("too deep", field="constraint.json_schema")
    with pytest.raises(openai.BadRequestError) as refused:
        await qwen.chat("x", tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tools"


async def test_tokenize_counts_tools(qwen):
    async with RawClient.connect(qwen.gateway.port) as client:
        plain = await client.request("POST", "/tokenize", {"messages": MESSAGES})
        with_tools = await client.request("POST", "/tokenize", {"messages": MESSAGES, "tools": TOOLS})
    assert with_tools.json["count"] > plain.json["count"]
    await qwen.chat("x", tools=TOOLS)
    assert list(qwen.gateway.worker.submits[0].prompt_token_ids) == with_tools.json["tokens"]
