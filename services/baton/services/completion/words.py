"""The commands of `baton` with their flags, as each command itself describes them. Knows no shell."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FILES, _FOLDERS = ("FILE", "PATH", "PATH|redis", "MODEL"), ("FOLDER",)

# Returns an exit code for the words behind `baton`.
Run = Callable[[Sequence[str], Mapping[str, str]], int]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, and the values that it takes."""

    name: str
    help: str
    short: str = ""
    takes_value: bool = True
    values: tuple[str, ...] = ()
    takes_files: bool = False
    takes_folders: bool = False


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A command, or a command of a command."""

    words: tuple[str, ...]
    summary: str
    flags: tuple[Flag, ...] = ()
    nested: tuple[str, ...] = ()  # commands of this command

    @property
    def name(self) -> str:
        """The words with spaces between."""
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class CommandTable:
    """The command line: every command's summary, which have commands of their own, and which have no settings."""

    summaries: Mapping[str, str]
    nested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_settings: frozenset[str] = frozenset()


def described(table: CommandTable, run: Run) -> Iterator[CommandWords]:
    """Yields every command. One that cannot run here, because packages are missing, has no flags."""
    for name, summary in table.summaries.items():
        nested = table.nested.get(name, ())
        has_settings = name not in table.without_settings
        yield CommandWords((name,), summary, _flags((name,), run) if has_settings else (), nested)
        for inner in nested:
            words: list[tuple[str, ...]] = [(name, inner)] if has_settings else []
            if inner in table.summaries:  # `baton doctor gateway` takes the gateway's flags too
                words.append((inner,))
            flags = {flag.name: flag for one in words for flag in _flags(one, run)}
            yield CommandWords((name, inner), "", tuple(flags.values()))


def _flags(words: Sequence[str], run: Run) -> tuple[Flag, ...]:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        run([*words, "--help-json"], {})
    try:
        options = json.loads(printed.getvalue())["flags"]
    except ValueError:
        return ()
    flags = [flag for option in options for flag in _flags_of(option)]
    return (*flags, Flag("--help", "Shows the flags.", takes_value=False))


def _flags_of(option: Mapping[str, Any]) -> Iterator[Flag]:
    name, text = option["flag"], option["help"]
    if option["kind"] == "bool":
        yield Flag(name, text, takes_value=False)
        if option["default"] is True:
            yield Flag("--no-" + name.removeprefix("--"), f"Not: {text}", takes_value=False)
        return
    yield Flag(
        name,
        text,
        option["short"],
        values=tuple(str(choice) for choice in option["choices"]),
        takes_files=option["metavar"] in _FILES,
        takes_folders=option["metavar"] in _FOLDERS,
    )
