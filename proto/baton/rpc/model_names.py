"""The names that clients call models by."""

from __future__ import annotations

from collections.abc import Sequence

from baton.rpc.errors import InvalidRequest


def check_names(names: Sequence[str], field: str = "served_model_name") -> None:
    """Raises InvalidRequest for a duplicate name."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"{field}: {name!r} is there twice; give each name once", field=field)
