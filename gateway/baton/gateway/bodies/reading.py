"""The messages between the gateway and the process that parses its large bodies."""

from __future__ import annotations

from msgspec import Struct


class Task(Struct, frozen=True):
    """A body to parse; its bytes follow in another frame."""

    module: str  # of the request's type
    name: str
    strict: bool  # whether unknown keys are refused


class Reading(Struct, frozen=True):
    """The result for a body: a request, or a problem."""

    request: bytes = b""  # as MessagePack
    unknown: list[str] = []
    problem: str = ""
    field: str = ""
    representable: bool = True  # False: the request has values that MessagePack cannot represent
