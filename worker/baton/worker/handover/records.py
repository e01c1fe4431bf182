"""Records of completed hand-overs, for logs and spans. Times are monotonic; the workers of one host share the clock."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A completed transfer, at the receiver."""

    request_id: str
    traceparent: str
    transport: str
    num_bytes: int
    num_retries: int
    started_at: float  # when the lease began
    first_token_at: float | None  # None: it was received after the last block
    landed_at: float
    launched_at: float | None = None  # when the step was launched that computes the next token; None: there is none

    @property
    def seconds(self) -> float:
        """Seconds from the lease to the last block. The prompt may have been computed meanwhile."""
        return self.landed_at - self.started_at

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the first token waited for the last block."""
        return 0.0 if self.first_token_at is None else self.landed_at - self.first_token_at

    @property
    def until_launch_seconds(self) -> float | None:
        """Seconds from the last block to the step's launch. None: the request did not continue."""
        return None if self.launched_at is None else self.launched_at - self.landed_at


@dataclass(frozen=True, slots=True)
class PushRecord:
    """A completed prefill for another worker, at the sender."""

    request_id: str
    traceparent: str
    num_tokens: int
    num_cached_tokens: int
    num_bytes: int
    submitted_at: float
    started_at: float  # when the first chunk was launched
    computed_at: float  # when the last layer ended, and the first token was sampled
    completed_at: float  # when TransferComplete was received


def log_record(record: TransferRecord | PushRecord) -> None:
    """Logs one line for a record."""
    text = "KV received" if isinstance(record, TransferRecord) else "KV sent"
    facts = asdict(record)
    facts.pop("traceparent")
    _log.info(text, extra=facts)
