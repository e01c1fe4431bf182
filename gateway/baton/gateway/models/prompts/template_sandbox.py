"""Runs chat templates, which come from untrusted folders, with limits on access, repetition and output."""

from __future__ import annotations

import json
import math
import re
import threading
import time
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

# Loop iterations and calls of one rendering, and the CPU seconds of its thread.
MAX_STEPS = 300_000
MAX_CPU_SECONDS = 0.3
_STEPS_PER_LOOK = 64  # between checks of the clock
# Characters of a text, or items of a list, that one operation may produce.
MAX_SIZE = 16 << 20
# Characters that the expressions of one rendering may output, to the prompt or to variables.
MAX_OUTPUT = 8 * MAX_SIZE
# Widths, indents and counts passed to filters and text methods.
MAX_WIDTH = 10_000

_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
# Filters that traverse nested values.
_DEEP_FILTERS = ("dictsort", "groupby", "max", "min", "pprint", "sort", "string", "sum", "unique")
_SIZED_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class TemplateLimit(jinja2.TemplateError):
    """A template exceeds a limit on loops, calls, time or size."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates (compatible with transformers), with limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._steps = threading.local()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self._put_out
        )
        for name in _SIZED_FILTERS:
            self.filters[name] = _with_small_numbers(self.filters[name])
        for name in _DEEP_FILTERS:
            self.filters[name] = _with_measured_value(self.filters[name])
        self.filters["format"] = _bounded_format
        self.filters["join"] = _with_measured_join(self.filters["join"])
        self.filters |= {"tojson": self._to_json, "_counted": self._counted, "_joined": _joined, "_measured": _measured}
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

    @property
    def edge(self) -> str:
        """Returns the edge of the rendering that this thread does."""
        found: str = getattr(self._steps, "edge", "")
        return found

    def render(
        self, template: jinja2.Template, variables: Mapping[str, Any], stand_ins: Iterable[str] = (), edge: str = ""
    ) -> str:
        """Renders a compiled template. Raises jinja2.TemplateError, or any exception of an invalid template.

        `stand_ins` are characters of the variables that replace ASCII characters. `edge` is written before and after
        each text that the template marks as the assistant's.
        """
        self._steps.edge = edge
        self._steps.stand_ins = tuple(stand_ins)
        self._steps.left = MAX_STEPS
        self._steps.output = MAX_OUTPUT
        self._steps.look = MAX_STEPS - _STEPS_PER_LOOK
        self._steps.until = time.thread_time() + MAX_CPU_SECONDS
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Counts calls, and rejects text methods that would produce huge texts."""
        __self._spend(1)
        # Jinja wraps the formatting methods.
        target = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(target, str):
            _check_method(target, getattr(__obj, "__name__", ""), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _spend(self, steps: int) -> None:
        self._steps.left = getattr(self._steps, "left", MAX_STEPS) - steps
        if self._steps.left < 0:
            raise TemplateLimit(f"the chat template needs more than {MAX_STEPS} loop iterations and calls")
        if self._steps.left <= getattr(self._steps, "look", 0):
            self._steps.look = self._steps.left - _STEPS_PER_LOOK
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > getattr(self._steps, "until", math.inf):
            raise TemplateLimit(f"the chat template takes more than {MAX_CPU_SECONDS:g} s of CPU time")

    def _put_out(self, value: Any) -> Any:
        """Counts the output of an expression, including blocks assigned to variables."""
        size = len(value) if isinstance(value, str) else _nested_size(value)
        self._steps.output = getattr(self._steps, "output", MAX_OUTPUT) - size
        if self._steps.output < 0:
            raise TemplateLimit(f"the chat template outputs more than {MAX_OUTPUT} characters")
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(1)
            yield value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML.
        _check_width(indent)
        _measured(value)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        for stand_in in getattr(self._steps, "stand_ins", ()) if ensure_ascii else ():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def _range(self, *args: int) -> range:
        values = range(*args)
        self._spend(len(values))
        return values


class _Namespace(jinja2.utils.Namespace):
    """A namespace that rejects names with a leading underscore, which would reach Python's internals."""

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
    """`{% generation %}`, which marks the assistant's text for training. Renders its body, between edges if asked."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (nodes.Output([self.call_method("edge")]) for _ in range(2))
        # a new scope, as in transformers
        return [before, nodes.Scope(body), after]

    def edge(self) -> str:
        """Returns what stands at both ends of the assistant's text."""
        assert isinstance(self.environment, TemplateSandbox)
        return self.environment.edge


class _LimitInserter(NodeTransformer):
    """Inserts counting into every loop, and size checks into every `~` and every comparison of unknown values."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _call(node.iter, "_counted")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = _call(node.expr, "_measured")
            for operand in node.ops:
                operand.expr = _call(operand.expr, "_measured")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _call(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _call(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template must not set the namespace attribute {name!r}")


def _joined(values: list[Any]) -> str:
    _measured(values)
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimit(f"the chat template builds more than {MAX_SIZE} characters")


def _nested_size(value: Any) -> int:
    """Returns the approximate number of characters of a value as text. Raises TemplateLimit if it is too large.

    Nested references double the size at each level: 40 lists could otherwise produce a terabyte.
    """
    size = 0
    num_items = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        num_items += 1
        size += len(one) if isinstance(one, str) else 1
        if isinstance(one, Mapping):
            size += len(one)
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            size += len(one)
            waiting.extend(one)
        _check_size(size)
        if num_items > MAX_STEPS:
            raise TemplateLimit(f"the chat template writes or compares more than {MAX_STEPS} nested items")
    return size


def _measured(value: Any) -> Any:
    if not isinstance(value, str):
        _nested_size(value)
    return value


def _check_width(value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimit(f"the chat template uses the width {value}; at most {MAX_WIDTH} is allowed")


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
    elif isinstance(left, str):
        if _WIDE_FORMAT.search(left):
            raise TemplateLimit("the chat template formats with a width that is too large or not fixed")
        _nested_size(right)


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _SIZED_METHODS and args:
        _check_width(args[0])
    elif name in ("format", "format_map") and (_WIDE_FORMAT.search(text) or re.search(r"\{[^{}]*\{", text)):
        raise TemplateLimit("the chat template formats with a width that is too large or not fixed")
    elif name in ("format", "format_map"):
        _nested_size(args)
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


def _with_measured_value(function: Callable[..., Any]) -> Callable[..., Any]:
    # Some of Jinja's filters take the environment or a context before the value.
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _measured(args[position])
        return function(*args, **kwargs)

    return checked


def _with_measured_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> Any:
        values = list(value)
        _check_size(_nested_size(values) + len(values) * len(str(d)))
        return function(context, values, d, attribute)

    return checked


def _bounded_format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_binop("%", str(text), (args, kwargs))
    return str(text) % (kwargs or args)


def _bounded_replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    whole, part, other = str(text), str(old), str(new)
    _check_size(len(whole) + whole.count(part) * len(other))
    return whole.replace(part, other, -1 if count is None else count)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
