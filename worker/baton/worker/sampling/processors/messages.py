"""Converts arguments of logits processors from and to messages of the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.core import ExtraValue

_FIELD = "sampling.extra_args"
_MAX_ARGUMENTS = 64
_MAX_VALUES = 16 << 10  # of a list
_MAX_TEXT = 1 << 20  # characters


def extra_args_of(sampling: types_pb2.SamplingParams) -> tuple[tuple[str, ExtraValue], ...]:
    """Returns the arguments by name. Raises InvalidRequest for one without a value, or beyond the limits."""
    given = sampling.extra_args
    if len(given) > _MAX_ARGUMENTS:
        raise InvalidRequest(f"vllm_xargs has {len(given)} names; at most {_MAX_ARGUMENTS} are taken", field=_FIELD)
    return tuple((name, _value_of(name, given[name])) for name in sorted(given))


def extra_args_message(arguments: Sequence[tuple[str, ExtraValue]]) -> Mapping[str, types_pb2.ExtraArgument]:
    """Returns the arguments as SamplingParams.extra_args."""
    return {name: _message_of(value) for name, value in arguments}


def _value_of(name: str, message: types_pb2.ExtraArgument) -> ExtraValue:
    kind = message.WhichOneof("value")
    if kind is None:
        raise InvalidRequest(f"vllm_xargs.{name} has no value", field=_FIELD)
    if kind != "list":
        value: str | int | float | bool = getattr(message, kind)
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise InvalidRequest(
                f"vllm_xargs.{name} has {len(value)} characters; at most {_MAX_TEXT} are taken", field=_FIELD
            )
        return value
    values = message.list.values
    if len(values) > _MAX_VALUES:
        refusal = f"vllm_xargs.{name} has {len(values)} values; at most {_MAX_VALUES} are taken"
        raise InvalidRequest(refusal, field=_FIELD)
    found = []
    for each in values:
        one = _value_of(name, each)
        if isinstance(one, tuple):
            raise InvalidRequest(f"vllm_xargs.{name} has a list in a list", field=_FIELD)
        found.append(one)
    return tuple(found)


def _message_of(value: ExtraValue) -> types_pb2.ExtraArgument:
    if isinstance(value, tuple):
        return types_pb2.ExtraArgument(list=types_pb2.ExtraArgumentList(values=map(_message_of, value)))
    if isinstance(value, bool):
        return types_pb2.ExtraArgument(flag=value)
    if isinstance(value, int):
        return types_pb2.ExtraArgument(integer=value)
    return types_pb2.ExtraArgument(text=value) if isinstance(value, str) else types_pb2.ExtraArgument(number=value)
