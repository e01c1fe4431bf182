"""`baton chat` and `baton complete` with the sample model, in a terminal and in pipes."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
from support.processes.stack import Stack, start_stack
from support.processes.terminal import Terminal


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Stack:
    with ExitStack() as cleanup:
        yield start_stack(tmp_path_factory.mktemp("chat"), cleanup, executor="cpu", prefill_workers=0)


def baton(*words, text=None):
    program = [sys.executable, "-m", "baton.services.cli", *words]
    return subprocess.run(program, input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("name", "path"), [("chat", "chat/completions"), ("complete", "completions")])
def test_an_answer_in_a_pipe_is_what_the_api_answers(fleet, name, path):
    prompt = "Tell me a story about a dog."
    asked = {"messages": [{"role": "user", "content": prompt}]} if name == "chat" else {"prompt": prompt}
    _, answer = fleet.post(f"/v1/{path}", {**asked, "temperature": 0, "max_tokens": 12})
    choice = answer["choices"][0]
    expected = choice["message"]["content"] if name == "chat" else choice["text"]
    flags = ("--url", fleet.url, "--temperature", "0", "--max-tokens", "12")
    done = baton(name, *flags, text=prompt)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n")
    assert done.stderr == "(cut at the most tokens: --max-tokens N allows more)\n"


def test_a_refusal_of_the_server_is_one_line(fleet):
    done = baton("chat", fleet.url, "-q", "Hi", "--model", "gpt-9")
    assert done.returncode == 1
    assert "gpt-9" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_conversation_on_a_terminal_streams_stops_and_remembers(fleet, tmp_path):
    fields = json.dumps({"ignore_eos": True})
    environ = {"TERM": "xterm", "BATON_CHAT_HISTORY": str(tmp_path / "history")}
    chat = Terminal("chat", fleet.url, "--max-tokens", "60000", "--fields", fields, environ=environ)
    try:
        chat.until("/help lists the commands")
        chat.until("> ")
        chat.press("Tell me a story about a cat.\n")
        chat.until("cat.\r\n")
        begun = len(chat.seen)
        chat.until_longer(begun + 20)
        chat.process.send_signal(signal.SIGINT)
        chat.until("> ")
        fleet.wait_all_blocks_back()
        saved = tmp_path / "saved.json"
        chat.press(f"/save {saved}\n")
        chat.until("2 messages are in")
        chat.press("/exit\n")
        assert chat.end() == 0
        assert chat.process.stderr.read() == b"(stopped)\n"
        user, assistant = json.loads(saved.read_text())["messages"]
        assert user == {"role": "user", "content": "Tell me a story about a cat."}
        assert len(assistant["content"]) >= 10
    finally:
        chat.close()
    assert "Tell me a story about a cat." in (tmp_path / "history").read_text()
