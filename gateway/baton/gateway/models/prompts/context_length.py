"""What a prompt that is too long is answered with."""

from __future__ import annotations

from baton.gateway.errors.http import ContextTooLong
from baton.rpc.errors import InvalidRequest

# A text that is only counted, or truncated, may have more tokens than the context.
COUNTED_TOKENS = 128 << 10


def context_too_long(num_tokens: int, max_model_len: int, field: str, *, at_least: bool = False) -> ContextTooLong:
    """The error of a prompt with so many tokens; `at_least`: its rest was not encoded."""
    number = f"at least {num_tokens}" if at_least else str(num_tokens)
    return ContextTooLong(
        f"This model's maximum context length is {max_model_len} tokens. However, your {field} resulted in "
        f"{number} tokens. Please reduce the length of the {field}.",
        field=field,
    )


def too_long_to_count(num_tokens: int, most: int, field: str) -> InvalidRequest:
    """The error of a text that is to be counted or truncated."""
    return ContextTooLong(
        f"your {field} has at least {num_tokens} tokens; at most {most} are counted or truncated", field=field
    )
