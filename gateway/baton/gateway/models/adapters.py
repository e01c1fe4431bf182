"""The adapters that clients may name in place of a model, from what workers report and what was just changed here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

# How long a change made through this gateway counts more than reports, which may be older.
_OWN_SECONDS = 3.0


class Adaptable(Protocol):
    """A model, or a view of it with an adapter."""

    info: types_pb2.ModelInfo | None  # the last report of its workers
    adapter: types_pb2.AdapterInfo | None

    def with_adapter(self, adapter: types_pb2.AdapterInfo) -> Self:
        """Returns the view with an adapter."""


M = TypeVar("M", bound=Adaptable)


class AdapterViews(Generic[M]):
    """Views of models by the names of their adapters. `is_model`: whether a model has the name."""

    def __init__(self, is_model: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._is_model = is_model
        self._clock = clock
        self._views: dict[str, M] = {}
        self._added: dict[str, tuple[float, M]] = {}  # when they were loaded through this gateway
        self._removed: dict[str, float] = {}
        self._hidden: frozenset[str] = frozenset()  # names that models have

    def views(self) -> list[M]:
        """Returns all views, by name."""
        return [self._views[name] for name in sorted(self._views)]

    def get(self, name: str) -> M | None:
        """Returns the view of an adapter."""
        return self._views.get(name)

    def add(self, model: M, adapter: types_pb2.AdapterInfo) -> None:
        """Adds an adapter of a model, or replaces it."""
        view = model.with_adapter(adapter)
        self._removed.pop(adapter.name, None)
        self._added[adapter.name] = (self._clock(), view)
        self._views[adapter.name] = view

    def remove(self, name: str) -> None:
        """Removes an adapter. Idempotent."""
        self._added.pop(name, None)
        self._removed[name] = self._clock()
        self._views.pop(name, None)

    def update(self, models: Sequence[M]) -> None:
        """Applies the reports of these models' workers."""
        since = self._clock() - _OWN_SECONDS
        self._added = {name: one for name, one in self._added.items() if one[0] > since}
        self._removed = {name: at for name, at in self._removed.items() if at > since}
        reported = {
            adapter.name: model.with_adapter(adapter)
            for model in models
            if model.info is not None
            for adapter in model.info.adapters
        }
        self._hide([name for name in reported if self._is_model(name)])
        left_out = [name for name in reported if name in self._removed or self._is_model(name)]
        views = {name: view for name, view in reported.items() if name not in left_out}
        for name, (_, view) in self._added.items():
            known = views.get(name)
            if known is None or _registered(known) < _registered(view):
                views[name] = view
        self._views = views

    def _hide(self, names: Sequence[str]) -> None:
        hidden = frozenset(names)
        if new := hidden - self._hidden:
            _log.warning("adapters have the names of models, which are served instead: %s", ", ".join(sorted(new)))
        self._hidden = hidden


def _registered(view: Adaptable) -> int:
    return 0 if view.adapter is None else view.adapter.registered_ms
