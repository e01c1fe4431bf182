"""vLLM's parameters of a beam search."""

from __future__ import annotations

from dataclasses import dataclass

from baton.llm.parameters.names import InvalidParameter, with_named_errors


@with_named_errors
@dataclass
class BeamSearchParams:
    """The beams' number and length, and how they are compared: score = log-probability / length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # beams are compared by the model's own probabilities, so only 0 and 1 are the same search
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(f"{name} is {value!r}; give a number of at least 1", field=name)
        if self.temperature not in (0.0, 1.0):
            raise InvalidParameter(
                f"temperature is {self.temperature!r}; a beam search compares the model's own probabilities: "
                "leave it out",
                field="temperature",
            )
