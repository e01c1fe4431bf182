"""The plugins that an operator allows: found by their names, and loaded where a service asks for their kind."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from baton.plugins.installed import InstalledPlugin, installed_plugins
from baton.plugins.kinds import KINDS, Kind
from baton.rpc.errors import InvalidRequest, ServiceError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class PluginError(InvalidRequest):
    """A plugin that is not installed, not unique, not for this version, or that fails to start."""

    def __init__(self, message: str) -> None:
        super().__init__(f"plugins: {message}", field="plugins")


class Plugins:
    """The allowed plugins of one process. Nothing of them is imported before `start`."""

    def __init__(self, allowed: Iterable[InstalledPlugin] = ()) -> None:
        self._allowed = tuple(allowed)

    @classmethod
    def named(cls, names: Sequence[str], service: str = "") -> Plugins:
        """Returns the installed plugins of these names. Raises PluginError for a name that `service` cannot load;
        empty: one that none can."""
        if not names:
            return cls()
        installed = installed_plugins()
        repeated = [name for name in names if list(names).count(name) > 1]
        if repeated:
            raise PluginError(f"{repeated[0]!r} is named twice")
        return cls(plugin for name in names for plugin in _of_name(name, installed, service))

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def of(self, kind: Kind) -> tuple[InstalledPlugin, ...]:
        """Returns the allowed plugins of a kind."""
        return tuple(plugin for plugin in self._allowed if plugin.kind == kind.name)

    def start(self, kind: Kind, make: Callable[[Any], T]) -> dict[str, T]:
        """Imports the plugins of a kind, and returns what `make` makes of each one's object, by name.

        Raises PluginError that names a plugin that fails.
        """
        made: dict[str, T] = {}
        for plugin in self.of(kind):
            with naming(plugin):
                made[plugin.name] = make(plugin.entry_point.load())
            _log.info("loaded the plugin %s: %s", plugin.name, plugin.label)
        return made

    def extend(self, kind: Kind, own: Mapping[str, T], make: Callable[[Any], T]) -> dict[str, T]:
        """Returns a registry's table with the plugins of its kind. Raises PluginError for a name that it has."""
        self.refuse_names(kind, own)
        return {**own, **self.start(kind, make)}

    def refuse_names(self, kind: Kind, own: Container[str]) -> None:
        """Raises PluginError for a plugin with a name of Baton's own."""
        for plugin in self.of(kind):
            if plugin.name in own:
                raise PluginError(f"{plugin.name!r} is the name of one of Baton's own {kind.name} ({plugin.label})")


NO_PLUGINS = Plugins()


def names_for(service: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the names that a service loads. Raises PluginError for a name that none loads."""
    installed = installed_plugins() if names else []
    return tuple(
        name
        for name in names
        if any(service in KINDS[plugin.kind].services for plugin in _of_name(name, installed, ""))
    )


def instance_of(expected: type[T]) -> Callable[[Any], T]:
    """Returns a `make` that takes objects of a type as they are."""

    def make(found: Any) -> T:
        if not isinstance(found, expected):
            raise TypeError(f"it is a {type(found).__name__}; it must be a {expected.__name__}")
        return found

    return make


def subclass_of(expected: type) -> Callable[[Any], type]:
    """Returns a `make` that takes subclasses of a class as they are."""

    def make(found: Any) -> type:
        if not isinstance(found, type) or not issubclass(found, expected):
            shown = found.__name__ if isinstance(found, type) else f"an object of {type(found).__name__}"
            raise TypeError(f"it is {shown}; it must be a subclass of {expected.__name__}")
        return found

    return make


@contextmanager
def naming(plugin: InstalledPlugin, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Reports what a plugin raises at its start as an error that names it, except errors of the types `but`."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        message = error.message if isinstance(error, ServiceError) else str(error)
        _log.error("the plugin %s cannot be started", plugin.name, exc_info=error)
        raise PluginError(
            f"{plugin.name!r} cannot be started ({plugin.label}): {type(error).__name__}: {message}"
        ) from error


def _of_name(name: str, installed: Sequence[InstalledPlugin], service: str) -> list[InstalledPlugin]:
    """Returns the plugins of one name, all of one package. Raises PluginError."""
    found = [plugin for plugin in installed if plugin.name == name]
    if not found:
        raise PluginError(_unknown(name, installed))
    owners = sorted({plugin.distribution for plugin in found})
    if len(owners) > 1:
        raise PluginError(f"{name!r} is the name of plugins of {' and of '.join(owners)}; uninstall all but one")
    usable = [plugin for plugin in found if not plugin.problem]
    wanted = [plugin for plugin in usable if not service or service in KINDS[plugin.kind].services]
    if not wanted and (unusable := next((plugin for plugin in found if plugin.problem), None)) is not None:
        raise PluginError(f"{name!r} cannot be loaded ({unusable.label}): {unusable.problem}")
    if not wanted:
        kinds = ", ".join(plugin.kind for plugin in usable)
        services = ", ".join(dict.fromkeys(each for plugin in usable for each in KINDS[plugin.kind].services))
        raise PluginError(f"{name!r} is of the kind {kinds}, which is loaded by {services} and not by {service}")
    kinds_of_name = [plugin.kind for plugin in wanted]
    twice = next((kind for kind in kinds_of_name if kinds_of_name.count(kind) > 1), None)
    if twice is not None:
        raise PluginError(f"{owners[0]} has two plugins {name!r} of the kind {twice}")
    return wanted


def _unknown(name: str, installed: Sequence[InstalledPlugin]) -> str:
    names = list(dict.fromkeys(plugin.name for plugin in installed))
    if not names:
        return f"{name!r} is not installed, and neither is any other plugin"
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{name!r} is not installed{meant}; installed are {', '.join(names)}"
