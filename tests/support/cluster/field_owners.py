"""Owners of fields, in `metadata.managedFields` as the API server keeps them. Lists are single values here."""

from __future__ import annotations

import copy
import json
from typing import Any

from support.cluster.model import put_field

Document = dict[str, Any]
Path = tuple[str, ...]
Owner = tuple[str, str]  # manager, operation

APPLY, UPDATE = "Apply", "Update"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_CLIENT_SIDE: Owner = ("kubectl-client-side-apply", UPDATE)
_NOT_OWNED = {("metadata", name) for name in ("name", "namespace", "uid", "resourceVersion", "managedFields")}


class Conflict(Exception):
    """Another manager owns a field with another value."""


def create(document: Document, owner: Owner, paths: set[Path]) -> None:
    """Gives the fields of a new object to its creator."""
    _write(document, {owner: paths})


def update(before: Document, after: Document, owner: Owner) -> None:
    """Gives the fields that an update changes to its manager, as their only owner."""
    old, new = leaves(before), leaves(after)
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    owners = {one: (paths - changed) & set(new) for one, paths in _read(after).items()}
    owners[owner] = owners.get(owner, set()) | changed
    _write(after, owners)


def apply(live: Document, manifest: Document, manager: str, *, force: bool) -> Document:
    """Returns an object after a server-side apply. Raises Conflict."""
    document, values, owners = copy.deepcopy(live), leaves(manifest), _read(live)
    present, own = leaves(live), (manager, APPLY)
    differing = {path for path, value in values.items() if path not in present or present[path] != value}
    for other, paths in owners.items():
        if other != own and paths & differing:
            # The server lets kubectl take over what its annotation lists.
            if not force and not (other == _CLIENT_SIDE and ("metadata", "annotations", _LAST_APPLIED) in present):
                raise Conflict(f"conflicts with {other[0]}: {sorted('.'.join(path) for path in paths & differing)}")
            paths -= differing
    others = set().union(*(paths for other, paths in owners.items() if other != own))
    for path in owners.get(own, set()) - set(values) - others:
        _take(document, path)
    for path, value in values.items():
        put_field(document, path, value)
    owners[own] = set(values)
    _write(document, owners)
    annotations = document["metadata"].get("annotations", {})
    if manager == "kubectl" and _LAST_APPLIED in annotations:
        # The server keeps the annotation of client-side apply up to date.
        annotations[_LAST_APPLIED] = json.dumps(manifest)
    return document


def leaves(document: Document, before: Path = ()) -> dict[Path, Any]:
    """Returns the fields that can have owners."""
    found: dict[Path, Any] = {}
    for name, value in document.items():
        path = (*before, name)
        if path in _NOT_OWNED or path in (("apiVersion",), ("kind",), ("status",)):
            continue
        found.update(leaves(value, path) if isinstance(value, dict) and value else {path: value})
    return found


def _read(document: Document) -> dict[Owner, set[Path]]:
    entries = document["metadata"].get("managedFields", ())
    return {(one["manager"], one["operation"]): _paths(one["fieldsV1"]) for one in entries}


def _write(document: Document, owners: dict[Owner, set[Path]]) -> None:
    document["metadata"]["managedFields"] = [
        {
            "manager": manager,
            "operation": operation,
            "apiVersion": document["apiVersion"],
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(paths),
        }
        for (manager, operation), paths in owners.items()
        if paths
    ]


def _paths(tree: Document, before: Path = ()) -> set[Path]:
    found: set[Path] = set()
    for name, below in tree.items():
        path = (*before, name.removeprefix("f:"))
        found |= _paths(below, path) if below else {path}
    return found


def _tree(paths: set[Path]) -> Document:
    tree: Document = {}
    for path in sorted(paths):
        below = tree
        for name in path:
            below = below.setdefault(f"f:{name}", {})
    return tree


def _take(document: Document, path: Path) -> None:
    """Removes a field, and objects that become empty."""
    if len(path) > 1 and isinstance(document.get(path[0]), dict):
        _take(document[path[0]], path[1:])
        if document[path[0]]:
            return
    document.pop(path[0], None)
