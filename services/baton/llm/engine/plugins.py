"""The plugins of an offline engine: those of its worker, and parsers of reasoning."""

from __future__ import annotations

from typing import Any

from baton.llm.parameters.names import InvalidParameter
from baton.plugins.kinds import LOGITS_PROCESSORS, MODEL_FAMILIES, REASONING_PARSERS, WEIGHT_FORMATS
from baton.plugins.plugins import Plugins

_OF_WORKER = (LOGITS_PROCESSORS, MODEL_FAMILIES, WEIGHT_FORMATS)


def offline_plugins(names: Any) -> tuple[tuple[str, ...], Plugins]:
    """Returns the names for the worker, and the allowed plugins. Raises InvalidParameter, or PluginError."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InvalidParameter(f"plugins is {names!r}; give a list of names", field="plugins")
    allowed = Plugins.named(names)
    of_worker = {plugin.name for kind in _OF_WORKER for plugin in allowed.of(kind)}
    usable = of_worker | {plugin.name for plugin in allowed.of(REASONING_PARSERS)}
    for name in names:
        if name not in usable:
            kinds = ", ".join(kind.name for kind in (*_OF_WORKER, REASONING_PARSERS))
            raise InvalidParameter(f"plugins: {name!r} is not of a kind for offline use: {kinds}", field="plugins")
    return tuple(name for name in names if name in of_worker), allowed
