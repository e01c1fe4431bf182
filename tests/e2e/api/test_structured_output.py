"""Structured outputs on a running stack, through the official client: prefill and decode on two workers."""

import json
import re
import threading

import grpc
import openai
import pytest
from support.processes.stack import MODEL_NAME

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SCHEMA = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"enum": ["cat", "dog", "bird"]}, "maxItems": 3},
    },
    "required": ["hero", "age", "friends"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "story", "strict": True, "schema": SCHEMA}}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"}
# Long enough for a prefill worker.
MESSAGES = [{"role": "user", "content": "Once upon a time there was a hero who had many friends. " * 12}]


@pytest.fixture(scope="module")
def client(tandem_stack):
    with openai.OpenAI(base_url=f"{tandem_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(text):
    story = json.loads(text)
    assert list(story) == ["hero", "age", "friends"]
    assert isinstance(story["hero"], str)
    assert 0 <= story["age"] <= 120
    assert set(story["friends"]) <= {"cat", "dog", "bird"}


def ask(client, **fields):
    return client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, **{"max_tokens": 300, "seed": 1, **fields}
    )


def test_a_strict_schema_holds_for_every_choice(client):
    answer = ask(client, response_format=STRICT, n=4, logprobs=True, temperature=1.0)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
        assert choice.logprobs.content


def test_a_streams_sum_is_the_document(client):
    whole = ask(client, response_format=STRICT, temperature=1.0).choices[0].message.content
    with ask(client, response_format=STRICT, temperature=1.0, stream=True) as chunks:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    check(whole)


def test_json_object_output_is_one_object(client):
    extra = {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}
    for fields in ({"response_format": {"type": "json_object"}}, {"extra_body": extra}):
        answer = ask(client, max_tokens=600, temperature=0.7, **fields).choices[0]
        assert answer.message.content.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.message.content), dict)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": r"\d{3}-[a-c]{1,4}x"}, r"\d{3}-[a-c]{1,4}x"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "the " ("cat" | "dog")'}, "the (cat|dog)"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"hero":.*\}'),
        ({"structural_tag": {"format": TAG}}, r"<a>\d\d</a>"),
    ],
)
def test_structured_outputs_hold_in_chats_and_completions(client, structured, pattern):
    extra = {"structured_outputs": structured}
    texts = [ask(client, extra_body=extra).choices[0].message.content]
    completion = client.completions.create(
        model=MODEL_NAME, prompt="Once upon a time", max_tokens=300, seed=2, extra_body=extra
    )
    texts.append(completion.choices[0].text)
    for text in texts:
        assert re.fullmatch(pattern, text, re.DOTALL), text


def with_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}}


def with_outputs(**structured):
    return {"extra_body": {"structured_outputs": structured}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (with_schema({"type": "ship"}), "response_format.json_schema.schema"),
        (with_schema({"not": {}}), "response_format.json_schema.schema"),
        (with_outputs(regex="("), "structured_outputs.regex"),
        (with_outputs(grammar="start: missing"), "structured_outputs.grammar"),
        (with_outputs(structural_tag={}), "structured_outputs.structural_tag"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_uncompilable_constraints_are_client_errors(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream, **fields)
    assert caught.value.param == param
    assert caught.value.message.count(param) >= 1


def test_bad_grammars_do_not_affect_other_requests(client):
    expected = ask(client, temperature=0, max_tokens=64).choices[0].message.content
    failures = []

    def bad():
        for _ in range(10):
            try:
                ask(client, extra_body={"structured_outputs": {"regex": "(" * 40}})
            except openai.BadRequestError:
                continue
            failures.append("accepted")

    threads = [threading.Thread(target=bad) for _ in range(4)]
    for thread in threads:
        thread.start()
    answers = [ask(client, temperature=0, max_tokens=64).choices[0].message.content for _ in range(4)]
    for thread in threads:
        thread.join()
    assert failures == []
    assert answers == [expected] * 4


def generate(stack, constraint):
    request = inference_pb2.GenerateRequest(
        text="Once upon a time", constraint=constraint, stop=types_pb2.StopConditions(max_tokens=100)
    )
    with grpc.insecure_channel(stack.config.grpc_listen) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        return "".join(response.text for response in call)


def test_the_public_grpc_api_takes_constraints(tandem_stack):
    assert re.fullmatch("[0-9]{4}", generate(tandem_stack, types_pb2.Constraint(regex="[0-9]{4}")))
    for bad, field in ((types_pb2.Constraint(), "constraint"), (types_pb2.Constraint(regex="("), "constraint.regex")):
        with pytest.raises(grpc.RpcError) as caught:
            generate(tandem_stack, bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in caught.value.details()
