"""The resolvers that a worker asks, in their order, and the names that it may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.plugins.kinds import ADAPTER_RESOLVERS
from baton.plugins.plugins import NO_PLUGINS, Plugins, naming, subclass_of
from baton.rpc.errors import InvalidRequest, NotFound, PermissionDenied
from baton.rpc.model_names import is_allowed
from baton.worker.adapters.resolvers.folder import FolderResolver
from baton.worker.adapters.resolvers.hub_cache import HubCacheResolver
from baton.worker.adapters.resolvers.interface import AdapterResolver, ResolverContext

OWN: Mapping[str, type[AdapterResolver]] = {"folder": FolderResolver, "hub": HubCacheResolver}


@dataclass(frozen=True, slots=True)
class Resolvers:
    """Finds adapters whose names match a pattern, by the first resolver that knows the name."""

    by_name: Mapping[str, AdapterResolver]
    patterns: tuple[str, ...]

    @property
    def roots(self) -> list[str]:
        """The folders in which adapters lie."""
        return list(dict.fromkeys(root for one in self.by_name.values() for root in one.roots))

    def check_name(self, name: str) -> None:
        """Raises PermissionDenied for a name that no pattern allows."""
        if not is_allowed(name, self.patterns):
            raise PermissionDenied(
                f"{name!r} is not one of lora_resolver_names ({', '.join(self.patterns)})", field="lora_name"
            )

    def find(self, name: str) -> str:
        """Returns the folder of an adapter. May take long. Raises NotFound, and PermissionDenied for a folder outside
        the resolver's own."""
        for own, resolver in self.by_name.items():
            path = resolver.find(name)
            if path is None:
                continue
            if not is_within(path, resolver.roots):
                raise PermissionDenied(
                    f"the resolver {own} found {name!r} at {path}, which is outside its folders "
                    f"({', '.join(resolver.roots)})",
                    field="lora_name",
                )
            return path
        raise NotFound(f"no adapter is called {name!r}, says {' and '.join(self.by_name)}", field="lora_name")


def is_within(path: str, roots: Sequence[str]) -> bool:
    """Returns whether a path lies in one of these folders, after links and `..` are followed."""
    resolved = Path(path).expanduser().resolve()
    return any(resolved.is_relative_to(Path(root).expanduser().resolve()) for root in roots)


def make_resolvers(
    names: Sequence[str], patterns: Sequence[str], context: ResolverContext, plugins: Plugins = NO_PLUGINS
) -> Resolvers | None:
    """Returns the resolvers of these names; None without any. Raises InvalidRequest, PluginError, Unsupported."""
    if not names:
        return None
    kinds = plugins.extend(ADAPTER_RESOLVERS, OWN, subclass_of(AdapterResolver))
    made: dict[str, AdapterResolver] = {}
    for name in names:
        if name not in kinds:
            raise InvalidRequest(
                f"lora_resolvers: {name!r} is unknown; it must be some of {', '.join(kinds)}", field="lora_resolvers"
            )
        made[name] = _made(name, kinds[name], context, plugins)
    return Resolvers(made, tuple(patterns))


def _made(name: str, kind: type[AdapterResolver], context: ResolverContext, plugins: Plugins) -> AdapterResolver:
    plugin = next((one for one in plugins.of(ADAPTER_RESOLVERS) if one.name == name), None)
    if plugin is None:
        return kind(context)
    with naming(plugin):
        return kind(context)
