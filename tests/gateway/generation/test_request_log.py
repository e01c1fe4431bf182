"""The log of requests and outputs: off unless asked for, and bounded."""

import logging

import pytest
from support.gateway.rest_harness import FakeGenerator, rest_side, sample_model, say, until

from baton.gateway.generation.request_log import NAME, LoggedGenerator, RequestLogSettings, cut
from baton.gateway.models.served import ModelCatalog
from baton.rpc.errors import Unavailable

LONG = "word " * 500


async def logged(caplog, settings, script, **fields):
    """Sends one completion and returns the log's records."""
    inner = FakeGenerator(script)
    generator = LoggedGenerator(inner, ModelCatalog([sample_model()]), settings)
    with caplog.at_level(logging.INFO, logger=NAME):
        async with rest_side(generator=generator) as rest:
            answer = await rest.complete(**{"prompt": "Tell me", "request_id": "mine", **fields})
            await until(lambda: inner.started)
    return answer, [record for record in caplog.records if record.name == NAME]


async def test_a_request_and_its_output_are_logged(caplog):
    settings = RequestLogSettings(requests=True, outputs=True)
    answer, (request, output) = await logged(caplog, settings, say("a dog", " runs"), temperature=0.5, max_tokens=9)
    assert answer.json["choices"][0]["text"] == "a dog runs"
    assert (request.request_id, request.prompt, request.num_prompt_tokens) == (
        "mine",
        "'<|bos|>Tell me'",
        len(request.prompt_token_ids),
    )
    assert "temperature: 0.5" in request.sampling
    assert "max_tokens: 9" in request.stop
    assert (output.output, output.ending, output.num_tokens) == ("'a dog runs'", "stop", 2)


@pytest.mark.parametrize(("requests", "outputs", "messages"), [(True, False, ["request"]), (False, True, ["output"])])
async def test_each_is_logged_on_its_own(caplog, requests, outputs, messages):
    _, records = await logged(caplog, RequestLogSettings(requests, outputs), say("x"))
    assert [record.message for record in records] == messages


async def test_lines_are_bounded(caplog):
    settings = RequestLogSettings(requests=True, outputs=True, max_len=20)
    _, (request, output) = await logged(caplog, settings, say(*LONG.split(" ")), prompt=LONG)
    assert len(request.prompt_token_ids) <= 20
    assert len(request.prompt) <= 25
    assert output.output.endswith("...")
    assert len(output.output) <= 25


async def test_a_failure_is_logged_with_what_there_was(caplog):
    def script(generation):
        generation.emit("a dog")
        generation.sink.on_error(Unavailable("gone"))

    _, (output,) = await logged(caplog, RequestLogSettings(outputs=True), script)
    assert (output.output, output.ending) == ("'a dog'", "UNAVAILABLE")


def test_texts_stay_on_one_line():
    assert cut("a\nb", 10) == "'a\\nb'"
