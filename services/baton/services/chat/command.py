"""`baton chat` and `baton complete`: a conversation, or completions, in a terminal or a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence

from baton.services import settings
from baton.services.chat import answers, terminal
from baton.services.chat.config import ChatConfig, ClientConfig
from baton.services.chat.conversation import Conversation
from baton.services.rest.client import RestError, Unreachable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
EXIT_INTERRUPTED = 130

_STDIN = "-"
_ABOUT = {
    "chat": "Chats with a model of a gateway. Its URL may come first: baton chat http://HOST:PORT.",
    "complete": "Continues texts with a model of a gateway. Its URL may come first: baton complete http://HOST:PORT.",
}


def main(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs `baton chat` or `baton complete`. Returns 1 if the gateway refuses, 2 for a wrong setting."""
    kind = ChatConfig if name == "chat" else ClientConfig
    try:
        (config,) = settings.load(name, (kind,), argv, environ, _ABOUT[name])
    except settings.SettingsError as error:
        print(f"baton {name}: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what this terminal cannot show
    try:
        return _chat(config, environ) if name == "chat" else _complete(config, environ)
    except RestError as error:
        hint = "; `baton serve` starts a gateway here, --url names another" if isinstance(error, Unreachable) else ""
        print(f"baton {name}: {error}{hint}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _chat(config: ChatConfig, environ: Mapping[str, str]) -> int:
    client = config.client
    model = config.model or answers.first_model(client)
    conversation = Conversation(client, model, config.system, config.request_fields)
    text = _only_text(config)
    if text is not None:
        terminal.Answer(sys.stdout, sys.stderr).show(
            answers.chat(
                client, model, [*conversation.messages, {"role": "user", "content": text}], conversation.fields
            )
        )
        return EXIT_OK
    print(f"{model} at {client.url}. /help lists the commands, Ctrl-D leaves.")
    return _converse(config, environ, conversation.enter)


def _complete(config: ClientConfig, environ: Mapping[str, str]) -> int:
    client = config.client
    model = config.model or answers.first_model(client)

    def answer(prompt: str) -> None:
        parts = answers.complete(client, model, prompt, config.request_fields)
        terminal.Answer(sys.stdout, sys.stderr).show(parts)

    def enter(prompt: str) -> bool:
        try:
            answer(prompt)
        except RestError as error:
            print(f"baton complete: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
        return True

    text = _only_text(config)
    if text is not None:
        answer(text)
        return EXIT_OK
    print(f"{model} at {client.url}. Each text is continued by itself; Ctrl-D leaves.")
    return _converse(config, environ, enter)


def _converse(config: ClientConfig, environ: Mapping[str, str], enter: Callable[[str], bool]) -> int:
    with terminal.line_editing(config.history_path(environ)):
        for text in terminal.messages("> "):
            if not enter(text):
                break
    return EXIT_OK


def _only_text(config: ClientConfig) -> str | None:
    """Returns the text to answer before the end, or None for a conversation."""
    if config.quick is not None and config.quick != _STDIN:
        return config.quick
    return sys.stdin.read() if config.quick == _STDIN or not sys.stdin.isatty() else None
