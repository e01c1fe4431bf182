"""Large bodies, read by a process of their own as the gateway would read them itself."""

import gc
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gateway.rest_harness import rest_side, say
from support.processes.stack import wait_until

from baton.gateway.anthropic.types import MessagesRequest
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.remote_reader import REMOTE_BYTES, RemoteReader
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.schemas.requests import ChatCompletionRequest, CompletionRequest
from baton.rpc.errors import InvalidRequest

TEXT = "hello there " * 40_000
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
HUGE = {"type": "function", "function": {"name": "f", "parameters": {"minimum": 10**30}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, 2.5, None, True]}}}
BODIES = {
    "chat": (ChatCompletionRequest, CHAT),
    "tools": (ChatCompletionRequest, {**CHAT, "tools": [TOOL], "logit_bias": {"5": -1.5}, "temperature": 1}),
    "unknown keys": (ChatCompletionRequest, {**CHAT, "other": 1, "messages": [{**CHAT["messages"][0], "mood": "x"}]}),
    "parts": (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    "texts": (CompletionRequest, {"prompt": [TEXT, "b"], "max_tokens": 3}),
    "token ids": (CompletionRequest, {"prompt": [700] * 100_000}),
    "responses": (ResponsesRequest, {"input": [{"type": "message", "role": "user", "content": TEXT}]}),
    "messages": (MessagesRequest, {"model": "m", "max_tokens": 1, **CHAT}),
    "a wrong type": (ChatCompletionRequest, {**CHAT, "n": "two"}),
    "a missing field": (ChatCompletionRequest, {"other": TEXT}),
    "too many values": (CompletionRequest, {"prompt": [[]] * 100_000}),
    "an integer beyond 64 bits": (ChatCompletionRequest, {**CHAT, "tools": [HUGE]}),
}


class Received(SimpleNamespace):
    """A received body, and its log records."""

    def __init__(self, body):
        super().__init__(body=body, pieces=[body[:1000], bytearray(body[1000:])], headers={}, ignored=[])

    def ignore(self, names):
        self.ignored += names


@pytest.fixture(scope="module")
def reader():
    reader = RemoteReader()
    wait_until(lambda: reader.read(CompletionRequest, False, [as_json(BODIES["texts"][1])]), "the process reads")
    yield reader
    reader.close()


def as_json(body):
    return json.dumps(body).encode()


def outcome(decoder, body):
    received = Received(body)
    try:
        return decoder.read(received), received.ignored
    except InvalidRequest as error:
        return error.message, error.field


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_read_there_as_it_is_here(reader, name, strict):
    kind, fields = BODIES[name]
    body = as_json(fields)
    assert len(body) > REMOTE_BYTES
    assert outcome(BodyDecoder(kind, strict, reader), body) == outcome(BodyDecoder(kind, strict), body)


def test_a_body_that_is_no_json_is_refused_there_as_here(reader):
    body = as_json(CHAT)[:-1]
    assert outcome(BodyDecoder(ChatCompletionRequest, False, reader), body)[0].startswith("the body is not valid JSON")


def test_small_bodies_stay_here():
    reader = RemoteReader()
    assert reader.read(CompletionRequest, False, [b" " * REMOTE_BYTES]) is None
    assert reader.process.pid is None


def test_no_body_waits_for_the_reader_process_to_start():
    reader = RemoteReader()
    try:
        assert reader.read(CompletionRequest, False, [as_json(BODIES["texts"][1])]) is None
    finally:
        reader.close()


def test_a_process_that_ended_is_started_again():
    reader = RemoteReader()
    body = as_json(BODIES["texts"][1])
    try:
        wait_until(lambda: reader.read(CompletionRequest, False, [body]), "the process reads")
        first = reader.process.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert reader.read(CompletionRequest, False, [body]) is None
        wait_until(lambda: reader.read(CompletionRequest, False, [body]), "another process reads")
        assert reader.process.pid != first
    finally:
        reader.close()


def test_the_process_ends_with_the_gateways_end_of_the_socket():
    reader = RemoteReader()
    body = as_json(BODIES["texts"][1])
    wait_until(lambda: reader.read(CompletionRequest, False, [body]), "the process reads")
    reader.process.connection().close()
    assert os.waitid(os.P_PID, reader.process.pid, os.WEXITED | os.WNOWAIT).si_status == 0
    reader.close()


def test_the_process_has_a_tenth_of_the_gateways_share_of_the_cpus(reader):
    pid = reader.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == pid
    group = Path(f"/proc/{pid}/autogroup")
    assert not group.exists() or group.read_text().endswith(" nice 10\n")


async def test_a_large_chat_is_answered_by_any_reader():
    async with rest_side(say("Hi")) as rest:
        info = rest.catalog.models()[0].info
        info.max_model_len = 1 << 20
        answers = []
        for _ in range(20):
            answers.append(await rest.post("/v1/chat/completions", {**CHAT, "other": 1}))
            time.sleep(0.1)  # noqa: ASYNC251 - the process starts meanwhile
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-baton-ignored"] for answer in answers} == {"other"}
    gc.collect()
