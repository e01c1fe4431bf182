"""What chooses integers by the outputs of the model on a text, in place of rounding to the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.scheme import Scheme


class Calibration(Protocol):
    """A method, with the text that it takes."""

    def integers_of(self, linears: Sequence[str], scheme: IntegerScheme) -> Mapping[str, Integers]:
        """Returns the integers of these linears, which have the checkpoint's names. All others stay as they are.

        Raises InvalidRequest for a model or a text that it cannot take.
        """


def check_calibrated(scheme: Scheme) -> IntegerScheme:
    """Returns the scheme if a calibration can choose its numbers. Raises InvalidRequest for another."""
    if not isinstance(scheme, IntegerScheme):
        raise InvalidRequest(
            f"calibrate: {scheme.name} is rounded to the nearest alone; the formats of integers in groups are "
            "calibrated: gptq, awq, w4a16, w4a16-asym and w8a16",
            field="calibrate",
        )
    return scheme
