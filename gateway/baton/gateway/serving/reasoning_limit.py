"""Converts a client's reasoning budget to the limit that workers apply."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.models.constraints.structured_output import reasoning_tokens
from baton.gateway.models.served import ServedModel
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2


def limit_reasoning(
    sampling: types_pb2.SamplingParams,
    model: ServedModel,
    prompt_token_ids: Sequence[int],
    budget: int | None,
    field: str = "thinking_token_budget",
) -> None:
    """Sets reasoning_limit in place. None and -1 mean no limit; an output that does not begin in the reasoning has
    none.

    Raises InvalidRequest that names `field` if the end of the model's reasoning is unknown.
    """
    if budget is None or budget < 0:
        return
    if not can_limit(model):
        raise InvalidRequest(
            f"{field}: the end of {model.name}'s reasoning is unknown; start the gateway with --reasoning-parser",
            field=field,
        )
    start, end = reasoning_tokens(model.output_format, model.tokenizer, prompt_token_ids)
    if end:
        limit = types_pb2.ReasoningLimit(max_tokens=budget, end_token_ids=end, start_token_id=start)
        sampling.reasoning_limit.CopyFrom(limit)


def can_limit(model: ServedModel) -> bool:
    """Returns whether the model's reasoning ends with a marker that can be inserted."""
    formats = model.output_format
    if formats.tools is not None and formats.tools.has_reasoning:
        return False
    return formats.reasoning is not None and bool(formats.reasoning.close_tag)
