"""Settings of a command from their four sources: flags, variables, a config file, defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.services.settings import config_file
from baton.services.settings.command_line import OptionGroup, parse_flags
from baton.services.settings.option import Given, Option, SettingsError, config_option, nearest, options_of

# Kubernetes sets these in every pod for a Service named, say, `baton-router`; they are not ours.
_KUBERNETES_LINKS = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")


@dataclass(frozen=True, slots=True)
class Forward:
    """Options of a service that a command takes and passes on. Their variables are the service's own."""

    service: str
    config_type: type
    withheld: frozenset[str] = frozenset()  # fields that the command sets itself

    def options(self, taken: Iterable[str]) -> list[Option]:
        """Returns the options whose fields the command does not have itself."""
        hidden = {*self.withheld, *taken}
        return [option for option in options_of(self.service, self.config_type) if option.field not in hidden]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings of a command that forwards others."""

    values: list[Any]  # one of each config type
    forwarded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # flags, by service


def load(
    service: str, config_types: Sequence[type], argv: Sequence[str], environ: Mapping[str, str], description: str = ""
) -> list[Any]:
    """Returns one validated value of each config type, from flags, variables, a config file and defaults.

    Raises SettingsError for invalid settings. Exits only for --help.
    """
    return load_forwarding(service, config_types, (), argv, environ, description).values


def load_forwarding(
    service: str,
    config_types: Sequence[type],
    forwards: Sequence[Forward],
    argv: Sequence[str],
    environ: Mapping[str, str],
    description: str = "",
) -> Loaded:
    """Returns what `load` does, and the flags that the forwards' services get. Raises SettingsError."""
    own = {config_type: options_of(service, config_type) for config_type in config_types}
    file_option = config_option(service)
    all_own = [option for group in own.values() for option in group] + [file_option]
    passed = {forward.service: forward.options(option.field for option in all_own) for forward in forwards}
    everything = [*all_own, *(option for group in passed.values() for option in group)]
    _refuse_unknown_variables(service, everything, environ)
    groups = [OptionGroup("", all_own)]
    groups += [OptionGroup(f"flags of `baton {name}`", options) for name, options in passed.items()]
    given = _given(file_option, everything, parse_flags(service, groups, argv, description), environ)
    values = [config_type(**_values(group, given)) for config_type, group in own.items()]
    for value in values:
        _validate(value, everything)
    return Loaded(values, {name: _flags(some, given) for name, some in passed.items()})


def changed(config: Any) -> dict[str, Any]:
    """Returns the settings of a config that are not at their defaults."""
    values = {one.name: (getattr(config, one.name), one.default) for one in dataclasses.fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


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


def _given(
    file_option: Option, options: Sequence[Option], flags: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Given]:
    """Returns every setting's text and source, by field."""
    variables = {one.field: Given(environ[one.variable], one.variable) for one in options if one.variable in environ}
    said = {one.field: Given(flags[one.field], one.flag) for one in options if one.field in flags}
    path = {**variables, **said}.get(file_option.field)
    in_file = config_file.read(path.text, path.source, options) if path is not None and path.text else {}
    return {**in_file, **variables, **said}


def _values(options: Iterable[Option], given: Mapping[str, Given]) -> dict[str, Any]:
    values = {}
    for option in options:
        if option.field in given:
            values[option.field] = option.parse(*given[option.field])
        elif option.default is dataclasses.MISSING:
            raise SettingsError(f"{option.flag} (or {option.variable}) is required; give {option.allowed}")
    return values


def _flags(options: Iterable[Option], given: Mapping[str, Given]) -> tuple[str, ...]:
    """Returns these settings as flags. The service reads its variables itself."""
    flags = []
    for option in options:
        if option.field in given:
            text, source = given[option.field]
            option.parse(text, source)
            if source != option.variable:
                flags.append(f"{option.flag}={text}")
    return tuple(flags)


def _validate(config: Any, options: Sequence[Option]) -> None:
    from baton.rpc.errors import ServiceError

    check = getattr(config, "validate", None)
    if check is None:
        return
    try:
        check()
    except ServiceError as error:
        raise SettingsError(with_flags(error.message, options)) from error


def _refuse_unknown_variables(service: str, options: Sequence[Option], environ: Mapping[str, str]) -> None:
    known = [option.variable for option in options]
    prefix = f"BATON_{service}_".upper()
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in known and not _KUBERNETES_LINKS.match(variable):
            raise SettingsError(f"unknown variable {variable}={environ[variable]!r}{nearest(variable, known)}")
