"""What a person types and reads: lines with history, several lines as one message, and answers as they arrive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from baton.services.chat.answers import Part

_BLOCK = '"""'
_CONTINUES = "\\"
_HISTORY_LINES = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Answer:
    """Writes an answer's parts as they arrive, and keeps its text."""

    def __init__(self, stream: TextIO, notes: TextIO) -> None:
        self._stream = stream
        self._notes = notes
        self._live = stream.isatty()
        self._dim = False
        self.text = ""

    def show(self, parts: Iterable[Part]) -> None:
        """Writes all parts. What was written until an error or an interrupt stays in `text`."""
        finish_reason = ""
        try:
            for part in parts:
                if self._live:
                    self._write(part.reasoning, dim=True)
                self._write(part.text + part.call, dim=False)
                self.text += part.text
                finish_reason = part.finish_reason or finish_reason
        finally:
            self._end()
        if finish_reason == "length":
            print("(cut at the most tokens: --max-tokens N allows more)", file=self._notes)

    def _write(self, text: str, dim: bool) -> None:
        if not text:
            return
        if self._live:
            if dim != self._dim:
                self._stream.write(_DIM if dim else f"{_PLAIN}\n\n")
                self._dim = dim
            text = without_controls(text)
        self._stream.write(text)
        self._stream.flush()

    def _end(self) -> None:
        self._stream.write(f"{_PLAIN}\n" if self._dim else "\n")
        self._dim = False
        self._stream.flush()


def without_controls(text: str) -> str:
    """Returns text that cannot steer a terminal: control characters but newlines and tabs are left out."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))


def messages(prompt: str) -> Iterator[str]:
    """Yields what is entered, until the end of input. An interrupt drops what is being entered."""
    while True:
        try:
            yield _entered(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")


def _entered(prompt: str) -> str:
    """Reads one message: a line, lines that end in a backslash, or lines between triple quotes."""
    line = input(prompt)
    if line.startswith(_BLOCK):
        return _block(line.removeprefix(_BLOCK))
    lines = [line]
    while lines[-1].endswith(_CONTINUES):
        lines[-1] = lines[-1].removesuffix(_CONTINUES)
        lines.append(input(". "))
    return "\n".join(lines)


def _block(line: str) -> str:
    lines = []
    while not line.endswith(_BLOCK):
        lines.append(line)
        line = input(". ")
    return "\n".join([*lines, line.removesuffix(_BLOCK)]).strip("\n")


@contextlib.contextmanager
def line_editing(path: Path | None) -> Iterator[None]:
    """Gives input() arrow keys and the lines of earlier runs, which are kept in `path`, if there is one."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                readline.write_history_file(path)
            except OSError as error:
                print(f"the history was not kept in {path}: {error.strerror}", file=sys.stderr)
