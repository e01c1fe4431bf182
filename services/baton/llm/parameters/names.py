"""Errors for parameters that are unknown or not supported. An unknown name is answered with the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from baton.rpc.errors import InvalidRequest

T = TypeVar("T")


class InvalidParameter(InvalidRequest, ValueError):
    """A parameter has a wrong value, or one that is not supported. `field` names it."""


class UnknownParameter(InvalidParameter, TypeError):
    """No parameter has this name."""


def check_known(given: Iterable[str], known: Collection[str], owner: str) -> None:
    """Raises UnknownParameter for the first name that is not known, with the nearest one."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
            raise UnknownParameter(f"{owner} has no parameter {name}{hint}", field=name)


def refuse_unsupported(values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], owner: str) -> None:
    """Raises InvalidParameter for a known parameter with another value than its neutral ones."""
    for name, allowed in neutral.items():
        if name in values and not any(values[name] is value or values[name] == value for value in allowed):
            raise InvalidParameter(
                f"{owner}: {name}={values[name]!r} is not supported; leave it out, or give {allowed[0]!r}", field=name
            )


def with_named_errors(kind: type[T]) -> type[T]:
    """Makes a dataclass refuse unknown names with check_known."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    original = kind.__init__

    @functools.wraps(original)
    def init(self: T, *args: Any, **values: Any) -> None:
        check_known(values, known, kind.__name__)
        original(self, *args, **values)

    setattr(kind, "__init__", init)  # noqa: B010 - mypy allows no assignment to a method
    return kind
