"""What one hand-over took, as each end's log tells it. Times are of the monotonic clock; workers of a host share it."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A transfer that is complete, at the receiver."""

    request_id: str
    traceparent: str
    transport: str
    num_bytes: int
    num_retries: int
    started_at: float  # the lease
    first_token_at: float | None  # None: it came after the last block
    landed_at: float
    launched_at: float | None = None  # of the step that computes the next token; None: there is none

    @property
    def seconds(self) -> float:
        """From the lease to the last block; the prompt may have been computed meanwhile."""
        return self.landed_at - self.started_at

    @property
    def exposed_seconds(self) -> float:
        """How long the first token waited for the last block."""
        return 0.0 if self.first_token_at is None else self.landed_at - self.first_token_at

    @property
    def until_launch_seconds(self) -> float | None:
        """From the last block to the step's launch. None: the request did not go on."""
        return None if self.launched_at is None else self.launched_at - self.landed_at


@dataclass(frozen=True, slots=True)
class PushRecord:
    """A prompt that was computed for another worker and is there, at the sender."""

    request_id: str
    traceparent: str
    num_tokens: int
    num_cached_tokens: int
    num_bytes: int
    submitted_at: float
    started_at: float  # the first chunk's launch
    computed_at: float  # the last layer's end, and the first token
    completed_at: float  # TransferComplete came


def log_record(record: TransferRecord | PushRecord) -> None:
    """One line a hand-over and end."""
    text = "KV received" if isinstance(record, TransferRecord) else "KV sent"
    facts = asdict(record)
    facts.pop("traceparent")
    _log.info(text, extra=facts)
