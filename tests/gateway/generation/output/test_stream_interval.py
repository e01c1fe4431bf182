"""Streams whose events carry several tokens."""

import json

import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import running

from baton.gateway.core import Delta, Usage
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.parsing.events import ContentText

END = Usage(1, 9, 0)


class Sink:
    """Records what it receives."""

    def __init__(self):
        self.writable = True
        self.deltas = []
        self.end = None

    def on_delta(self, delta):
        assert self.end is None
        self.deltas.append(delta)

    def on_done(self, usage):
        self.end = usage

    def on_error(self, error):
        self.end = error

    def texts(self, index=0):
        return [delta.text for delta in self.deltas if delta.index == index]


def emit(buffer, text, index=0, **fields):
    for place, letter in enumerate(text):
        buffer.emit(Delta(index, letter, (place,), **fields))


@pytest.mark.parametrize(
    ("interval", "texts"),
    [(1, list("abcdefgh")), (3, ["a", "bcd", "efg", "h"]), (7, ["a", "bcdefgh"]), (100, ["a", "bcdefgh"])],
)
def test_the_first_token_comes_at_once_and_the_others_together(interval, texts):
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=interval)
    emit(buffer, "abcdefgh")
    buffer.emit(Delta(0, "", (), finish_reason="stop"))
    buffer.end(END)
    assert [text for text in sink.texts() if text] == texts
    assert [token for delta in sink.deltas for token in delta.token_ids] == list(range(8))
    assert (sink.deltas[-1].finish_reason, sink.end) == ("stop", END)


def test_choices_are_gathered_apart():
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=2)
    for one, two in zip("abc", "xyz", strict=True):
        emit(buffer, one, 0)
        emit(buffer, two, 1)
    assert (sink.texts(0), sink.texts(1)) == (["a", "bc"], ["x", "yz"])


def test_a_failure_passes_on_what_was_gathered_first():
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=5)
    emit(buffer, "abc")
    buffer.end(END)
    assert (sink.texts(), sink.end) == (["a", "bc"], END)


def test_a_slow_client_and_gathering_lose_nothing():
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=2)
    emit(buffer, "ab")
    sink.writable = False
    emit(buffer, "cdef")
    sink.writable = True
    buffer.resume()
    emit(buffer, "g")
    buffer.end(END)
    assert "".join(sink.texts()) == "abcdefg"


def test_parsed_events_and_a_flush_keep_their_order():
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=4)
    for letter in "abc":
        buffer.emit(Delta(0, letter, (1,), events=[ContentText(letter)]))
    buffer.flush(0)
    buffer.flush(0)
    assert [delta.events for delta in sink.deltas] == [[ContentText("a")], [ContentText("bc")]]


def test_nothing_is_passed_on_after_the_client_is_gone():
    sink = Sink()
    buffer = DeltaBuffer(sink, interval=4)
    emit(buffer, "abc")
    buffer.close()
    buffer.end(END)
    assert (sink.texts(), sink.end) == (["a"], None)


async def test_the_setting_reaches_the_stream():
    token_ids = [260, 261, 262, 263, 264, 265, 266, 4]
    async with running(lambda submit: token_ids, stream_interval=3) as gateway, RawClient.connect(gateway.port) as rest:
        body = {"prompt": "Hi", "stream": True, "return_token_ids": True, "max_tokens": 20}
        answer = await rest.request("POST", "/v1/completions", body)
        counts = [len(event["choices"][0].get("token_ids") or ()) for event in answer.events]
        assert [count for count in counts if count] == [1, 3, 3, 1]
        whole = await rest.request("POST", "/v1/completions", {**body, "stream": False})
        texts = "".join(event["choices"][0]["text"] for event in answer.events)
        assert texts == json.loads(whole.body)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "interval", "expected"),
    [
        ({"stream": True}, 1, 0),
        ({"stream": True}, 3, 3),
        ({}, 1, 32),
        ({"stop": ["x"]}, 1, 0),
        ({"stream": True, "stop": ["x"]}, 3, 0),
    ],
)
async def test_workers_send_tokens_together_where_nobody_needs_each_at_once(fields, interval, expected):
    async with (
        running(lambda submit: [260, 4], stream_interval=interval) as gateway,
        RawClient.connect(gateway.port) as rest,
    ):
        answer = await rest.request("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 20, **fields})
        assert answer.status == 200
        assert [submit.tokens_per_message for submit in gateway.worker.submits] == [expected]
