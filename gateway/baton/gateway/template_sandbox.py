"""Where chat templates run: they come from strangers' folders, so what they reach, repeat and build is bounded."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Loop rounds and calls of one rendering.
MAX_STEPS = 1_000_000
# Characters of any text, and items of any list, that an operation may make.
MAX_SIZE = 16 << 20
# Widths, indents and counts that are given to filters and text methods.
MAX_WIDTH = 10_000

_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_SIZED_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class TemplateLimit(jinja2.TemplateError):
    """A template repeats or builds more than any chat needs."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (the same as transformers'), within limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._steps = threading.local()
        for name in _SIZED_FILTERS:
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters |= {"tojson": _to_json, "_counted": self._counted, "_joined": _joined}
        self.filters["replace"] = _bounded_replace
        del self.globals["lipsum"]
        self.globals |= {
            "range": self._range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def load(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises jinja2.TemplateError."""
        tree = _LimitInserter().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Runs a template of this sandbox. Raises jinja2.TemplateError, and whatever a bad template raises."""
        self._steps.left = MAX_STEPS
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Counts calls, and refuses text methods that would build something huge."""
        __self._spend(1)
        target = getattr(__obj, "__self__", None)
        if isinstance(target, str):
            _check_method(target, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _spend(self, steps: int) -> None:
        self._steps.left = getattr(self._steps, "left", MAX_STEPS) - steps
        if self._steps.left < 0:
            raise TemplateLimit(f"the chat template needs more than {MAX_STEPS} loop rounds and calls")

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(1)
            yield value

    def _range(self, *args: int) -> range:
        values = range(*args)
        self._spend(len(values))
        return values


class _Namespace(jinja2.utils.Namespace):
    """Takes no underscore names, behind which Python's internals are."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # A scope of its own, as in transformers.
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))]


class _LimitInserter(NodeTransformer):
    """Puts the counting into every loop and the size check into every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "_joined", [], [], None, None, lineno=node.lineno)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not name a namespace attribute {name!r}")


def _joined(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimit(f"the chat template builds more than {MAX_SIZE} characters")


def _check_width(value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimit(f"the chat template asks for {value}, where at most {MAX_WIDTH} is allowed")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                _check_size(len(value) * count)
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right))
    elif isinstance(left, str) and _WIDE_FORMAT.search(left):
        raise TemplateLimit("the chat template formats with a width that is too large or not fixed")


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _SIZED_METHODS and args:
        _check_width(args[0])
    elif name in ("format", "format_map") and (_WIDE_FORMAT.search(text) or re.search(r"\{[^{}]*\{", text)):
        raise TemplateLimit("the chat template formats with a width that is too large or not fixed")
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(len(part) for part in args[0] if isinstance(part, str)) + len(text) * len(args[0]))


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[1:], *kwargs.values()):
            _check_width(value)
        return function(*args, **kwargs)

    return checked


def _bounded_replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    whole, part, other = str(text), str(old), str(new)
    _check_size(len(whole) + whole.count(part) * len(other))
    return whole.replace(part, other, -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
