"""A progress bar on a terminal, without a dependency. A factory of tqdm bars may replace it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from baton.llm.results.outputs import RequestOutput

_SECONDS = 0.1  # between two lines of a terminal
_WIDTH = 20


class Bar(Protocol):
    """The part of a tqdm bar that is used."""

    def update(self, n: int = 1) -> object:
        """Counts `n` more."""

    def set_postfix_str(self, s: str) -> object:
        """Replaces the text behind the bar."""

    def close(self) -> object:
        """Leaves the bar as it is, and ends its line."""


class TextBar:
    """Writes one line that is overwritten on a terminal, and only the last one elsewhere."""

    def __init__(self, total: int | None, desc: str, file: TextIO | None = None) -> None:
        self._total = total
        self._desc = desc
        self._file = sys.stderr if file is None else file
        self._is_terminal = self._file.isatty()
        self._count = 0
        self._postfix = ""
        self._began = time.monotonic()
        self._shown_at = 0.0

    def update(self, n: int = 1) -> None:
        self._count += n
        now = time.monotonic()
        if self._is_terminal and now - self._shown_at >= _SECONDS:
            self._shown_at = now
            self._file.write(f"\r{self._line(now)}\x1b[K")
            self._file.flush()

    def set_postfix_str(self, s: str) -> None:
        self._postfix = s

    def close(self) -> None:
        start = "\r" if self._is_terminal else ""
        self._file.write(f"{start}{self._line(time.monotonic())}\n")
        self._file.flush()

    def _line(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        rate = f"{self._count / seconds:.2f} it/s"
        postfix = f", {self._postfix}" if self._postfix else ""
        if not self._total:
            return f"{self._desc}: {self._count} [{_clock(seconds)}, {rate}{postfix}]"
        part = self._count / self._total
        bar = ("#" * round(part * _WIDTH)).ljust(_WIDTH)
        left = _clock((self._total - self._count) * seconds / self._count) if self._count else "?"
        counts = f"{self._count}/{self._total}"
        return f"{self._desc}: {part:4.0%}|{bar}| {counts} [{_clock(seconds)}<{left}, {rate}{postfix}]"


class Progress:
    """Counts finished requests on a bar, with the tokens a second so far."""

    def __init__(self, wanted: bool | Callable[..., Any], total: int | None) -> None:
        self._bar: Bar | None = None
        if callable(wanted):
            self._bar = wanted(total=total, desc="Processed prompts", dynamic_ncols=True)
        elif wanted:
            self._bar = TextBar(total, "Processed prompts")
        self._began = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Counts a finished request."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        seconds = max(time.monotonic() - self._began, 1e-9)
        speeds = (self._num_prompt_tokens / seconds, self._num_output_tokens / seconds)
        self._bar.set_postfix_str("input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds))
        self.count()

    def count(self) -> None:
        """Counts a finished request, without its tokens."""
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        """Closes the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
