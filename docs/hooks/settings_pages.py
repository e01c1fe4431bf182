"""One page for each service: every flag, its variable, what it takes and its default."""

from __future__ import annotations

import dataclasses
import importlib

from markdown_text import GENERATED_NOTE, cell, code, table

from baton.services.cli import SERVICES
from baton.services.process.run import ProcessConfig
from baton.services.settings import Option, config_option, options_of

_HEAD = ("flag", "default", "what it does", "allowed values")


def service_page(service: str) -> str:
    """Returns the page of a service's settings."""
    command = SERVICES[service]
    config = getattr(importlib.import_module(f"{command.package}.config"), command.config)
    options = [*options_of(service, config), *options_of(service, ProcessConfig), config_option(service)]
    first = options[0]
    return (
        f"# Settings of `baton {service}`\n\n{command.summary} {GENERATED_NOTE}\n"
        f"Every setting is a flag, a variable or a key of the YAML or TOML file of `--config`: `{first.flag}` is also "
        f"`{first.variable}` and `{first.flag.removeprefix('--')}`. A flag overrides the variable, which overrides the "
        "file. Unknown settings and wrong values are errors that name what is allowed.\n\n"
        + table(_HEAD, [_row(option) for option in options])
    )


def _row(option: Option) -> tuple[str, str, str, str]:
    return code(option.flag), _default(option), cell(option.help), cell(option.allowed)


def _default(option: Option) -> str:
    value = option.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return code(str(value).lower())
    text = ",".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)
    return code(text) or "empty"
