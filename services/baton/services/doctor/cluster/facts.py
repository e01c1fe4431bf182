"""The objects of a namespace, as JSON documents, and facts of its cluster. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Document = Mapping[str, Any]
_WORKLOADS = ("Deployment", "StatefulSet")
_LABEL = re.compile(r"metadata\.labels\['(.+)'\]")  # of a fieldRef


@dataclass(frozen=True, slots=True)
class Unread:
    """A kind that could not be read. A status of 0 means no response."""

    kind: str
    status: int
    problem: str
    resource: str = ""  # its name in rules of access: secrets


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A namespace of a cluster. `unread` has the reasons for kinds that are missing in `objects`."""

    namespace: str
    version: str = ""  # of the server: v1.36.0
    groups: frozenset[str] = frozenset()  # of APIs
    objects: Mapping[str, tuple[Document, ...]] = field(default_factory=lambda: MappingProxyType({}))
    unread: tuple[Unread, ...] = ()
    overlay: str = ""  # set by the operator; empty: inferred from the objects
    components: tuple[str, ...] = ()  # named by the operator

    def was_read(self, kind: str) -> bool:
        """Returns whether the kind could be read."""
        return kind in self.objects

    def of_kind(self, kind: str) -> tuple[Document, ...]:
        """Returns the kind's objects."""
        return self.objects.get(kind, ())

    def named(self, kind: str, name: str) -> Document | None:
        """Returns the object of this kind and name, if there is one."""
        return next((one for one in self.of_kind(kind) if name_of(one) == name), None)

    def workloads(self) -> Iterator[Workload]:
        """Yields the Deployments and StatefulSets."""
        for kind in _WORKLOADS:
            for one in self.of_kind(kind):
                yield Workload(kind, one)

    def workload(self, name: str) -> Workload | None:
        """Returns the Deployment or StatefulSet of that name."""
        return next((one for one in self.workloads() if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet."""

    kind: str
    document: Document

    @property
    def name(self) -> str:
        """The name in the object's metadata."""
        return name_of(self.document)

    @property
    def replicas(self) -> int:
        """The desired number of pods."""
        value = self.document.get("spec", {}).get("replicas")
        return 1 if value is None else int(value)

    @property
    def num_ready(self) -> int:
        """The number of ready pods."""
        return int(self.document.get("status", {}).get("readyReplicas") or 0)

    @property
    def pod(self) -> Document:
        """The spec of its pods."""
        found: Document = self.document.get("spec", {}).get("template", {}).get("spec", {})
        return found

    @property
    def labels(self) -> Document:
        """The labels of its pods."""
        template = self.document.get("spec", {}).get("template", {})
        found: Document = template.get("metadata", {}).get("labels") or {}
        return found

    @property
    def containers(self) -> tuple[Document, ...]:
        """The containers of its pods."""
        return tuple(self.pod.get("containers") or ())

    @property
    def container(self) -> Document:
        """The first container, which runs the service."""
        return self.containers[0] if self.containers else {}

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables whose values are in the pod's spec or in its labels."""
        found: dict[str, str] = {}
        for one in self.container.get("env") or ():
            label = _LABEL.fullmatch((one.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath", ""))
            if "value" in one:
                found[one["name"]] = str(one["value"])
            elif label is not None and label[1] in self.labels:
                found[one["name"]] = str(self.labels[label[1]])
        return found

    @property
    def arguments(self) -> tuple[str, ...]:
        """The container's arguments, with known variables replaced by their values."""
        known = self.variables
        return tuple(
            re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), str(word))
            for word in self.container.get("args") or ()
        )

    def has_argument(self, beginning: str) -> bool:
        """Returns whether an argument equals `beginning`, or starts with it if it ends in `=` or `/`."""
        begins = beginning.endswith(("=", "/"))
        return any(word.startswith(beginning) if begins else word == beginning for word in self.arguments)

    def value_of(self, flag: str) -> str:
        """Returns the last value of a flag; empty if it is not set."""
        values = [word.removeprefix(flag + "=") for word in self.arguments if word.startswith(flag + "=")]
        return values[-1] if values else ""


def name_of(document: Document) -> str:
    """Returns an object's name."""
    return str(document.get("metadata", {}).get("name", ""))


def has_tls(facts: ClusterFacts) -> bool:
    """Returns whether any service of Baton has a certificate."""
    return any(one.value_of("--tls-certificate") for one in facts.workloads())
