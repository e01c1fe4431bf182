"""The official openai client's Responses API, unchanged, against real services."""

import openai
import pytest
from support.processes.stack import MODEL_NAME, wait_until

STORY = "Tell me a story about a dog and a river."


@pytest.fixture(scope="module")
def client(tandem_stack):
    with openai.OpenAI(base_url=f"{tandem_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def response(client):
    return client.responses.create(model=MODEL_NAME, input=STORY, temperature=0, max_output_tokens=40)


def test_a_response_has_text_and_counts(response):
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert len(response.output_text.split()) > 10
    assert response.usage.output_tokens == 40
    assert response.usage.total_tokens == response.usage.input_tokens + 40


def test_a_stream_has_the_content_of_the_whole_response(client, response):
    with client.responses.stream(model=MODEL_NAME, input=STORY, temperature=0, max_output_tokens=40) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text


def test_a_response_is_stored_and_continued(client, response):
    assert client.responses.retrieve(response.id).output_text == response.output_text
    follow = client.responses.create(
        model=MODEL_NAME, input="And then?", previous_response_id=response.id, max_output_tokens=4
    )
    assert follow.usage.input_tokens > response.usage.input_tokens + 40
    items = client.responses.input_items.list(follow.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    client.responses.delete(follow.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(follow.id)


def test_a_response_in_the_background_is_polled_for(client, response):
    made = client.responses.create(model=MODEL_NAME, input=STORY, temperature=0, max_output_tokens=40, background=True)
    assert made.status in ("queued", "in_progress", "incomplete")
    done = wait_until(lambda: ended(client.responses.retrieve(made.id)), "the response has ended", 60)
    assert done.output_text == response.output_text


def test_a_response_in_the_background_is_cancelled(client, tandem_stack):
    made = client.responses.create(
        model=MODEL_NAME, input=STORY, max_output_tokens=1500, background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def ended(response):
    return None if response.status in ("queued", "in_progress") else response


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="Hi")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model=MODEL_NAME, input="Hi", top_logprobs=99)
    assert wrong.value.param == "top_logprobs"
