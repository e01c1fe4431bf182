"""Errors for prompts that are too long."""

from __future__ import annotations

import re

from baton.gateway.errors.http import ContextTooLong
from baton.rpc.errors import InvalidRequest

# Texts that are only counted or truncated may have more tokens than the context.
COUNTED_TOKENS = 128 << 10


def context_too_long(num_tokens: int, max_model_len: int, field: str, *, at_least: bool = False) -> ContextTooLong:
    """Returns the error for a prompt of `num_tokens`, or at least as many if its rest was not encoded."""
    number = f"at least {num_tokens}" if at_least else str(num_tokens)
    shown = _shown(field)
    what = f"the {field}" if shown == field else shown
    return ContextTooLong(
        f"This model's maximum context length is {max_model_len} tokens. However, your {shown} resulted in "
        f"{number} tokens. Please reduce the length of {what}.",
        field=field,
    )


def too_long_to_count(num_tokens: int, most: int, field: str) -> InvalidRequest:
    """Returns the error for a text that is too long to count or truncate."""
    return ContextTooLong(
        f"{_shown(field)} has at least {num_tokens} tokens; at most {most} are counted or truncated", field=field
    )


def _shown(field: str) -> str:
    """Returns a field's name with indices in brackets: input[1] for input.1."""
    return re.sub(r"\.(\d+)", r"[\1]", field)
