"""Other servers' fields: honoured where there is an equal one, refused where they change the answer, else listed."""

import pytest
from support.gateway.rest_harness import rest_side, say

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BASES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def asked(path, **fields):
    """The generation that a request asks for, and its answer."""
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, BASES[path] | fields)
        assert answer.status == 200, answer.body
        return rest.generator.started[0].request, answer.headers.get("x-baton-ignored", "")


async def refused(path, **fields):
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, BASES[path] | fields)
        assert answer.status == 400, answer.body
        assert not rest.generator.started
        assert rest.admission.in_use == 0
        return answer.error


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"guided_regex": "[ab]+", "guided_decoding_backend": "auto"}, {"regex": "[ab]+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"format": "json"}, {"json_object": True}),
        ({"format": SCHEMA}, {"json": SCHEMA}),
    ],
)
async def test_older_forms_are_structured_outputs(path, fields, equal):
    request, ignored = await asked(path, **fields)
    expected, _ = await asked(path, structured_outputs=equal)
    assert request.constraint is not None
    assert request.constraint == expected.constraint
    assert request.constraint_field == next(iter(fields))
    assert ignored == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "regex": "b"}, "regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
async def test_a_wrong_form_is_named_as_its_client_names_it(fields, param):
    error = await refused(CHAT, **fields)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "equal"),
    [
        (CHAT, {"max_new_tokens": 7}, {"max_tokens": 7}),
        (CHAT, {"n_predict": 7}, {"max_completion_tokens": 7}),
        (CHAT, {"n_predict": -1}, {}),
        (CHAT, {"max_tokens": -1}, {}),
        (COMPLETION, {"n_predict": 7}, {"max_tokens": 7}),
        (RESPONSES, {"max_new_tokens": 7}, {"max_output_tokens": 7}),
        (CHAT, {"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        (CHAT, {"random_seed": 5}, {"seed": 5}),
        (COMPLETION, {"no_stop_trim": True, "stop": "x"}, {"include_stop_str_in_output": True, "stop": "x"}),
        (CHAT, {"max_new_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        (COMPLETION, {"num_predict": 7}, {"max_tokens": 7}),
        (CHAT, {"num_predict": -1}, {}),
        (CHAT, {"min_new_tokens": 2}, {"min_tokens": 2}),
        (CHAT, {"stop_sequences": ["x"]}, {"stop": ["x"]}),
        (CHAT, {"do_sample": False}, {"temperature": 0}),
        (CHAT, {"do_sample": True}, {}),
        (CHAT, {"format": ""}, {}),
        (CHAT, {"think": "low"}, {"reasoning_effort": "low"}),
        (CHAT, {"thinking": {"type": "auto"}}, {}),
    ],
)
async def test_other_names_mean_the_same_field(path, fields, equal):
    request, ignored = await asked(path, **fields)
    expected, _ = await asked(path, **equal)
    assert (request.sampling, request.stop, ignored) == (expected.sampling, expected.stop, "")


async def test_thinking_is_a_variable_of_the_template():
    async with rest_side(say("ok")) as rest:
        (model,) = rest.catalog.models()
        seen = []
        encode = model.encode_chat

        async def encode_chat(*args, **kwargs):
            seen.append(kwargs["variables"])
            return await encode(*args, **kwargs)

        model.encode_chat = encode_chat
        await rest.chat(enable_thinking=False)
        await rest.chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
        answer = await rest.complete(enable_thinking=False)
        await rest.chat(think=False)
        await rest.chat(thinking={"type": "disabled"})
        await rest.chat(think="high")
    off = {"enable_thinking": False, "thinking": False}
    on = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert seen == [off, {"enable_thinking": True, "thinking": False}, off, off, on]
    assert answer.headers["x-baton-ignored"] == "enable_thinking"


@pytest.mark.parametrize(
    ("name", "neutral", "wanted"),
    [
        ("lora_path", [None, ""], "adapter"),
        ("logits_processors", [None, []], ["x"]),
        ("custom_logit_processor", [""], "x"),
        ("typical_p", [1.0], 0.5),
        ("mirostat", [0], 2),
        ("dry_multiplier", [0.0], 0.8),
        ("xtc_probability", [0], 0.5),
        ("separate_reasoning", [True], False),
        ("safe_prompt", [False], True),
        ("stop_regex", ["", []], "a+"),
        ("web_search_options", [None], {"search_context_size": "low"}),
        ("best_of", [None, 1], 2),
    ],
)
async def test_fields_that_change_the_answer_are_refused_unless_neutral(name, neutral, wanted):
    for value in neutral:
        assert await asked(CHAT, **{name: value})
    assert (await refused(CHAT, **{name: wanted}))["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_new_tokens": 7, "max_tokens": 8}, "max_new_tokens"),
        ({"max_new_tokens": 7, "max_completion_tokens": 8}, "max_new_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"random_seed": 5, "seed": 6}, "random_seed"),
        ({"do_sample": False, "temperature": 1.0}, "do_sample"),
        ({"think": True, "enable_thinking": False}, "think"),
        ({"think": "much"}, "think"),
        ({"thinking": {"type": ["x"]}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"format": "xml"}, "format"),
    ],
)
async def test_two_names_must_not_disagree(fields, param):
    assert (await refused(CHAT, **fields))["param"] == param


async def test_fields_without_effect_are_listed():
    _, ignored = await asked(CHAT, prediction={"type": "content", "content": "x"}, cache_prompt=False, id_slot=3)
    assert ignored == "prediction, cache_prompt, id_slot"
    _, ignored = await asked(CHAT, service_tier="auto", cache_prompt=True, id_slot=-1, verbosity="medium", user="")
    assert ignored == ""
    # A response tells these of its request again.
    _, ignored = await asked(RESPONSES, user="me", prompt_cache_key="k", safety_identifier="s", verbosity="low")
    assert ignored == "verbosity"
    _, ignored = await asked(RESPONSES, include=["web_search_call.results"], reasoning={"summary": "auto"})
    assert ignored == "include[0] (web_search_call.results), reasoning.summary"
