"""Answers with many log-probabilities: bounded, encoded outside the event loop, sent as the client reads."""

import asyncio
import gc
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from support.gateway.rest_harness import RawClient, request_bytes, rest_side, until
from support.processes.loop_stalls import loop_stalls

from baton.gateway.core import Delta, GenerationRequest, TokenLogprob, TopLogprob, Usage
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.generation.output.logprobs import logprob_namer
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.openai.logprob_json import chat_json, columns_json, count_of, prompt_columns_json, prompt_json
from baton.gateway.openai.logprobs import CompletionLogprobColumns, LogprobForm, chat_logprobs, prompt_logprobs
from baton.gateway.serving.answer_size import MAX_STORED_LOGPROBS, limit_logprobs, most_logprobs
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"


@pytest.fixture(scope="module")
def named():
    """Makes a token's log-probability with 20 alternatives, as a worker's are named."""
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    name, draw = logprob_namer(tokenizer), random.Random(1)

    def make(num_top=20):
        ids = [draw.randrange(4096) for _ in range(num_top)]
        values = sorted((-draw.expovariate(0.1) for _ in ids), reverse=True)
        entry = types_pb2.TokenLogprobs(logprob=-0.5, rank=3, top_token_ids=ids, top_logprobs=values)
        return name(draw.randrange(4096), entry)

    yield make
    tokenizer.close()


def unpacked(entries):
    return [
        TokenLogprob(one.token, one.token_bytes, one.token_id, one.logprob, one.rank, tuple(one.top)) for one in entries
    ]


@pytest.mark.parametrize("num", [0, 1, 700])
@pytest.mark.parametrize("form", [LogprobForm(20), LogprobForm(3), LogprobForm(0), LogprobForm(2, True)])
def test_written_in_pieces_they_are_as_objects(named, form, num):
    packed = [named() for _ in range(num)]
    packed[:1] = [replace(named(), logprob=float("-inf"))] if num else []
    decode, encode = msgspec.json.decode, msgspec.json.encode
    for entries in (packed, unpacked(packed)):
        assert decode(chat_json(entries, form)) == decode(encode(chat_logprobs(unpacked(packed), form)))
        assert prompt_json(entries) == encode(prompt_logprobs(unpacked(packed)))
        whole = encode(CompletionLogprobColumns(form, 7).columns(unpacked(packed)))
        assert columns_json(CompletionLogprobColumns(form, 7), entries) == whole
        columns = CompletionLogprobColumns(form, 0)
        expected, rest = columns.prompt("a", 5, packed), columns.columns(packed)
        for field in expected.__struct_fields__:
            getattr(expected, field).extend(getattr(rest, field))
        again = CompletionLogprobColumns(form, 0)
        assert prompt_columns_json(again, ("a", 5), entries, entries) == encode(expected)


def test_packed_alternatives_are_a_sequence(named):
    entry = named(4)
    assert [one.token_id for one in entry.top] == list(entry.top.token_ids)
    assert entry.top[1] == list(entry.top)[1]
    assert list(entry.top[:2]) == list(entry.top)[:2]
    assert isinstance(entry.top[-1], TopLogprob)
    assert count_of([entry, entry]) == 10


def request(n=1, max_tokens=None, logprobs=None, prompt_logprobs=None, num_prompt=10, most=1000):
    sampling = types_pb2.SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    stop = types_pb2.StopConditions(max_tokens=max_tokens)
    return GenerationRequest("r", "m", [7] * num_prompt, sampling, stop, n=n, most_logprobs=most)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(n=10, max_tokens=10, logprobs=10), "logprobs"),
        (request(max_tokens=1001, logprobs=0), "logprobs"),
        (request(n=1001, logprobs=0), "logprobs"),
        (request(n=5, max_tokens=1, prompt_logprobs=20, num_prompt=11), "prompt_logprobs"),
    ],
)
def test_more_than_the_limit_is_refused_by_name(asked, field):
    with pytest.raises(InvalidRequest, match="--max-answer-logprobs") as caught:
        limit_logprobs([asked], 2048)
    assert caught.value.field == field


def test_prompts_of_one_answer_count_together():
    half = request(max_tokens=500, logprobs=0)
    assert limit_logprobs([half, half], 2048) == [half, half]
    with pytest.raises(InvalidRequest):
        limit_logprobs([half, half, half], 2048)


@pytest.mark.parametrize(
    "fits",
    [request(n=10, max_tokens=10, logprobs=9), request(max_tokens=10_000, logprobs=19, num_prompt=2000), request()],
)
def test_answers_within_the_limit_are_unchanged(fits):
    assert limit_logprobs([fits], 2048) == [fits]


def test_an_answer_without_max_tokens_ends_at_the_limit():
    (limited,) = limit_logprobs([request(n=4, logprobs=4)], 2048)
    assert limited.stop.max_tokens == 50
    (limited,) = limit_logprobs([request(n=2, logprobs=4, prompt_logprobs=9, num_prompt=31)], 2048)
    assert limited.stop.max_tokens == 40


def test_which_answers_have_a_limit():
    plain, asks = types_pb2.SamplingParams(), types_pb2.SamplingParams(logprobs=1)
    echoes = types_pb2.SamplingParams(logprobs=1, prompt_logprobs=1)
    assert most_logprobs(10**6, plain, streams=False, stores=False) == 0
    assert most_logprobs(10**6, asks, streams=False, stores=False) == 10**6
    assert most_logprobs(10**6, asks, streams=True, stores=False) == 0
    assert most_logprobs(10**6, asks, streams=True, stores=True) == MAX_STORED_LOGPROBS
    assert 0 < most_logprobs(10**6, echoes, streams=True, stores=False) < 10**6


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
COMPLETION = {"prompt": "Hi", "logprobs": 20}
PATHS = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]


def body_of(path, **wanted):
    if path == PATHS[2]:
        return {"token_ids": [7], "sampling_params": {"logprobs": 20, **wanted}}
    return {**(CHAT if path == PATHS[0] else COMPLETION), **wanted}


@pytest.mark.parametrize("path", PATHS)
async def test_the_request_that_kept_a_gateway_busy_is_refused(path):
    async with rest_side() as rest:
        answer = await rest.post(path, body_of(path, n=128, max_tokens=1500))
        assert answer.status == 400
        assert "--max-answer-logprobs" in answer.error["message"]
        assert "logprobs" in answer.error["param"]
        assert not rest.generator.started


NUM_CHOICES, NUM_TOKENS = 128, 370


async def emit_all(generation, entries):
    for index in range(generation.request.n):
        generation.emit("x" * NUM_TOKENS, index, token_ids=(7,) * NUM_TOKENS, logprobs=entries)
        generation.finish(index, "length")
        await asyncio.sleep(0)
    generation.done()


@pytest.mark.parametrize("path", PATHS)
async def test_the_largest_answer_keeps_the_event_loop_free(named, path):
    """Some 75 MB of JSON: the loop runs all the time, and the memory is given back."""
    entries = [named() for _ in range(NUM_TOKENS)]
    body = body_of(path, n=NUM_CHOICES, max_tokens=NUM_TOKENS)
    process = psutil.Process()
    async with rest_side() as rest, RawClient.connect(rest.port, limit=1 << 20) as client:
        gc.collect()
        before = process.memory_info().rss
        await client.send(request_bytes("POST", path, body))
        generation = await rest.generator.next()
        async with loop_stalls() as stalls:
            await emit_all(generation, entries)
            status, headers, size, start = await read_all(client)
        assert status == 200
        assert headers["transfer-encoding"] == "chunked"
        assert size > 20_000_000
        assert b'"logprobs":{"' in start
        rest.generator.started.clear()
        del generation
        await until(lambda: process.memory_info().rss - before < 60e6)
    assert stalls.longest < 0.05  # before it was ten seconds


async def read_all(client):
    """Reads a chunked answer; returns its status, headers, size and begin."""
    status, headers = await client.head()
    size, start = 0, b""
    while piece := await client.chunk():
        size += len(piece)
        start = start or piece[:1000]
    return status, headers, size, start


async def test_a_client_that_leaves_a_large_answer_ends_it(named):
    entries = [named() for _ in range(NUM_TOKENS)]
    async with rest_side() as rest:
        async with RawClient.connect(rest.port) as client:
            await client.send(request_bytes("POST", PATHS[0], {**CHAT, "n": 16, "max_tokens": NUM_TOKENS}))
            await emit_all(await rest.generator.next(), entries)
            await client.head()
        await until(lambda: not rest.admission.in_use)
        assert (await rest.request("GET", "/health")).status == 200


class SlowSink:
    writable = False

    def __init__(self):
        self.deltas = []
        self.usage = None

    def on_delta(self, delta):
        self.deltas.append(delta)

    def on_done(self, usage):
        self.usage = usage


def test_pending_data_of_a_slow_client_is_merged_into_bounded_pieces(named):
    sink = SlowSink()
    deltas = DeltaBuffer(sink)
    entry = named()
    for number in range(1000):
        deltas.emit(Delta(number % 2, str(number), (number,), [entry]))
    deltas.end(Usage(1, 1000, 0))
    sink.writable = True
    deltas.resume()
    assert max(len(delta.logprobs) for delta in sink.deltas) <= 256
    for index in (0, 1):
        mine = [delta for delta in sink.deltas if delta.index == index]
        assert [one for delta in mine for one in delta.token_ids] == list(range(index, 1000, 2))
        assert "".join(delta.text for delta in mine) == "".join(map(str, range(index, 1000, 2)))
    assert sink.usage is not None


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_responses_hold_their_log_probabilities_within_the_stricter_limit(store, stream):
    async with rest_side() as rest:
        rest.catalog.models()[0].info.max_model_len = 65_536
        body = {"input": "Hi", "top_logprobs": 20, "store": store, "stream": stream}
        answer = await rest.post("/v1/responses", {**body, "max_output_tokens": MAX_STORED_LOGPROBS // 21 + 1})
        assert answer.status == 400
        assert "log-probabilities" in answer.error["message"]
        async with RawClient.connect(rest.port) as client:
            await client.send(request_bytes("POST", "/v1/responses", body))
            generation = await rest.generator.next()
        assert generation.request.stop.max_tokens == MAX_STORED_LOGPROBS // 21
