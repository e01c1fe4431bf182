"""The kinds of plugins: their entry point groups, the version of each interface, and the services that load them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The setting of every service that loads plugins.
SETTING: Mapping[str, str] = {
    "help": "Installed plugins to load, by name; `baton plugins` lists them. Empty: none is loaded.",
    "metavar": "NAME,..",
}
GATEWAY, ROUTER, KVSTORE, WORKER = "gateway", "router", "kvstore", "worker"
_GROUP = re.compile(r"baton\.(?P<kind>[a-z_]+?)(?:\.v(?P<version>\d+))?")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plugin."""

    name: str
    version: int  # of the interface; a change that breaks plugins makes it one more
    services: tuple[str, ...]  # that load it
    summary: str

    @property
    def group(self) -> str:
        """The entry point group of plugins for this version."""
        return f"baton.{self.name}.v{self.version}"


LOGITS_PROCESSORS = Kind("logits_processors", 1, (WORKER,), "changes logits before a token is sampled")
TOOL_PARSERS = Kind("tool_parsers", 1, (GATEWAY,), "reads tool calls in a model's text")
REASONING_PARSERS = Kind("reasoning_parsers", 1, (GATEWAY,), "separates a model's reasoning from its answer")
MODEL_FAMILIES = Kind("model_families", 1, (WORKER,), "describes the layers of an architecture")
WEIGHT_FORMATS = Kind("weight_formats", 1, (WORKER,), "reads and multiplies quantized weights")
PROPOSERS = Kind("proposers", 1, (WORKER,), "guesses the next tokens of requests, for speculative decoding")
ADAPTER_RESOLVERS = Kind("adapter_resolvers", 1, (WORKER,), "finds LoRA adapters when requests first name them")
TRANSPORTS = Kind("transports", 1, (WORKER,), "moves KV between workers")
ENDPOINTS = Kind("endpoints", 1, (GATEWAY,), "adds REST routes")
METRIC_SINKS = Kind("metric_sinks", 1, (GATEWAY, ROUTER, KVSTORE, WORKER), "receives metrics every few seconds")

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        LOGITS_PROCESSORS,
        TOOL_PARSERS,
        REASONING_PARSERS,
        MODEL_FAMILIES,
        WEIGHT_FORMATS,
        PROPOSERS,
        ADAPTER_RESOLVERS,
        TRANSPORTS,
        ENDPOINTS,
        METRIC_SINKS,
    )
}


def parse_group(group: str) -> tuple[str, int | None] | None:
    """Returns the kind and version that a group names, which may be unknown; None if the group is not Baton's."""
    found = _GROUP.fullmatch(group)
    if found is None:
        return None
    version = found["version"]
    return found["kind"], None if version is None else int(version)
