"""Flags, environment variables and --help, derived from frozen config dataclasses. Knows no service.

A field `kv_blocks` of the service `worker` is the flag `--kv-blocks` and the variable `BATON_WORKER_KV_BLOCKS`;
a flag goes before the variable, the variable before the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

# Kubernetes sets these in every pod for a Service named, say, `baton-router`; they are not ours.
_KUBERNETES_LINKS = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class SettingsError(Exception):
    """A setting is unknown or wrong. The message names the key, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a config dataclass, as a flag and as a variable."""

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
    spaced: bool = False  # a tuple whose flag takes several words

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
        return f"{words}, or none" if self.nullable else words

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
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return self.kind(text)


def options_of(service: str, config_type: type) -> list[Option]:
    """Returns the fields of a config dataclass as options of `service`."""
    hints = typing.get_type_hints(config_type)
    return [_option(service, field, hints[field.name]) for field in dataclasses.fields(config_type)]


def load(
    service: str, config_types: Sequence[type], argv: Sequence[str], environ: Mapping[str, str], description: str = ""
) -> list[Any]:
    """Returns one validated value of each config type, from flags, variables and defaults.

    Raises SettingsError for invalid settings. Exits only for --help.
    """
    options = {config_type: options_of(service, config_type) for config_type in config_types}
    everything = [option for group in options.values() for option in group]
    _refuse_unknown_variables(service, everything, environ)
    flags = _parse_flags(service, everything, argv, description)
    values = [config_type(**_values(group, flags, environ)) for config_type, group in options.items()]
    for value in values:
        _validate(value, everything)
    return values


def with_flags(message: str, options: Iterable[Option]) -> str:
    """Returns the message with fields named as flags: `api_keys=x` is `--api-keys=x`. Quoted values stay as they are.

    A field of one word may also be an English word, so it is replaced only before `=` or `:`, and at the beginning.
    """
    for option in options:
        name = option.field
        behind = r"\b" if "_" in name else r"(?=[=:])"
        field = rf"(?<![\w-]){name}{behind}"
        pattern = rf"('[^']*'|\"[^\"]*\")|{field}" if "_" in name else rf"('[^']*'|\"[^\"]*\")|{field}|^{name}(?= )"
        message = re.sub(pattern, partial(_flag_or_quoted, option.flag), message)
    return message


def _flag_or_quoted(flag: str, match: re.Match[str]) -> str:
    return match[1] or flag


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
        spaced=bool(metadata.get("spaced")),
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


def _values(options: Iterable[Option], flags: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for option in options:
        if option.field in flags:
            values[option.field] = option.parse(flags[option.field], option.flag)
        elif option.variable in environ:
            values[option.field] = option.parse(environ[option.variable], option.variable)
        elif option.default is dataclasses.MISSING:
            raise SettingsError(f"{option.flag} (or {option.variable}) is required; give {option.allowed}")
    return values


def _validate(config: Any, options: Sequence[Option]) -> None:
    from baton.rpc.errors import ServiceError

    check = getattr(config, "validate", None)
    if check is None:
        return
    try:
        check()
    except ServiceError as error:
        raise SettingsError(with_flags(error.message, options)) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parse_flags(service: str, options: Sequence[Option], argv: Sequence[str], description: str) -> dict[str, str]:
    parser = _Parser(
        prog=f"baton {service}",
        description=description,
        epilog=f"Every flag can be given as a variable: {options[0].flag} as {options[0].variable}.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for option in options:
        _add_flag(parser, option)
    argv = _commas_between_words(argv, [option.flag for option in options if option.spaced])
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option.flag for option in options]
        raise SettingsError(f"unknown argument {unknown[0]!r}{_nearest(unknown[0].split('=')[0], known)}")
    return vars(flags)


def _commas_between_words(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns the arguments with `--flag a b` of these flags as `--flag a,b`, which is what variables have."""
    arguments: list[str] = []
    joins = False  # the next word belongs to the one before
    follows = False  # a flag that takes several words came last
    for argument in argv:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            follows, joins = name in flags, name in flags and bool(equals)
        elif joins:
            arguments[-1] += f",{argument}"
            continue
        else:
            joins, follows = follows, False
        arguments.append(argument)
    return arguments


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.metavar
    text = f"{option.help} ({_default_text(option)}; {option.variable})".strip().replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(option.flag, dest=option.field, nargs="?", const="true", metavar=metavar, help=text)
        negation = "--no-" + option.flag.removeprefix("--")
        parser.add_argument(negation, dest=option.field, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        parser.add_argument(option.flag, dest=option.field, metavar=metavar, help=text)


def _default_text(option: Option) -> str:
    if option.default is dataclasses.MISSING:
        return "required"
    if isinstance(option.default, tuple):
        return f"default: {','.join(option.default) or 'empty'}"
    if isinstance(option.default, bool):
        return f"default: {str(option.default).lower()}"
    return f"default: {'none' if option.default is None else option.default if option.default != '' else 'empty'}"


def _refuse_unknown_variables(service: str, options: Sequence[Option], environ: Mapping[str, str]) -> None:
    known = [option.variable for option in options]
    prefix = f"BATON_{service}_".upper()
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in known and not _KUBERNETES_LINKS.match(variable):
            raise SettingsError(f"unknown variable {variable}={environ[variable]!r}{_nearest(variable, known)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else "; see --help"
