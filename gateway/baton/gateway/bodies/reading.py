"""The messages between the gateway and the process that parses its large bodies."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class Task(Struct, frozen=True):
    """A body to parse; its bytes follow in another frame."""

    module: str  # of the request's type
    name: str
    strict: bool  # whether unknown keys are refused


def _nothing() -> memoryview:
    return memoryview(b"")


class Reading(Struct, frozen=True):
    """The result for a body: a request, or a problem."""

    request: memoryview = msgspec.field(
        default_factory=_nothing
    )  # as MessagePack; a part of the frame, which is not copied
    unknown: list[str] = []
    problem: str = ""
    field: str = ""
    representable: bool = True  # False: the request has values that MessagePack cannot represent
