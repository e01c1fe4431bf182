"""A conversation as text, piece by piece, as the model's chat template renders it, and which pieces are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TOOLS_BEFORE = "# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call one, answer with its name and its arguments:\n"
    '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    name: str
    arguments: Mapping[str, Any]

    def render(self) -> str:
        """Returns it as the model writes it."""
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. A tool's result has the role tool."""

    role: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""
    trained: bool = True  # of an assistant's turn


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the functions that they may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Piece:
    """A text that is tokenized on its own."""

    text: str
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """A document's tokens, and which of them are trained on."""

    ids: NDArray[np.uint16]
    trained: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


def pieces(chat: Chat, begin: bool = True) -> list[Piece]:
    """Returns the chat's text in order; `begin`: with the token that starts a document."""
    turns = list(chat.turns)
    made = [Piece("<|bos|>")] if begin else []
    if chat.tools:
        own = turns.pop(0).text + "\n\n" if turns[0].role == "system" else ""
        listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in chat.tools)
        made.append(Piece(f"<|im_start|>system\n{own}{TOOLS_BEFORE}{listed}{TOOLS_AFTER}<|im_end|>\n"))
    for index, turn in enumerate(turns):
        if turn.role == "tool":
            first = index == 0 or turns[index - 1].role != "tool"
            last = index + 1 == len(turns) or turns[index + 1].role != "tool"
            start = "<|im_start|>user" if first else ""
            end = "<|im_end|>\n" if last else ""
            made.append(Piece(f"{start}\n<tool_response>\n{turn.text}\n</tool_response>{end}"))
        elif turn.role == "assistant":
            made.extend(_answer(turn))
        else:
            made.append(Piece(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n"))
    return made


def _answer(turn: Turn) -> Iterable[Piece]:
    opened = "<think>\n" if turn.thought else ""
    yield Piece(f"<|im_start|>assistant\n{opened}")
    thought = f"{turn.thought}\n</think>\n\n" if turn.thought else ""
    calls = "\n".join(call.render() for call in turn.calls)
    between = "\n" if turn.text and calls else ""
    yield Piece(f"{thought}{turn.text}{between}{calls}<|im_end|>", turn.trained)
    yield Piece("\n")


def encode(tokenizer: Tokenizer, documents: Sequence[Sequence[Piece]]) -> list[Tokens]:
    """Returns the tokens of many documents at once."""
    flat = [piece for document in documents for piece in document]
    encoded = iter(tokenizer.encode_batch([piece.text for piece in flat], add_special_tokens=False))
    made = []
    for document in documents:
        ids = [next(encoded).ids for _ in document]
        trained = [np.full(len(part), piece.trained) for part, piece in zip(ids, document, strict=True)]
        made.append(Tokens(np.fromiter((i for part in ids for i in part), np.uint16), np.concatenate(trained)))
    return made


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Returns one document made of several."""
    return Tokens(np.concatenate([part.ids for part in parts]), np.concatenate([part.trained for part in parts]))
