"""What a trial found out about one constraint, and its form between the processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one trial. Without a problem the constraint may be compiled in the engine."""

    problem: str = ""  # the whole message of a refusal
    grammar: str = ""  # the grammar library's text; empty where refused
    num_bytes: int = 0  # that the compilation keeps
    cpu_seconds: float = 0.0
    signal: int = 0  # that ended the trial; 0: none
    failure: str = ""  # a defect's exception

    def encode(self) -> bytes:
        """Returns the verdict as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        """Raises ValueError for bytes that are none, as of a trial that was ended."""
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("a verdict is an object")
        return cls(**fields)
