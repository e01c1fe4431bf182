"""Reads a call as Python writes it: f(a="x", b=1)."""

from __future__ import annotations

import re
from collections.abc import Callable

from baton.gateway.parsing.reading.arguments import ArgumentsWriter
from baton.gateway.parsing.reading.event_writer import EventWriter
from baton.gateway.parsing.reading.python_literal import read_python_literal
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Source, Steps

KEY = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def read_python_call(source: Source, out: EventWriter, is_call: Callable[[str], bool] | None = None) -> Steps[None]:
    """Reads one call within an attempt, and writes it as soon as its name is known.

    Raises Malformed for other text, and for names that `is_call` does not accept.
    """
    yield from source.skip_space()
    name = yield from source.read_pattern(_NAME)
    yield from source.skip_space()
    yield from source.expect("(")
    if is_call is not None and not is_call(name):
        raise Malformed
    source.commit()
    out.start(name)
    arguments = ArgumentsWriter(out, None)
    while True:
        source.begin(MAX_VALUE_CHARS)
        yield from source.skip_space()
        if (yield from source.take(")")):
            break
        key = yield from source.read_pattern(KEY)
        yield from source.skip_space()
        yield from source.expect("=")
        value = yield from read_python_literal(source)
        yield from source.skip_space()
        stop = yield from source.expect(",", ")")
        source.commit()
        arguments.add(key, value)
        if stop == ")":
            break
    source.commit()
    arguments.close()
    out.end()
