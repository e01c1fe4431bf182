"""One stream of generations: its requests by slot, and the frames that are sent next. The client is not known here."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import worker_pb2
from baton.worker.core import Request
from baton.worker.process.held_tokens import HeldTokens


@dataclass(slots=True, eq=False)
class Session:
    """One stream. The client is not known here."""

    channel: int
    requests: dict[int, Request] = field(default_factory=dict)  # by slot
    slots: dict[Request, int] = field(default_factory=dict)  # the inverse
    fresh: set[int] = field(default_factory=set)  # slots for which nothing was sent, but patient ones
    frame: worker_pb2.GenerateStreamResponse | None = None  # sent next
    first: worker_pb2.GenerateStreamResponse | None = None  # first tokens, sent before `frame`: they may overtake
    held: HeldTokens = field(default_factory=HeldTokens)
    patient: set[int] = field(default_factory=set)  # slots of background requests whose tokens are sent together
    urgent: bool = False  # whether a frame has more than what concerns patient slots
    waits: dict[int, None] = field(default_factory=dict)  # slots whose wait is not reported yet, in order
    due: float = 0.0  # until then, frames for patient slots wait for more
