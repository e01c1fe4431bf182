"""A Kubernetes API server for `kubectl apply`: discovery, objects, both merge patches, immutable fields, autoscalers.

It has no schema and no admission. Lists merge by key as in Kubernetes' strategic merge patch, for the fields of Baton's
manifests.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Document = dict[str, Any]
Key = tuple[str, str, str]  # kind, namespace, name

_BUILT_IN = {
    "v1": ("Namespace", "Service", "ServiceAccount", "ConfigMap", "Secret"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
_SHORT_NAMES = {"HorizontalPodAutoscaler": "hpa", "PodDisruptionBudget": "pdb"}
_WORKLOADS = ("Deployment", "StatefulSet")
# Lists that merge, by field and then by the key that the items have.
_MERGE_KEYS = {
    "containers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "topologySpreadConstraints": ("topologyKey",),
}
_STATEFUL_SET_MUTABLE = {"replicas", "template", "updateStrategy", "minReadySeconds"}


class Invalid(Exception):
    """A change that the API server rejects."""


class Objects:
    """The stored objects. Autoscalers run after each change."""

    def __init__(self) -> None:
        self._objects: dict[Key, Document] = {}
        self._lock = threading.Lock()
        self.lowest: dict[Key, int] = {}  # counts of workloads since `watch`

    def watch(self) -> None:
        """Starts to record the lowest counts."""
        self.lowest = self.counts()

    def counts(self) -> dict[Key, int]:
        return {key: one["spec"]["replicas"] for key, one in self._objects.items() if key[0] in _WORKLOADS}

    def get(self, key: Key) -> Document | None:
        return self._objects.get(key)

    def all(self) -> list[Document]:
        return list(self._objects.values())

    def scale(self, name: str, count: int) -> None:
        """Sets a Deployment's count, as an autoscaler does under load."""
        for key, one in self._objects.items():
            if key[0] == "Deployment" and key[2] == name:
                one["spec"]["replicas"] = count

    def write(self, key: Key, document: Document) -> Document:
        """Stores an object. Raises Invalid where an immutable field changes."""
        with self._lock:
            before = self._objects.get(key)
            if document["kind"] in _WORKLOADS:
                document["spec"].setdefault("replicas", 1)
            if before is not None:
                _check_immutable(before, document)
            document["metadata"].setdefault("uid", "-".join(key))
            document["metadata"]["resourceVersion"] = str(int(document["metadata"].get("resourceVersion", 0)) + 1)
            self._objects[key] = document
            self._observe()
            self._run_autoscalers()
            return document

    def _run_autoscalers(self) -> None:
        for (kind, namespace, _), one in self._objects.items():
            if kind == "HorizontalPodAutoscaler":
                spec = one["spec"]
                target = self._objects.get((spec["scaleTargetRef"]["kind"], namespace, spec["scaleTargetRef"]["name"]))
                if target is not None:
                    count = max(target["spec"]["replicas"], spec["minReplicas"])
                    target["spec"]["replicas"] = min(count, spec["maxReplicas"])
        self._observe()

    def _observe(self) -> None:
        for key, count in self.counts().items():
            if key in self.lowest:
                self.lowest[key] = min(self.lowest[key], count)


@contextlib.contextmanager
def apply_server(crds: dict[str, tuple[str, ...]] | None = None) -> Iterator[tuple[str, Objects]]:
    """Runs a server with the built-in kinds and those of `crds`, by apiVersion. Yields its address and its objects."""
    server = _Server({**_BUILT_IN, **(crds or {})})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.objects
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, kinds: dict[str, tuple[str, ...]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kinds = kinds
        self.objects = Objects()

    def kind_of(self, api_version: str, plural: str) -> str:
        return next(kind for kind in self.kinds[api_version] if _plural(kind) == plural)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment
    server: _Server

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        discovered = self._discovery(path)
        if discovered is not None:
            self._answer(200, discovered)
            return
        key = self._key(path)
        found = self.server.objects.get(key) if key else None
        self._answer(200, found) if found else self._status(404, "NotFound", f"{path} not found")

    def do_POST(self) -> None:
        document = json.loads(self._body())
        key = self._key(urlsplit(self.path).path, document["metadata"]["name"])
        assert key, self.path
        self._answer(201, self.server.objects.write(key, document))

    def do_PATCH(self) -> None:
        key = self._key(urlsplit(self.path).path)
        live = self.server.objects.get(key) if key else None
        assert key, self.path
        assert live is not None, self.path
        merge = strategic_merge if "strategic" in self.headers["Content-Type"] else json_merge
        try:
            self._answer(200, self.server.objects.write(key, merge(copy.deepcopy(live), json.loads(self._body()))))
        except Invalid as error:
            self._status(422, "Invalid", str(error))

    def _discovery(self, path: str) -> Document | None:
        groups = [version for version in self.server.kinds if "/" in version]
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(version) for version in groups]}
        version = path.removeprefix("/api/").removeprefix("/apis/")
        if version in self.server.kinds:
            resources = [_resource(kind) for kind in self.server.kinds[version]]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        return None

    def _key(self, path: str, name: str = "") -> Key | None:
        found = re.fullmatch(
            r"/apis?/(?P<version>[\w.]+(?:/v\w+)?)(?:/namespaces/(?P<namespace>[\w-]+))?/(?P<rest>.+)", path
        )
        if path.startswith("/api/v1/namespaces") and path.count("/") <= 4:
            return "Namespace", "", name or path.rpartition("/")[2]
        if found is None:
            return None
        plural, _, own = found["rest"].partition("/")
        return self.server.kind_of(found["version"], plural), found["namespace"] or "", own or name

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _status(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._answer(code, {**status, "message": message})

    def _answer(self, code: int, document: Document) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


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


def _check_immutable(before: Document, after: Document) -> None:
    kind, name = after["kind"], after["metadata"]["name"]
    old, new = before.get("spec", {}), after.get("spec", {})
    changed = {field for field in {*old, *new} if old.get(field) != new.get(field)}
    if kind == "Deployment" and "selector" in changed:
        raise Invalid(f"Deployment {name}: spec.selector: field is immutable")
    if kind == "StatefulSet" and changed - _STATEFUL_SET_MUTABLE:
        raise Invalid(f"StatefulSet {name}: updates to {sorted(changed - _STATEFUL_SET_MUTABLE)} are forbidden")
    if kind == "Service" and "clusterIP" in changed:
        raise Invalid(f"Service {name}: spec.clusterIP: field is immutable")
    if kind == "RoleBinding" and before["roleRef"] != after["roleRef"]:
        raise Invalid(f"RoleBinding {name}: roleRef: field is immutable")


def _plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"


def _group(version: str) -> Document:
    entry = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [entry], "preferredVersion": entry}


def _resource(kind: str) -> Document:
    verbs = ["get", "list", "create", "patch", "delete"]
    names = {"name": _plural(kind), "singularName": kind.lower(), "kind": kind}
    short = [_SHORT_NAMES[kind]] if kind in _SHORT_NAMES else []
    return {**names, "shortNames": short, "namespaced": kind != "Namespace", "verbs": verbs}
