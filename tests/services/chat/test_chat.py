"""`baton chat` and `baton complete` against scripted answers, and broken ones."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from baton.services import cli
from baton.services.chat import command, terminal
from baton.services.chat.answers import Part
from baton.services.chat.conversation import COMMANDS, Conversation
from baton.services.rest.client import RestClient

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(body).encode()


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


class Scripted(ThreadingHTTPServer):
    """Answers every POST with the next bytes of its script, and records the bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[bytes] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status, self.kind = 200, "text/event-stream; charset=utf-8"
        self.models: Any = {"data": [{"id": "tales"}]}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._answer(200, "application/json", json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body))
        self._answer(self.server.status, self.server.kind, self.server.script.pop(0))

    def _answer(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def talk(server, monkeypatch, tmp_path):
    """Runs a conversation of these lines. Returns the exit code."""

    def run(name, *lines, flags=()):
        left = list(lines)

        def entered(prompt):
            if not left:
                raise EOFError
            if isinstance(left[0], type):
                raise left.pop(0)
            return left.pop(0)

        monkeypatch.setattr("builtins.input", entered)
        monkeypatch.setattr("sys.stdin", _Terminal())
        history = ("--history", str(tmp_path / "history"))
        return cli.main([name, server.url, *history, *flags], {})

    return run


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_question_prints_the_answer_alone(server, capsys):
    server.script = [delta(role="assistant") + delta(content="Once ") + b": ping\n\n" + delta(content="é") + DONE]
    words = ["chat", "--url", f"{server.url}/v1/", "-q", "Hi", "--system", "Be brief", "--temperature", "0"]
    assert cli.main([*words, "--max-tokens", "5", "--fields", '{"top_p": 0.5}'], {}) == 0
    assert capsys.readouterr().out == "Once é\n"
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "tales",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "stream": True, "temperature": 0.0, "max_tokens": 5, "top_p": 0.5,
    }  # fmt: skip


def test_what_is_piped_in_is_the_question(server, capsys, monkeypatch):
    server.script = [event({"choices": [{"index": 0, "text": " upon"}]}) + DONE]
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    assert cli.main(["complete", server.url, "--model", "other"], {}) == 0
    assert capsys.readouterr().out == " upon\n"
    assert server.asked == [("/v1/completions", {"model": "other", "prompt": "Once", "stream": True})]


def test_a_conversation_remembers_and_its_commands_change_it(server, talk, tmp_path):
    server.script = [delta(content=text) + DONE for text in ("one", "two", "two again", "four")]
    saved = tmp_path / "chat.json"
    code = talk("chat", "a", "b", "/retry", f"/save {saved}", "/clear", "/system Be kind", "//c", "/exit", "never")
    assert code == 0
    contents = [[message["content"] for message in body["messages"]] for _, body in server.asked]
    assert contents == [["a"], ["a", "one", "b"], ["a", "one", "b"], ["Be kind", "/c"]]
    assert [message["content"] for message in json.loads(saved.read_text())["messages"]] == [
        "a", "one", "b", "two again",
    ]  # fmt: skip


def test_messages_of_several_lines(server, talk):
    server.script = [delta(content="x") + DONE] * 3
    assert talk("chat", "a \\", "b", '"""c', "d", 'e"""', '"""', "f", '"""') == 0
    assert [body["messages"][-1]["content"] for _, body in server.asked] == ["a \nb", "c\nd\ne", "f"]


def test_an_interrupt_drops_what_is_entered_and_the_end_of_input_leaves(server, talk, capsys):
    server.script = [delta(content="x") + DONE]
    assert talk("chat", "half \\", KeyboardInterrupt, "", "whole") == 0
    assert [body["messages"] for _, body in server.asked] == [[{"role": "user", "content": "whole"}]]
    assert "Ctrl-D or /exit leaves" in capsys.readouterr().out


def test_an_error_is_shown_and_the_conversation_goes_on_without_the_message(server, talk, capsys):
    server.script = [event({"error": {"message": "the prompt is too long"}}), delta(content="x") + DONE]
    assert talk("chat", "a", "b") == 0
    assert capsys.readouterr().err == "baton chat: the prompt is too long\n"
    assert [body["messages"] for _, body in server.asked][1] == [{"role": "user", "content": "b"}]


def test_a_failed_retry_keeps_the_conversation(server, talk):
    server.script = [delta(content="one") + DONE, event({"error": {"message": "busy"}}), delta(content="two") + DONE]
    assert talk("chat", "a", "/retry", "b") == 0
    assert [message["content"] for message in server.asked[-1][1]["messages"]] == ["a", "one", "b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hlep", "there is no command /hlep; did you mean /help? (//hlep sends it as text)"),
        ("/xyzzy", "there is no command /xyzzy; /help lists the commands"),
        ("/save", "/save needs a file"),
        ("/save /no/such/folder/x", "cannot be written: No such file or directory"),
        ("/retry", "there is no message to answer again"),
    ],
)
def test_a_command_that_makes_no_sense_is_explained(talk, capsys, line, said):
    assert talk("chat", line) == 0
    assert said in capsys.readouterr().err


def test_help_lists_every_command(talk, capsys):
    assert talk("chat", "/help") == 0
    printed = capsys.readouterr().out
    assert all(f"  /{name}" in printed for name in COMMANDS)


@pytest.mark.parametrize(
    ("status", "kind", "answer", "said"),
    [
        (400, "application/json", b'{"error": {"message": "no such model"}}', "no such model"),
        (401, "application/json", b'{"error": {"message": "no key."}}', "no key. Give a key: --api-key"),
        (502, "text/html", b"<html>", "the gateway answered 502 Bad Gateway"),
        (200, "text/html", b"<html>", "the answer is no event stream: is this a gateway?"),
        (200, "text/event-stream", b"data: {\n\n", "an event is not JSON"),
        (200, "text/event-stream", b"data: 1\n\n", "an event is no object"),
        (200, "text/event-stream", delta(content="half"), "ended the connection in the middle of the answer"),
        (200, "text/event-stream", event({"error": "out of memory"}), "out of memory"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_code_1(server, capsys, status, kind, answer, said):
    server.status, server.kind, server.script = status, kind, [answer]
    assert cli.main(["chat", server.url, "-q", "Hi"], {}) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.startswith("baton chat: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{}]}])
def test_a_server_without_models_is_named(server, capsys, models):
    server.models = models
    assert cli.main(["chat", server.url, "-q", "Hi"], {}) == 1
    assert "/v1/models lists no model; give --model NAME" in capsys.readouterr().err


def test_where_no_server_is_it_says_how_to_start_one(server, capsys):
    server.shutdown()
    server.server_close()
    assert cli.main(["complete", server.url, "-q", "Hi"], {}) == 1
    assert "cannot be reached: [Errno 111] Connection refused; `baton serve` starts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fields", "{"), "--fields is not valid JSON"),
        (("--fields", "[1]"), "--fields is [1]; it must be a JSON object"),
        (("--fields", '{"stream": false}'), "--fields has stream, which this command sets itself"),
        (("--url", "example.com"), "give http://HOST:PORT or https://HOST:PORT; a text to answer is given by -q"),
        (("--temperature", "-1"), "--temperature: '-1' is not allowed; give a number, at least 0.0, or none"),
        (("--max-tokens", "0"), "--max-tokens: '0' is not allowed"),
        (("--modle", "x"), "unknown argument '--modle'; did you mean --model?"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(capsys, flags, said):
    assert cli.main(["chat", *flags, "-q", "Hi"], {}) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_an_answer_cannot_steer_the_terminal_and_reasoning_is_dim():
    stream, notes = _Terminal(), io.StringIO()
    answer = terminal.Answer(stream, notes)
    parts = [Part(reasoning="hm\x9b2J"), Part(text="a\x1b]0;x\x07\tb\r\n"), Part(finish_reason="length")]
    answer.show(parts)
    assert stream.getvalue() == "\x1b[2mhm2J\x1b[0m\n\na]0;x\tb\n\n"
    assert notes.getvalue() == "(cut at the most tokens: --max-tokens N allows more)\n"


def test_in_a_pipe_an_answer_is_as_it_was_sent_without_reasoning():
    stream = io.StringIO()
    terminal.Answer(stream, io.StringIO()).show([Part(reasoning="hm"), Part(text="a\x1b"), Part(call="\nf {}")])
    assert stream.getvalue() == "a\x1b\nf {}\n"


def test_tool_calls_are_shown_with_their_arguments(server, capsys):
    first = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
    server.script = [delta(tool_calls=[first]) + delta(tool_calls=[rest]) + DONE]
    assert cli.main(["chat", server.url, "-q", "Hi"], {}) == 0
    assert capsys.readouterr().out == '\nweather {"city": "Oslo"}\n'


def test_an_interrupted_answer_is_kept_as_far_as_it_came(monkeypatch):
    def parts(*args):
        yield Part(text="Once")
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.services.chat.answers.chat", parts)
    conversation = Conversation(RestClient("http://127.0.0.1:1"), "m", "", {})
    assert conversation.enter("Hi")
    assert [turn["content"] for turn in conversation.turns] == ["Hi", "Once"]


def test_entered_lines_are_kept_for_their_owner_alone(talk, server, tmp_path):
    assert talk("chat", "/help") == 0
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    assert talk("chat", "/help", flags=("--history", "none")) == 0


def test_the_history_lies_in_the_state_folder(tmp_path):
    config = command.ChatConfig()
    assert config.history_path({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "baton" / "history"
    assert command.ChatConfig(history="none").history_path({}) is None
