"""The adapters that clients may name in place of a model, from what workers report and what was just changed here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

# How long a change made through this gateway counts without a report that shows it.
_OWN_SECONDS = 3.0


class Adaptable(Protocol):
    """A model, or a view of it with an adapter."""

    info: types_pb2.ModelInfo | None  # the last report of its workers
    adapter: types_pb2.AdapterInfo | None

    def with_adapter(self, adapter: types_pb2.AdapterInfo) -> Self:
        """Returns the view with an adapter."""


M = TypeVar("M", bound=Adaptable)


class AdapterViews(Generic[M]):
    """Views of models by the names of their adapters. `is_model`: whether a model has the name.

    Reports come in order and when something changes. So a change made here counts until a report shows it, and every
    later report is right about it.
    """

    def __init__(self, is_model: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._is_model = is_model
        self._clock = clock
        self._reported: dict[str, M] = {}
        self._added: dict[str, tuple[float, M]] = {}  # until when, of those that no report has shown
        self._removed: dict[str, tuple[float, int]] = {}  # until when, and when the adapter was registered
        self._hidden: frozenset[str] = frozenset()  # names that models have

    def views(self) -> list[M]:
        """Returns all views, by name."""
        names = {*self._reported, *self._added}
        return [view for name in sorted(names) if (view := self.get(name)) is not None]

    def get(self, name: str) -> M | None:
        """Returns the view of an adapter."""
        view = self._reported.get(name)
        added = self._added.get(name)
        if (
            added is not None
            and added[0] > self._clock()
            and (view is None or _registered(view) < _registered(added[1]))
        ):
            view = added[1]
        if view is None or not self._removed:
            return view
        until, registered = self._removed.get(name, (0.0, 0))
        return None if until > self._clock() and _registered(view) <= registered else view

    def add(self, model: M, adapter: types_pb2.AdapterInfo) -> None:
        """Adds an adapter of a model, or replaces it."""
        self._removed.pop(adapter.name, None)
        view, known = model.with_adapter(adapter), self._reported.get(adapter.name)
        if known is None or _registered(known) < _registered(view):
            self._added[adapter.name] = (self._clock() + _OWN_SECONDS, view)

    def remove(self, name: str) -> None:
        """Removes an adapter. Idempotent."""
        view = self.get(name)
        self._added.pop(name, None)
        if view is not None:
            self._removed[name] = (self._clock() + _OWN_SECONDS, _registered(view))

    def update(self, models: Sequence[M]) -> None:
        """Applies the reports of these models' workers."""
        reported = {
            adapter.name: model.with_adapter(adapter)
            for model in models
            if model.info is not None
            for adapter in model.info.adapters
        }
        self._hide([name for name in reported if self._is_model(name)])
        self._reported = {name: view for name, view in reported.items() if not self._is_model(name)}
        now = self._clock()
        self._added = {
            name: (until, view)
            for name, (until, view) in self._added.items()
            if until > now and (name not in reported or _registered(reported[name]) < _registered(view))
        }
        self._removed = {name: one for name, one in self._removed.items() if one[0] > now and name in reported}

    def _hide(self, names: Sequence[str]) -> None:
        hidden = frozenset(names)
        if new := hidden - self._hidden:
            _log.warning("adapters have the names of models, which are served instead: %s", ", ".join(sorted(new)))
        self._hidden = hidden


def _registered(view: Adaptable) -> int:
    return 0 if view.adapter is None else view.adapter.registered_ms
