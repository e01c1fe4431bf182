"""How long a model may reason: from a client's number of tokens to what workers are told."""

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
    """Sets reasoning_limit, in place. None and -1 are no limit; an output that does not begin in a reasoning has none.

    Raises InvalidRequest, naming `field`, where it is not known how the model ends its reasoning.
    """
    if budget is None or budget < 0:
        return
    if not can_limit(model):
        raise InvalidRequest(
            f"{field}: how {model.name} ends its reasoning is not known; the gateway needs --reasoning-parser.",
            field=field,
        )
    start, end = reasoning_tokens(model.output_format, model.tokenizer, prompt_token_ids)
    if end:
        limit = types_pb2.ReasoningLimit(max_tokens=budget, end_token_ids=end, start_token_id=start)
        sampling.reasoning_limit.CopyFrom(limit)


def can_limit(model: ServedModel) -> bool:
    """Whether the end of the model's reasoning is a mark that can be put in."""
    formats = model.output_format
    if formats.tools is not None and formats.tools.has_reasoning:
        return False
    return formats.reasoning is not None and bool(formats.reasoning.close_tag)
