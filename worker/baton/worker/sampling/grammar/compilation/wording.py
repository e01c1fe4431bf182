"""Rewords the grammar library's messages for clients."""

from __future__ import annotations

import re

_MAX_LENGTH = 300
SIMPLER = "use fewer or smaller repetitions, alternatives and patterns"

# The first pattern that is found applies. Other messages are passed on.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"intersection stack level", "a $ref leads back to itself, or allOf and $ref are nested too deeply"),
    (r"NoExtension", "no text can match it: a rule or $ref leads back to itself without an end, or it excludes itself"),
    (r"too many states", f"its automaton has grown too large; {SIMPLER}"),
    (r"too many expressions|[Ll]exer precomputation failed|fuel|relevance check", f"it is too complex; {SIMPLER}"),
    (r"[Tt]oo many items|row item|[Cc]urrent row has", "it is too ambiguous: one text can be read in too many ways"),
    (r"[Gg]rammar (is )?too (large|big)|schema too large", f"it is too large; {SIMPLER}"),
    (
        r"oneOf constraints are not supported",
        "oneOf needs alternatives that exclude each other, as by a required property with different const values; use"
        " anyOf instead",
    ),
    (r"Pointer '(?P<what>[^']*)' does not exist", "$ref leads to '#{what}', which the schema does not have"),
    (
        r"Resource '(?P<what>[^']*)' is not present",
        "$ref leads to {what!r}; only references within the schema (#/...) are allowed",
    ),
    (r"Unknown format: (?P<what>\S+)", "format {what!r} is not known"),
    (r"look-around", "regexes have no look-around, as (?=...) or (?<!...)"),
    (r"backreferences", r"regexes have no references to groups, as \1"),
    (r"Unimplemented keys: \[(?P<what>[^\]]*)\]", "keywords that cannot be enforced: {what}"),
    (r"[Uu]nsatisfiable schema: (?P<what>.*)", "no JSON can satisfy it: {what}"),
    (r"too many digits", "multipleOf has too many digits"),
)
_MARKS = re.compile(r"\s*<non-verbose/>|^at \d+\(\d+\): |\(in regex\): |^(lexer|parser) error: ")
_REGEX_ECHO = re.compile(r'^invalid regex ".*?" (?=\S|$)|^regex parse error: .*?(?=error: )', re.DOTALL)


def plain_problem(problem: str) -> str:
    """Returns the problem on one line, without the library's markup and without a long echo of the request."""
    line = " ".join(problem.split())
    for pattern, text in _REASONS:
        found = re.search(pattern, line)
        if found is not None:
            what = found.groupdict().get("what", "")[:100]
            return text.format(what=what)
    line = _MARKS.sub("", line)
    line = _REGEX_ECHO.sub("", _REGEX_ECHO.sub("", line))
    return line if len(line) <= _MAX_LENGTH else line[:_MAX_LENGTH] + " ..."
