"""The verdict of a trial, and its encoding between the processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one trial. Without a problem the constraint may be compiled in the engine."""

    problem: str = ""  # the whole error message
    grammar: str = ""  # the grammar library's text; empty with a problem
    num_bytes: int = 0  # of the compilation
    cpu_seconds: float = 0.0
    signal: int = 0  # that ended the trial; 0: none
    failure: str = ""  # a defect's exception

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        """Decodes a verdict. Raises ValueError for incomplete bytes, as of a killed trial."""
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("a verdict is an object")
        return cls(**fields)
