"""Kubernetes' strategic merge patch, for the fields of Baton's manifests, and the JSON merge patch."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]

# Lists that merge, by field and then by the key that the items have.
_MERGE_KEYS = {
    "containers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "topologySpreadConstraints": ("topologyKey",),
}


def strategic_merge(live: Document, patch: Document) -> Document:
    """Returns an object after a strategic merge patch."""
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    if "$retainKeys" in patch:
        live = {name: value for name, value in live.items() if name in patch["$retainKeys"]}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            live.pop(name, None)
        elif isinstance(value, dict):
            live[name] = strategic_merge(live.get(name, {}), value)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            live[name] = _merge_list(live.get(name, []), value, _key_of(name, [*live.get(name, []), *value]))
        else:
            live[name] = value
    for name, order in patch.items():
        if name.startswith("$setElementOrder/"):
            _order(live[name.partition("/")[2]], order)
    return live


def json_merge(live: Document, patch: Document) -> Document:
    """Returns an object after a JSON merge patch."""
    for name, value in patch.items():
        if value is None:
            live.pop(name, None)
        elif isinstance(value, dict):
            live[name] = json_merge(live[name] if isinstance(live.get(name), dict) else {}, value)
        else:
            live[name] = value
    return live


def _merge_list(live: list[Document], patch: list[Document], key: str) -> list[Document]:
    items = {item[key]: item for item in live}
    for change in patch:
        if change.get("$patch") == "delete":
            items.pop(change[key], None)
        else:
            items[change[key]] = strategic_merge(items.get(change[key], {}), change)
    return list(items.values())


def _key_of(name: str, items: list[Document]) -> str:
    return next(key for key in _MERGE_KEYS[name] if all(key in item for item in items))


def _order(items: list[Any], order: list[Document]) -> None:
    (key,) = {name for item in order for name in item}
    wanted = [item[key] for item in order]
    items.sort(key=lambda item: wanted.index(item[key]))
