"""vLLM's parameters of constrained and repetitive outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.llm.parameters.names import InvalidParameter, with_named_errors

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@with_named_errors
@dataclass
class StructuredOutputsParams:
    """A constraint on the output's text: exactly one of the first five, or structural_tag."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are set" if given else "none is set"
            raise InvalidParameter(
                f"StructuredOutputsParams needs exactly one of {', '.join(_FORMS)}; {found}", field="structured_outputs"
            )


@with_named_errors
@dataclass
class RepetitionDetectionParams:
    """Ends an output that repeats a pattern of tokens min_count times in a row."""

    max_pattern_size: int = 0  # tokens; 0: off
    min_pattern_size: int = 0  # tokens; 0: 1
    min_count: int = 0
