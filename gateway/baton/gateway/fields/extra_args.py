"""Converts vllm_xargs, the arguments of logits processors, to messages of the contract and back. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from baton.gateway.schemas.requests import ExtraValue, Scalar
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2


def extra_argument(value: ExtraValue) -> types_pb2.ExtraArgument:
    """Returns one argument's message."""
    if isinstance(value, list):
        return types_pb2.ExtraArgument(list=types_pb2.ExtraArgumentList(values=map(extra_argument, value)))
    if isinstance(value, bool):
        return types_pb2.ExtraArgument(flag=value)
    if isinstance(value, int):
        return types_pb2.ExtraArgument(integer=value)
    return types_pb2.ExtraArgument(text=value) if isinstance(value, str) else types_pb2.ExtraArgument(number=value)


def xargs_of(arguments: Mapping[str, types_pb2.ExtraArgument]) -> dict[str, ExtraValue]:
    """Returns all arguments as REST has them. Raises InvalidRequest for one without a value."""
    return {name: _value_of(name, message) for name, message in arguments.items()}


def _value_of(name: str, message: types_pb2.ExtraArgument) -> ExtraValue:
    kind = message.WhichOneof("value")
    if kind == "list":
        return [_scalar_of(name, each) for each in message.list.values]
    return _scalar_of(name, message)


def _scalar_of(name: str, message: types_pb2.ExtraArgument) -> Scalar:
    kind = message.WhichOneof("value")
    if kind is None or kind == "list":
        what = "has no value" if kind is None else "has a list in a list"
        raise InvalidRequest(f"sampling.extra_args: {name} {what}", field="sampling.extra_args")
    value: Scalar = getattr(message, kind)
    return value
