"""The most tokens of a request: as set, the model's own limit, or what the KV pool holds."""

from __future__ import annotations

import logging

from baton.rpc.errors import InvalidRequest
from baton.worker.config import AUTO_MODEL_LEN

_log = logging.getLogger(__name__)


def wanted_model_len(wanted: int, model_limit: int) -> int:
    """Returns the most tokens of a request whatever the pool holds. Raises InvalidRequest beyond the model's limit."""
    if wanted > model_limit:
        raise InvalidRequest(
            f"max_model_len={wanted} is beyond the model's own limit: at most {model_limit}", field="max_model_len"
        )
    return model_limit if wanted in (0, AUTO_MODEL_LEN) else wanted


def fitting_model_len(wanted: int, model_limit: int, num_tokens: int) -> int:
    """Returns the most tokens of a request beside a pool of `num_tokens`. Logs what `auto` chose, and why."""
    longest = wanted_model_len(wanted, model_limit)
    if wanted != AUTO_MODEL_LEN:
        return longest
    if num_tokens < longest:
        _log.info(
            "max_model_len=auto is %d, all that the KV pool holds; the model's own limit is %d", num_tokens, longest
        )
        return num_tokens
    _log.info(
        "max_model_len=auto is %d, the model's own limit; the KV pool holds %.1f requests of that length",
        longest,
        num_tokens / longest,
    )
    return longest
