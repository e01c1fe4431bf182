"""The messages between the gateway and the process that encodes long prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from baton.gateway.models.encoding.prompt_encoder import ChatPrompt, TextPrompt


class Setup(Struct, frozen=True):
    """The model, as the gateway has read it."""

    tokenizer_path: str
    tokenizer_stamp: tuple[int, int]  # bytes, and nanoseconds of the last change: the file must be the same
    templates: dict[str, str]
    special_tokens: dict[str, str]
    origin: str  # of the templates, for errors
    variables: dict[str, Any]
    trust_control_tokens: bool


class Task(Struct, frozen=True):
    """A prompt to encode."""

    prompt: TextPrompt | ChatPrompt
    owner: str
    most: int  # tokens


class Encoded(Struct, frozen=True):
    """The result for a prompt: token ids, or why there are none."""

    token_ids: bytes = b""  # int32
    problem: str = ""
    field: str = ""
    at_least: int = 0  # tokens of a prompt that has too many
    stopped: bool = False  # the client has disconnected


def stamp_of(path: Path) -> tuple[int, int]:
    """Returns what identifies a file's content: its size and last change."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
