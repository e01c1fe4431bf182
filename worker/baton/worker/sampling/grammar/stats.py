"""Statistics of the grammars of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Totals since the engine's start, and current values."""

    num_compiled: int = 0  # in the engine
    num_cache_hits: int = 0
    num_tried: int = 0  # in a process of their own
    num_killed: int = 0  # of num_tried, by a limit
    num_refused: int = 0  # requests, before their first token
    num_ended: int = 0  # requests, after it
    num_waiting: int = 0  # now, in the fair queue
    num_cache_bytes: int = 0  # now, of compiled grammars
    num_live_bytes: int = 0  # now, of the matchers of running requests

    def message(self) -> control_pb2.ConstraintCounters:
        """Returns the message of these counters."""
        return control_pb2.ConstraintCounters(
            num_compiled=self.num_compiled,
            num_cache_hits=self.num_cache_hits,
            num_tried=self.num_tried,
            num_killed=self.num_killed,
            num_refused=self.num_refused,
            num_ended=self.num_ended,
            num_waiting=self.num_waiting,
            num_cache_bytes=self.num_cache_bytes,
            num_live_bytes=self.num_live_bytes,
        )
