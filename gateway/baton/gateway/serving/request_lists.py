"""Limits the lists of a request over all its choices and prompts, each of which is sent to a worker with a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.gateway.core import GenerationRequest
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

MAX_ENTRIES = 512 << 10  # half a second of work
_BYTES_PER_ENTRY = 32  # of a constraint's text
_TOKENS_PER_WORD = 64  # of bad_words, at most; each is sent twice, at the start of a text and after a space


def check_lists(requests: Sequence[GenerationRequest]) -> None:
    """Raises InvalidRequest for the generations of one request if their lists have too many entries together."""
    if len(requests) == 1 and requests[0].n == 1:
        return
    total: Counter[str] = Counter()
    known: dict[int, Mapping[str, int]] = {}  # prompts share their parameters
    for request in requests:
        entries = known.get(id(request.sampling))
        if entries is None:
            entries = known[id(request.sampling)] = entries_of(request.sampling, request.stop)
        parsing = request.output_parsing
        constraint = request.constraint if parsing is None else request.constraint or parsing.constraint
        field = request.constraint_field or "tools"
        for name, count in (*entries.items(), (field, _entries_of_constraint(constraint))):
            total[name] += count * request.n
        if sum(total.values()) > MAX_ENTRIES:
            num_choices = sum(one.n for one in requests)
            raise _too_many(total, num_choices)


def check_shared_lists(
    sampling: types_pb2.SamplingParams,
    stop: types_pb2.StopConditions,
    constraint: types_pb2.Constraint | None,
    field: str,
    count: int,
) -> None:
    """The same before `count` generations with these parameters are made. `field` is the constraint's."""
    entries = Counter({**entries_of(sampling, stop), field: _entries_of_constraint(constraint)})
    if count > 1 and count * sum(entries.values()) > MAX_ENTRIES:
        raise _too_many(entries, count)


def entries_of(sampling: types_pb2.SamplingParams, stop: types_pb2.StopConditions) -> Mapping[str, int]:
    """Returns the entries of each list, by its field."""
    return {
        "logit_bias": len(sampling.logit_bias_token_ids),
        "allowed_token_ids": len(sampling.allowed_token_ids),
        "stop_token_ids": len(stop.stop_token_ids),
        "vllm_xargs": sum(one.ByteSize() for one in sampling.extra_args.values()) // _BYTES_PER_ENTRY,
        "bad_words": sum(2 * min(len(word), _TOKENS_PER_WORD) for word in sampling.bad_words),
    }


def _entries_of_constraint(constraint: types_pb2.Constraint | None) -> int:
    return constraint.ByteSize() // _BYTES_PER_ENTRY if constraint is not None else 0


def _too_many(entries: Counter[str], num_choices: int) -> InvalidRequest:
    ((field, _),) = entries.most_common(1)
    return InvalidRequest(
        f"{field} is too long for {num_choices} choices and prompts, each of which gets a copy; shorten it, or ask for "
        f"fewer at once: {MAX_ENTRIES} entries, or {_BYTES_PER_ENTRY} times as many bytes, are sent for one request",
        field=field,
    )
