"""Runs an engine in this process over a text, in windows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.services.evaluation.record import Position, TextRecord


def windows_of(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """Returns the text in pieces of `size` tokens, the first token of each of which is not predicted."""
    pieces = [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [one for one in pieces if len(one) > 1]


def score(llm: Any, windows: Sequence[list[int]], alternatives: int, on_window: Callable[[int], object]) -> TextRecord:
    """Returns the log-probabilities of all tokens but the first of each window. `on_window` gets the tokens done."""
    params = importlib.import_module("baton.llm").SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=alternatives, detokenize=False
    )
    record = TextRecord()
    for window, output in zip(windows, llm.generate_iter(windows, params), strict=True):
        for token, entries in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            record.add(Position(token, {one: found.logprob for one, found in entries.items()}))
        on_window(len(window))
    return record


def read_text(path: str) -> str:
    """Returns the text of a file. Raises InvalidRequest for one that cannot be read, or that is empty."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise InvalidRequest(f"text={path}: {error.strerror}", field="text") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"text={path}: byte {error.start} is not UTF-8", field="text") from error
    if not text.strip():
        raise InvalidRequest(f"text={path}: the file is empty; give a text of at least two tokens", field="text")
    return text
