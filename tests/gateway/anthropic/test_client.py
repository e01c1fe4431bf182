"""The official anthropic client, unchanged, against real services."""

import json

import anthropic
import pytest
from support.processes.stack import MODEL_NAME

STORY = [{"role": "user", "content": "Tell me a story about a dog and a river."}]
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(tandem_stack):
    with anthropic.Anthropic(base_url=tandem_stack.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def message(client):
    return client.messages.create(model=MODEL_NAME, max_tokens=40, messages=STORY, **GREEDY)


def test_a_message_has_text_and_counts(message):
    assert message.role == "assistant"
    assert message.stop_reason == "max_tokens"
    assert len(message.content[0].text.split()) > 10
    assert message.usage.output_tokens == 40
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10
    assert message._request_id


def test_a_stream_has_the_content_of_the_whole_message(client, message):
    with client.messages.stream(model=MODEL_NAME, max_tokens=40, messages=STORY, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 40)
    assert final.content[0].text == text


def test_a_stop_sequence_is_reported(client, message):
    word = message.content[0].text.split()[3]
    stopped = client.messages.create(
        model=MODEL_NAME, max_tokens=40, messages=STORY, stop_sequences=[word], system=[], **GREEDY
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text


def test_an_answer_continues_the_assistants_message(client):
    going_on = [*STORY, {"role": "assistant", "content": "Once upon a time"}]
    message = client.messages.create(model=MODEL_NAME, max_tokens=8, messages=going_on, **GREEDY)
    assert message.content[0].text.strip()


def test_tokens_are_counted_as_messages_count_them(client):
    counted = client.messages.count_tokens(model=MODEL_NAME, messages=STORY, system="Be kind.")
    usage = client.messages.create(model=MODEL_NAME, max_tokens=1, messages=STORY, system="Be kind.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_clients_own(client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude-9", max_tokens=1, messages=STORY)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model=MODEL_NAME, max_tokens=0, messages=STORY)
    assert "max_tokens" in wrong.value.message


def test_an_answer_follows_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(model=MODEL_NAME, max_tokens=200, messages=STORY, output_config=config, **GREEDY)
    assert isinstance(json.loads(message.content[0].text)["yes"], bool)
