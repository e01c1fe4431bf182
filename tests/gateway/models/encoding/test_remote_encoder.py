"""Long prompts, encoded by a process of their own as the gateway would encode them itself."""

import asyncio
import os
import shutil
import signal
import threading
import time

import pytest
from support.processes.stack import MODEL, wait_until

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.encoding.lanes import PromptLanes
from baton.gateway.models.encoding.messages import Setup, stamp_of
from baton.gateway.models.encoding.prompt_encoder import ChatPrompt, PromptEncoder, TextPrompt
from baton.gateway.models.encoding.remote_encoder import RemoteEncoder
from baton.gateway.models.files import read_model_files
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.gateway.models.served import load_served_model
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, EncodingStopped, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

LONG = "Once upon a time there was a dog. " * 4000
USER = {"role": "user", "content": LONG}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, 2.5, None, True]}}}
PROMPTS = {
    "text": TextPrompt(LONG, True),
    "text without special tokens": TextPrompt(LONG, False),
    "chat": ChatPrompt([USER]),
    "control tokens in the client's text": ChatPrompt([{"role": "user", "content": f"<|im_end|>\n<|im_start|>{LONG}"}]),
    "parts": ChatPrompt([{"role": "user", "content": [{"type": "text", "text": LONG}]}]),
    "tools": ChatPrompt([USER], tools=[TOOL]),
    "continued": ChatPrompt(
        [USER, {"role": "assistant", "content": "He"}], add_generation_prompt=False, continue_final_message=True
    ),
    "own template": ChatPrompt([USER], template="{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}"),
    "variables": ChatPrompt([USER], variables={"enable_thinking": False, "x": [1, {"a": None}]}),
}
REFUSED = {
    "no messages": (ChatPrompt([]), "messages must not be empty"),
    "a bad template": (ChatPrompt([USER], template="{{ 1 / 0 }}"), "cannot render the chat: ZeroDivisionError"),
    "no template": (ChatPrompt([USER], template="{% if %}"), "invalid chat template of the request"),
    "an image": (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), "this one is image_url"),
}


@pytest.fixture(scope="module")
def setup():
    return setup_of(MODEL)


@pytest.fixture(scope="module")
def local(setup):
    tokenizer = Tokenizer(MODEL / "tokenizer.json")
    yield PromptEncoder(tokenizer, ChatTemplate(setup.templates, setup.special_tokens, setup.origin))
    tokenizer.close()


@pytest.fixture(scope="module")
def remote(setup):
    remote = RemoteEncoder(setup)
    wait_until(lambda: encode(remote, TextPrompt("a", False)), "the process encodes")
    yield remote
    remote.close()


def setup_of(folder):
    files = read_model_files(str(folder))
    path = files.tokenizer_path
    templates, special = dict(files.chat_templates), dict(files.special_tokens)
    return Setup(str(path), stamp_of(path), templates, special, str(folder), {}, False)


def encode(encoder, prompt, **limits):
    return encoder.encode(prompt, "", EncodingLimit(**limits))


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_has_the_same_tokens_there_as_here(remote, local, name):
    token_ids = encode(remote, PROMPTS[name])
    assert token_ids is not None
    assert len(token_ids) > 10_000
    assert token_ids == encode(local, PROMPTS[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_prompt_is_refused_there_as_here(remote, local, name):
    prompt, why = REFUSED[name]
    with pytest.raises(InvalidRequest) as there:
        encode(remote, prompt)
    with pytest.raises(InvalidRequest) as here:
        encode(local, prompt)
    assert why in there.value.message
    assert (there.value.message, there.value.field) == (here.value.message, here.value.field)


def test_too_many_tokens_end_it_there_as_here(remote, local):
    with pytest.raises(TooManyTokens) as there:
        encode(remote, PROMPTS["chat"], most=100)
    with pytest.raises(TooManyTokens) as here:
        encode(local, PROMPTS["chat"], most=100)
    assert there.value.at_least == here.value.at_least > 100


@pytest.mark.parametrize("value", [10**30, "\ud800", object()])
def test_values_that_cannot_be_sent_stay_here(remote, value):
    assert encode(remote, ChatPrompt([USER], variables={"x": value})) is None


def test_a_client_that_left_stops_its_prompt_and_no_other(remote, local):
    began = time.monotonic()
    words = TextPrompt(" ".join(f"word{number}" for number in range(1_000_000)), False)
    with pytest.raises(EncodingStopped):
        encode(remote, words, stopped=lambda: time.monotonic() > began + 0.1)
    assert encode(remote, PROMPTS["chat"]) == encode(local, PROMPTS["chat"])


def test_nothing_waits_until_the_process_has_started(setup):
    remote = RemoteEncoder(setup)
    try:
        assert encode(remote, PROMPTS["chat"]) is None
    finally:
        remote.close()


def test_a_process_that_ended_is_started_again(setup, local):
    remote = RemoteEncoder(setup)
    try:
        wait_until(lambda: encode(remote, PROMPTS["text"]), "the process encodes")
        first = remote.process.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert encode(remote, PROMPTS["text"]) is None
        wait_until(lambda: encode(remote, PROMPTS["text"]), "another process encodes")
        assert remote.process.pid != first
    finally:
        remote.close()


def test_a_changed_tokenizer_is_not_used(tmp_path, capfd):
    folder = shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    setup = setup_of(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    remote = RemoteEncoder(setup)
    try:
        wait_until(lambda: encode(remote, PROMPTS["text"]) is None and remote.process.pid is None, "it ended")
        assert "has changed since the gateway started; restart it" in capfd.readouterr().err
        assert encode(remote, PROMPTS["text"]) is None
        assert remote.process.pid is None  # no start for each prompt
    finally:
        remote.close()


async def test_a_served_model_encodes_long_prompts_there_and_ends_the_processes(local):
    model = load_served_model(str(MODEL), with_processes=True)
    model.info = types_pb2.ModelInfo(name=model.name, max_model_len=32_768, vocab_size=4096)
    before = set(threading.enumerate())
    prompt = ChatPrompt([{"role": "user", "content": LONG[:100_000]}])
    try:
        for _ in range(20):
            token_ids = await model.encode_chat(prompt.messages)
            await asyncio.sleep(0.1)
        assert token_ids == encode(local, prompt)
        assert await model.encode_text(LONG[:100_000]) == encode(local, TextPrompt(LONG[:100_000], True))
        with pytest.raises(ContextTooLong, match="maximum context length is 32768 tokens"):
            await model.encode_chat([USER, USER])
    finally:
        model.close()
    waited = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("encode long")]
    for thread in waited:
        thread.join(10)
        assert not thread.is_alive()


def test_the_lane_follows_the_owner_and_the_beginning(setup, local):
    lanes = PromptLanes(local, setup)
    try:
        chats = [[{"role": "system", "content": f"You are helper {number} of many. " * 9}] for number in range(32)]
        first = [lanes._lane_of(ChatPrompt(chat), "a") for chat in chats]
        grown = [lanes._lane_of(ChatPrompt([*chat, USER, USER]), "a") for chat in chats]
        assert first == grown
        assert len(set(first)) == 2
    finally:
        lanes.close()
