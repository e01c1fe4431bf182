"""Models how a cluster changes replica counts: both kinds of `kubectl apply`, defaults, autoscalers and KEDA.

Client-side apply compares three documents: it removes a field that the last applied manifest has and the new one lacks.
In server-side apply fields have owners: a field is removed when its last owner leaves it out. A removed `replicas` gets
its default, 1. Lists are single values in this model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]
Key = tuple[str, str]  # kind, name
Path = tuple[str, ...]

CLIENT_SIDE = "kubectl-client-side-apply"
SERVER_SIDE = "kubectl"
CONTROLLER = "kube-controller-manager"
_COUNT: Path = ("spec", "replicas")
_WORKLOADS = ("Deployment", "StatefulSet")


class Rejected(Exception):
    """The API server rejects an object."""


class Conflict(Exception):
    """Another manager owns a field with a different value."""


@dataclass
class _Live:
    document: Document
    last_applied: Document | None = None
    owners: dict[str, set[Path]] = field(default_factory=dict)

    def set(self, values: Mapping[Path, Any], manager: str) -> None:
        """Updates fields. The manager of an update becomes the only owner of each field that it changes."""
        present = _leaves(self.document)
        for path, value in values.items():
            if path not in present or present[path] != value:
                for paths in self.owners.values():
                    paths.discard(path)
                self.owners.setdefault(manager, set()).add(path)
                put_field(self.document, path, value)

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            _take(self.document, path)
            for owned in self.owners.values():
                owned.discard(path)


class Cluster:
    """Objects by kind and name, and the lowest replica count of each workload since the last `watch`."""

    def __init__(self) -> None:
        self._objects: dict[Key, _Live] = {}
        self.lowest: dict[Key, int] = {}

    def counts(self) -> dict[Key, int]:
        """Returns the replica count of each workload."""
        return {key: live.document["spec"]["replicas"] for key, live in self._objects.items() if key[0] in _WORKLOADS}

    def watch(self) -> None:
        """Starts recording the lowest counts."""
        self.lowest = self.counts()

    def apply(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        """Runs `kubectl apply`. Controllers run after each object."""
        for manifest in manifests:
            live = self._objects.get(_key(manifest))
            if live is None:
                self._create(
                    manifest, last_applied=copy.deepcopy(dict(manifest)), manager=CLIENT_SIDE, with_defaults=True
                )
            else:
                gone = set(_leaves(live.last_applied or {})) - set(_leaves(manifest))
                live.remove(gone)
                live.set(_leaves(manifest), CLIENT_SIDE)
                live.last_applied = copy.deepcopy(dict(manifest))
            self._settle(_key(manifest))

    def apply_server_side(
        self, manifests: Iterable[Mapping[str, Any]], manager: str = SERVER_SIDE, force: bool = False
    ) -> None:
        """Runs `kubectl apply --server-side`, which first takes over the fields that client-side apply owns."""
        for manifest in manifests:
            live = self._objects.get(_key(manifest))
            if live is None:
                self._create(manifest, last_applied=None, manager=manager, with_defaults=False)
                self._settle(_key(manifest))
                continue
            if live.last_applied is not None:
                # kubectl finds the former manager by the annotation that it owns.
                live.owners.setdefault(manager, set()).update(live.owners.pop(CLIENT_SIDE, set()))
                live.last_applied = copy.deepcopy(dict(manifest))
            self._merge(live, _leaves(manifest), manager, force)
            self._settle(_key(manifest))

    def delete(self, kind: str) -> None:
        """Runs `kubectl delete KIND --all`. A ScaledObject owns its autoscaler, which is deleted too."""
        gone = [key for key in self._objects if key[0] == kind]
        for key in gone:
            if kind == "ScaledObject":
                del self._objects["HorizontalPodAutoscaler", key[1]]
            del self._objects[key]
        self._run_controllers()

    def hand_counts_over(self) -> None:
        """Runs the loop of deploy/README.md for fleets whose manifests had `replicas`."""
        for key, live in self._objects.items():
            if key[0] == "Deployment":
                live.last_applied = None
                live.owners.setdefault("counts", set()).add(_COUNT)

    def scale(self, name: str, count: int) -> None:
        """Sets a count as the autoscaler does under load."""
        self._objects["Deployment", name].set({_COUNT: count}, CONTROLLER)
        self._run_controllers()

    def _create(
        self, manifest: Mapping[str, Any], *, last_applied: Document | None, manager: str, with_defaults: bool
    ) -> None:
        document = copy.deepcopy(dict(manifest))
        live = self._objects[_key(manifest)] = _Live(document, last_applied)
        owned = set(_leaves(document))
        _default(document)
        # A create request owns defaulted fields too; server-side apply owns only the fields in its manifest.
        live.owners[manager] = set(_leaves(document)) if with_defaults else owned

    def _merge(self, live: _Live, values: Mapping[Path, Any], manager: str, force: bool) -> None:
        present = _leaves(live.document)
        differing = {path for path, value in values.items() if present.get(path) != value}
        for other, paths in live.owners.items():
            if other != manager and paths & differing:
                if not force:
                    raise Conflict(f"{_key(live.document)}: {sorted(paths & differing)} of {other}")
                paths -= differing
        left_out = live.owners.get(manager, set()) - set(values)
        kept = set().union(*(paths for other, paths in live.owners.items() if other != manager))
        live.owners[manager] = set(values)
        live.remove(left_out - kept)
        for path, value in values.items():
            put_field(live.document, path, value)

    def _settle(self, key: Key) -> None:
        _default(self._objects[key].document)
        _check(self._objects[key].document)
        self._observe()
        self._run_controllers()

    def _run_controllers(self) -> None:
        for (kind, name), live in list(self._objects.items()):
            if kind == "ScaledObject":
                self._run_keda(name, live.document["spec"])
        for (kind, _), live in self._objects.items():
            if kind == "HorizontalPodAutoscaler":
                self._run_autoscaler(live.document["spec"])
        self._observe()

    def _run_keda(self, name: str, spec: Document) -> None:
        own = spec["advanced"]["horizontalPodAutoscalerConfig"]["name"]
        for (kind, other), live in self._objects.items():
            same = kind == "HorizontalPodAutoscaler" and live.document["spec"]["scaleTargetRef"]["name"] == name
            if same and other != own:
                raise Rejected(f"ScaledObject {name}: the workload is managed by the autoscaler {other}")
        bounds = {"minReplicas": spec["minReplicaCount"], "maxReplicas": spec["maxReplicaCount"]}
        target = {"kind": "Deployment", "name": spec["scaleTargetRef"]["name"]}
        document = {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": own},
            "spec": {"scaleTargetRef": target, **bounds},
        }
        live = self._objects.setdefault(("HorizontalPodAutoscaler", own), _Live(document))
        live.set(_leaves(document), "keda-operator")

    def _run_autoscaler(self, spec: Document) -> None:
        """Clamps a count to the bounds. Within them, `scale` sets it."""
        live = self._objects.get((spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]))
        if live is not None:
            count = live.document["spec"]["replicas"]
            live.set({_COUNT: min(max(count, spec["minReplicas"]), spec["maxReplicas"])}, CONTROLLER)

    def _observe(self) -> None:
        for key, count in self.counts().items():
            if key in self.lowest:
                self.lowest[key] = min(self.lowest[key], count)


def _key(manifest: Mapping[str, Any]) -> Key:
    return manifest["kind"], manifest["metadata"]["name"]


def _default(document: Document) -> None:
    if document["kind"] in _WORKLOADS:
        document["spec"].setdefault("replicas", 1)
    if document["kind"] == "HorizontalPodAutoscaler":
        document["spec"].setdefault("minReplicas", 1)


def _check(document: Document) -> None:
    if document["kind"] == "HorizontalPodAutoscaler":
        least, most = document["spec"]["minReplicas"], document["spec"]["maxReplicas"]
        if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
            raise Rejected(f"HorizontalPodAutoscaler {document['metadata']['name']}: {least} to {most} replicas")


def _leaves(document: Mapping[str, Any], before: Path = ()) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for name, value in document.items():
        path = (*before, name)
        found.update(_leaves(value, path) if isinstance(value, dict) and value else {path: value})
    return found


def put_field(document: Document, path: Path, value: Any) -> None:
    """Sets a field to a copy of the value. Creates missing parents."""
    for name in path[:-1]:
        if not isinstance(document.get(name), dict):
            document[name] = {}
        document = document[name]
    document[path[-1]] = copy.deepcopy(value)


def _take(document: Document, path: Path) -> None:
    for name in path[:-1]:
        document = document.get(name, {})
    document.pop(path[-1], None)
