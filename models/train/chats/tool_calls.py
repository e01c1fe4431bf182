"""Chats with functions: calls, their results, and requests that need none."""

from __future__ import annotations

import json
from random import Random

from train.chats import words
from train.chats.chat import Call, Chat, Turn
from train.chats.tools import Tool, Value, draw_tools

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a storyteller with tools.",
    "Answer in one sentence.",
    "Use the tools when you need them.",
    "You are a coding agent that works in a terminal.",
)


def tool_chat(rng: Random, story: tuple[str, str]) -> Chat:
    """Returns a chat of one to three requests. `story` is a request and a story that answers it."""
    tools = draw_tools(rng, rng.choice([1, 1, 2, 2, 3, 4, 5, 7, 9]))
    turns = [Turn("system", rng.choice(_SYSTEM))] if rng.random() < 0.4 else []
    turns += [turn for _ in range(rng.choice([1, 1, 1, 2, 3])) for turn in request(rng, tools, story)]
    return Chat(tuple(turns), tuple(tool.schema for tool in tools))


def request(rng: Random, tools: list[Tool], story: tuple[str, str]) -> list[Turn]:
    """Returns one request and what follows it."""
    chance = rng.random()
    if chance < 0.12:
        return [Turn("user", story[0]), Turn("assistant", story[1])]
    if chance < 0.2:
        return small_talk(rng)
    tool = rng.choice(tools)
    if chance < 0.28 and tool.keys:
        return _twice(rng, tool)
    return _once(rng, tool)


def small_talk(rng: Random) -> list[Turn]:
    """Returns a greeting or thanks, and a short answer."""
    name = words.name(rng)
    asked, answered = rng.choice(
        [
            ("Hello!", "Hello! What can I do for you?"),
            ("Hi", "Hi! Do you want a story?"),
            ("hi there", "Hi! Do you want a story?"),
            ("Thank you.", "You are welcome!"),
            ("Thanks!", "You are welcome!"),
            ("How are you?", "I am fine, thank you."),
            ("Who are you?", "I am a little storyteller."),
            ("Good night.", "Good night! Sleep well."),
            (f"Hi, I am {name}.", f"Hello {name}! Do you want a story?"),
            (f"Say hello to {name}.", f"Hello {name}!"),
            ("Say hello.", "Hello!"),
            ("Say hi", "Hi!"),
            (f"Say {name}.", f"{name}."),
        ]
    )
    return [Turn("user", asked), Turn("assistant", answered)]


def _once(rng: Random, tool: Tool) -> list[Turn]:
    values = [parameter.draw(rng) for parameter in tool.kind.parameters]
    asked = rng.choice(tool.kind.asks).format(*values)
    if rng.random() < 0.1:
        asked = f"{rng.choice(['Please', 'Hey,', 'Hello.', 'Now'])} {asked}"
    call = Call(tool.name, _arguments(tool, values))
    thought = f"I can use {tool.name} for this." if rng.random() < 0.12 else ""
    turns = [Turn("user", asked), Turn("assistant", calls=(call,), thought=thought)]
    if rng.random() < 0.75:
        returned, answer = _result(rng, tool, values)
        turns += [Turn("tool", returned), Turn("assistant", answer)]
    return turns


def _twice(rng: Random, tool: Tool) -> list[Turn]:
    """Returns two calls of one function side by side."""
    both = [[parameter.draw(rng) for parameter in tool.kind.parameters] for _ in range(2)]
    ask = rng.choice(tool.kind.asks)
    second = ask.format(*both[1])
    asked = f"{ask.format(*both[0])} {rng.choice(['And', 'Also:', 'Then:', ''])} {second}".replace("  ", " ")
    calls = tuple(Call(tool.name, _arguments(tool, values)) for values in both)
    results = [_result(rng, tool, values) for values in both]
    turns = [Turn("user", asked), Turn("assistant", calls=calls)]
    if rng.random() < 0.75:
        turns += [Turn("tool", returned) for returned, _ in results]
        turns.append(Turn("assistant", " ".join(answer for _, answer in results)))
    return turns


def _arguments(tool: Tool, values: list[Value]) -> dict[str, Value]:
    return dict(zip(tool.keys, values, strict=True))


def _result(rng: Random, tool: Tool, values: list[Value]) -> tuple[str, str]:
    """Returns what the function gives back, and the sentence that uses it."""
    assert tool.kind.result is not None
    field, draw = tool.kind.result
    result = draw(rng)
    answer = rng.choice(tool.kind.answers).format(*values, r=result)
    chance = rng.random()
    if chance < 0.45:
        return str(result), answer
    if chance < 0.9:
        more = {rng.choice(["ok", "id", "source"]): rng.randint(0, 9)} if rng.random() < 0.3 else {}
        return json.dumps({field: result, **more}, ensure_ascii=False), answer
    return "Error: " + rng.choice(
        ["not found", "timeout", "no access"]
    ), "That did not work. Do you want a story instead?"
