"""One field of a config dataclass as a flag, a variable and a key of a config file. Knows no service."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})


CONFIG_FIELD = "config"


class Given(NamedTuple):
    """A setting's text, and its flag, variable or key, for errors."""

    text: str
    source: str


class SettingsError(Exception):
    """A setting is unknown or wrong. The message names the key, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a config dataclass, as a flag, a variable and a key."""

    field: str
    flag: str
    variable: str
    kind: type  # str, int, float, bool or tuple
    nullable: bool  # "none" stands for None
    default: Any
    help: str
    choices: tuple[Any, ...]
    minimum: float | None
    maximum: float | None
    metavar: str
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values that have a name
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # values of other servers, and what serves
    spaced: bool = False  # a tuple whose flag takes several words
    positional: bool = False  # its flag may be left out
    short: str = ""  # a flag of one letter
    also: str = ""  # another name, as a flag and as a key; help and completions leave it out

    @property
    def allowed(self) -> str:
        """Describes the allowed values."""
        if self.choices:
            words = "one of " + ", ".join(str(choice) for choice in self.choices if choice is not None)
        else:
            words = {
                bool: "true or false",
                int: "an integer",
                float: "a number",
                str: "text",
                tuple: "values separated by commas",
            }[self.kind] + self._range
        return ", or ".join((words, *self.words, *(("none",) if self.nullable else ())))

    @property
    def _range(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f" from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f", at least {self.minimum}"
        return f", at most {self.maximum}" if self.maximum is not None else ""

    def parse(self, text: str, source: str) -> Any:
        """Parses a value. `source` is its flag or variable, for errors."""
        if self.nullable and text.lower() in ("", "none"):
            return None
        if text.strip() in self.words:
            return self.words[text.strip()]
        if text.strip() in self.refused:
            raise SettingsError(f"{source}: {text!r} is not supported: {self.refused[text.strip()]}")
        try:
            value = self._convert(text.strip())
        except ValueError:
            raise SettingsError(f"{source}: {text!r} is not allowed; give {self.allowed}") from None
        too_small = self.minimum is not None and self.kind in (int, float) and not value >= self.minimum
        too_large = self.maximum is not None and self.kind in (int, float) and not value <= self.maximum
        if too_small or too_large or (self.choices and value not in self.choices):
            raise SettingsError(f"{source}: {text!r} is not allowed; give {self.allowed}")
        return value

    def _convert(self, text: str) -> Any:
        if self.kind is bool:
            if text.lower() not in TRUE | FALSE:
                raise ValueError(text)
            return text.lower() in TRUE
        if self.kind is tuple:
            parts = text.replace(",", " ").split() if self.spaced else map(str.strip, text.split(","))
            return tuple(filter(None, parts))
        return self.kind(text)


def options_of(service: str, config_type: type) -> list[Option]:
    """Returns the fields of a config dataclass as options of `service`."""
    hints = typing.get_type_hints(config_type)
    return [_option(service, field, hints[field.name]) for field in dataclasses.fields(config_type)]


def config_option(service: str) -> Option:
    """Returns the option that names a config file, which every command has."""
    return Option(
        field=CONFIG_FIELD,
        flag=f"--{CONFIG_FIELD}",
        variable=f"BATON_{service}_{CONFIG_FIELD}".upper(),
        kind=str,
        nullable=False,
        default="",
        help="A YAML or TOML file of these settings: its keys are the flags without dashes. Flags and variables "
        "override it. Empty: none.",
        choices=(),
        minimum=None,
        maximum=None,
        metavar="FILE",
    )


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns a hint that names the most similar known word, or refers to --help."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else "; see --help"


def _option(service: str, field: dataclasses.Field[Any], hint: Any) -> Option:
    kind, nullable = _kind_of(hint)
    default = (
        field.default_factory()
        if field.default is dataclasses.MISSING and callable(field.default_factory)
        else (field.default)
    )
    metadata = field.metadata
    return Option(
        field=field.name,
        flag="--" + field.name.replace("_", "-"),
        variable=f"BATON_{service}_{field.name}".upper(),
        kind=kind,
        nullable=nullable,
        default=default,
        help=metadata.get("help", ""),
        choices=tuple(metadata.get("choices", ())),
        minimum=metadata.get("minimum"),
        maximum=metadata.get("maximum"),
        words=metadata.get("words", {}),
        refused=metadata.get("refused", {}),
        spaced=bool(metadata.get("spaced")),
        positional=bool(metadata.get("positional")),
        short=metadata.get("short", ""),
        also=metadata.get("also", ""),
        metavar=metadata.get("metavar", {bool: "BOOL", int: "N", float: "X", tuple: "A,B,..", str: "TEXT"}[kind]),
    )


def _kind_of(hint: Any) -> tuple[type, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return _kind_of(inner[0])[0], True
    if typing.get_origin(hint) is tuple:
        return tuple, False
    if hint not in (str, int, float, bool):
        raise TypeError(f"a config field cannot have the type {hint}")
    return hint, False
