"""A conversation in a terminal: its messages, and the commands that begin with a slash."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.services.chat import answers
from baton.services.chat.answers import Message
from baton.services.chat.terminal import Answer
from baton.services.rest.client import RestClient, RestError


@dataclass(slots=True)
class Conversation:
    """The messages so far, and where they are answered."""

    client: RestClient
    model: str
    system: str
    fields: Mapping[str, Any]
    turns: list[Message] = field(default_factory=list)  # without the system message

    @property
    def messages(self) -> list[Message]:
        """All messages, as the API takes them."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        """Sends a message and shows the answer. Raises RestError, and forgets a message without an answer."""
        self.turns.append({"role": "user", "content": text})
        answer = Answer(sys.stdout, sys.stderr)
        try:
            answer.show(answers.chat(self.client, self.model, self.messages, self.fields))
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
        finally:
            if answer.text:
                self.turns.append({"role": "assistant", "content": answer.text})
            else:
                self.turns.pop()

    def enter(self, text: str) -> bool:
        """Runs a command or sends a message. Returns False if the conversation ends. Shows errors."""
        if not text.strip():
            return True
        try:
            if text.startswith("/") and not text.startswith("//"):
                return run_command(self, text)
            self.ask(text.removeprefix("/") if text.startswith("//") else text)
        except RestError as error:
            print(f"baton chat: {error}", file=sys.stderr)
        return True


@dataclass(frozen=True, slots=True)
class Command:
    """A command that begins with a slash."""

    usage: str
    summary: str
    run: Callable[[Conversation, str], bool]  # returns False if the conversation ends


def run_command(conversation: Conversation, line: str) -> bool:
    """Runs `/name argument`. Returns False if the conversation ends."""
    name, _, argument = line[1:].strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        print(f"there is no command /{name}; {hint} (//{name} sends it as text)", file=sys.stderr)
        return True
    return command.run(conversation, argument.strip())


def _help(conversation: Conversation, argument: str) -> bool:
    for command in COMMANDS.values():
        print(f"  {command.usage:<16} {command.summary}")
    print('  """              begins and ends a message of several lines; a line that ends in \\ goes on in the next')
    print("  Ctrl-C           stops an answer; Ctrl-D leaves")
    return True


def _clear(conversation: Conversation, argument: str) -> bool:
    conversation.turns.clear()
    print("(a new conversation)")
    return True


def _retry(conversation: Conversation, argument: str) -> bool:
    asked = [at for at, turn in enumerate(conversation.turns) if turn["role"] == "user"]
    if not asked:
        print("there is no message to answer again", file=sys.stderr)
        return True
    before = list(conversation.turns)
    text = conversation.turns[asked[-1]]["content"]
    del conversation.turns[asked[-1] :]
    try:
        conversation.ask(text)
    finally:
        if len(conversation.turns) == asked[-1]:  # there is no new answer
            conversation.turns[:] = before
    return True


def _system(conversation: Conversation, argument: str) -> bool:
    conversation.system = argument
    print("(the system message is set)" if argument else "(there is no system message)")
    return True


def _save(conversation: Conversation, argument: str) -> bool:
    if not argument:
        print("/save needs a file", file=sys.stderr)
        return True
    path = Path(argument).expanduser()
    try:
        body = {"model": conversation.model, "messages": conversation.messages}
        path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
    else:
        print(f"({len(conversation.messages)} messages are in {path})")
    return True


def _exit(conversation: Conversation, argument: str) -> bool:
    return False


COMMANDS: Mapping[str, Command] = {
    "help": Command("/help", "lists the commands", _help),
    "clear": Command("/clear", "begins a new conversation", _clear),
    "retry": Command("/retry", "answers the last message again", _retry),
    "system": Command("/system TEXT", "sets the system message; without a text, removes it", _system),
    "save": Command("/save FILE", "writes the conversation as the body of a request", _save),
    "exit": Command("/exit", "leaves", _exit),
}
