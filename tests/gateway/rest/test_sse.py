"""Event streams under load: slow readers get merged pieces in bounded memory; the bytes are what SSE parsers expect."""

import asyncio
import json
import resource

from support.gateway.rest_harness import FakeGenerator, RawClient, request_bytes, rest_side

from baton.gateway.core import Delta, Usage
from baton.gateway.errors.http import HttpError
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.rest.sse import Envelope, error_event
from baton.gateway.schemas.answers import CompletionTokensDetails, PromptTokensDetails
from baton.gateway.schemas.answers import Usage as WireUsage

ENVELOPE = Envelope("chat.completion.chunk", 'id"1', 5, "mödel", "b-1", include_usage=True)


def test_an_envelope_closes_to_json():
    event = ENVELOPE.head + ENVELOPE.tail
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == {
        "id": 'id"1', "object": "chat.completion.chunk", "created": 5, "model": "mödel", "system_fingerprint": "b-1",
        "choices": [], "usage": None,
    }  # fmt: skip


def test_an_envelope_carries_a_usage():
    usage = WireUsage(1, 2, 3, PromptTokensDetails(1), CompletionTokensDetails(0))
    event = json.loads((ENVELOPE.head + ENVELOPE.tail_with(usage)).removeprefix(b"data: "))
    assert event["usage"] == {
        "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


def test_an_error_event_is_one_line_and_done():
    data = error_event(HttpError(500, "first\nsecond"))
    blocks = data.split(b"\n\n")
    assert blocks[1:] == [b"data: [DONE]", b""]
    assert json.loads(blocks[0].removeprefix(b"data: "))["error"]["message"] == "first\nsecond"


class MergingGenerator(FakeGenerator):
    """Holds deltas back as the real one does."""

    async def start(self, request, sink):
        generation = await super().start(request, sink)
        deltas = DeltaBuffer(sink)
        generation.deltas = deltas
        generation.resume = deltas.resume
        return generation


async def test_a_slow_reader_gets_everything_in_few_pieces_and_little_memory():
    num_tokens = 200_000
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    generator = MergingGenerator()
    async with rest_side(generator=generator) as rest, RawClient.connect(rest.port, limit=4096) as client:
        await client.send(request_bytes("POST", "/v1/chat/completions", body))
        deltas = (await generator.next()).deltas
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(num_tokens):
            deltas.emit(Delta(0, f"{number} ", (number,)))
            if number % 1000 == 0:
                await asyncio.sleep(0)
        assert not generator.started[0].sink.writable
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        deltas.emit(Delta(0, "", (), None, "stop"))
        deltas.end(Usage(1, num_tokens, 0))
        events = (await client.answer()).events
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text.split() == [str(number) for number in range(num_tokens)]
    assert len(events) < num_tokens / 2
    assert grown < 60 * 1024, f"{grown} KiB"
