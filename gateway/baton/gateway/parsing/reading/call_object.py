"""Reads a call written as a JSON object: {"name": ..., "arguments": {...}}, with its members in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from baton.gateway.parsing.reading.event_writer import EventWriter
from baton.gateway.parsing.reading.source import Malformed, Source, Steps
from baton.gateway.parsing.reading.text_parser import call_name

_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


def read_call_object(
    source: Source,
    out: EventWriter,
    is_call: Callable[[str], bool] | None = None,
    name_key: str = "name",
    argument_keys: Sequence[str] = _ARGUMENT_KEYS,
) -> Steps[None]:
    """Reads one object within an attempt, and writes the call as soon as its name, under `name_key`, is known.

    Raises Malformed for other text. Skips unknown members. With `is_call` the object may also be part of the answer:
    its name decides, or an unknown member before the name.
    """
    num_calls = out.num_calls
    early_arguments: str | None = None  # arrived before the name
    has_arguments = False
    yield from source.expect("{")
    while True:
        key = yield from _read_key(source)
        started = out.num_calls > num_calls
        if key == name_key and not started:
            name = call_name((yield from source.read_json_string()))
            if is_call is not None and not is_call(name):
                raise Malformed
            out.start(name)
            source.commit()
            if early_arguments is not None:
                out.arguments(_as_object(early_arguments))
        elif key in argument_keys and not has_arguments:
            has_arguments = True
            if started:
                yield from pass_arguments(source, out)
            else:
                early_arguments = yield from source.read_json()
        elif started or is_call is None or key in _OTHER_KEYS:
            yield from source.read_json()
        else:
            raise Malformed
        source.begin()
        yield from source.skip_space()
        if (yield from source.expect(",", "}")) == "}":
            break
    if out.num_calls == num_calls:
        raise Malformed
    if not has_arguments:
        out.arguments("{}")
    source.commit()
    out.end()


def read_call_list(
    source: Source, out: EventWriter, is_call: Callable[[str], bool] | None = None, name_key: str = "name"
) -> Steps[None]:
    """Reads a JSON list of such objects within an attempt."""
    yield from source.skip_space()
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        yield from read_call_object(source, out, is_call, name_key)
        source.begin()
        yield from source.skip_space()
        if (yield from source.expect(",", "]")) == "]":
            return


def read_keyed_call(source: Source, out: EventWriter) -> Steps[None]:
    """Reads {"f": {...}} within an attempt: the function's name is the only key."""
    yield from source.skip_space()
    yield from source.expect("{")
    key = yield from _read_key(source)
    out.start(call_name(key))
    source.commit()
    yield from pass_arguments(source, out)
    source.begin()
    yield from source.skip_space()
    yield from source.expect("}")
    source.commit()
    out.end()


def pass_arguments(source: Source, out: EventWriter) -> Steps[None]:
    """Passes the arguments of the open call on unchanged, or the content of a string that contains JSON."""
    source.begin()
    yield from source.skip_space()
    first = yield from source.peek()
    if first == "n":
        out.arguments(_as_object((yield from source.read_json())))
        source.commit()
        return
    source.commit()
    if first == '"':
        yield from source.pass_json_string(out.arguments)
    else:
        yield from source.pass_json(out.arguments)


def _as_object(value: str) -> str:
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        text: str = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return text


def _read_key(source: Source) -> Steps[str]:
    yield from source.skip_space()
    key = yield from source.read_json_string()
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key
