"""What families with Mamba-2 layers read from config.json in one way."""

from __future__ import annotations

import math

from baton.worker.models.fields import Fields

_ANY = (0.0, math.inf)


def read_step_limits(fields: Fields, key: str = "time_step_limit") -> tuple[float, float]:
    """Reads the least and the largest step size. Transformers writes infinity as an object."""
    limits = fields.raw.get(key) or _ANY
    if isinstance(limits, list | tuple) and len(limits) == 2:
        least, most = (math.inf if one == {"__float__": "Infinity"} else one for one in limits)
        if _is_number(least) and _is_number(most) and 0 <= least <= most:
            return float(least), float(most)
    raise fields.error(key, "a list of the least and the largest step size")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
