"""Flags of a command: parsed to texts, and explained by --help. Knows no value's meaning."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from baton.services.settings.option import Option, SettingsError, nearest


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options under one heading of --help."""

    title: str  # empty: the command's own options
    options: Sequence[Option]


HELP_JSON = "--help-json"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_flags(service: str, groups: Sequence[OptionGroup], argv: Sequence[str], description: str) -> dict[str, str]:
    """Returns the flags' texts by field. Raises SettingsError for an unknown one. Exits only for --help."""
    options = [option for group in groups for option in group.options]
    if HELP_JSON in argv:
        print(json.dumps({"description": description, "flags": [_described(option) for option in options]}))
        raise SystemExit(0)
    parser = _parser(service, groups, description)
    argv = _commas_between_words(argv, [option.flag for option in options if option.spaced])
    parsed, rest = parser.parse_known_args(argv)
    flags: dict[str, str] = vars(parsed)
    for option in (option for option in options if option.positional and rest and not rest[0].startswith("-")):
        if option.field in flags:
            raise SettingsError(f"{rest[0]!r} and {option.flag} {flags[option.field]!r} are both given; keep one")
        flags[option.field] = rest.pop(0)
    if rest:
        known = [option.flag for option in options]
        raise SettingsError(f"unknown argument {rest[0]!r}{nearest(rest[0].split('=')[0], known)}")
    return flags


def _described(option: Option) -> dict[str, Any]:
    return {
        "flag": option.flag,
        "short": option.short,
        "variable": option.variable,
        "kind": option.kind.__name__,
        "default": None if option.default is dataclasses.MISSING else option.default,
        "choices": option.choices,
        "metavar": option.metavar,
        "help": option.help,
    }


def _parser(service: str, groups: Sequence[OptionGroup], description: str) -> _Parser:
    first = groups[0].options[0]
    operands = [f"[{option.metavar}]" for option in groups[0].options if option.positional]
    parser = _Parser(
        prog=f"baton {service}",
        usage=" ".join([f"baton {service}", *operands, "[flags]"]) if operands or len(groups) > 1 else None,
        description=description,
        epilog=f"Every flag can be given as a variable: {first.flag} as {first.variable}. {HELP_JSON}: as JSON.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for group in groups:
        target = parser.add_argument_group(group.title) if group.title else parser
        for option in group.options:
            _add_flag(target, option)
    return parser


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


def _add_flag(parser: argparse._ActionsContainer, option: Option) -> None:
    metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.metavar
    text = f"{option.help} ({_default_text(option)}; {option.variable})".strip().replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(option.flag, dest=option.field, nargs="?", const="true", metavar=metavar, help=text)
        negation = "--no-" + option.flag.removeprefix("--")
        parser.add_argument(negation, dest=option.field, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        names = (option.short, option.flag) if option.short else (option.flag,)
        parser.add_argument(*names, dest=option.field, metavar=metavar, help=text)
        if option.also:
            parser.add_argument(f"--{option.also}", dest=option.field, help=argparse.SUPPRESS)


def _default_text(option: Option) -> str:
    if option.default is dataclasses.MISSING:
        return "required"
    if isinstance(option.default, tuple):
        return f"default: {','.join(option.default) or 'empty'}"
    if isinstance(option.default, bool):
        return f"default: {str(option.default).lower()}"
    return f"default: {'none' if option.default is None else option.default if option.default != '' else 'empty'}"
