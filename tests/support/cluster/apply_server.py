"""A Kubernetes API server for `kubectl apply`: discovery, patches, field owners, immutable fields, autoscalers.

It has no schema and no admission.
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
from urllib.parse import parse_qs, urlsplit

import yaml
from support.cluster import field_owners
from support.cluster.merge_patch import json_merge, strategic_merge

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
        """Starts recording the lowest counts."""
        self.lowest = self.counts()

    def counts(self) -> dict[Key, int]:
        return {key: one["spec"]["replicas"] for key, one in self._objects.items() if key[0] in _WORKLOADS}

    def get(self, key: Key) -> Document | None:
        return self._objects.get(key)

    def list(self, key: Key) -> Document:
        """Returns all objects of the key's kind and namespace."""
        items = [one for (*place, _), one in self._objects.items() if tuple(place) == key[:2]]
        return {"kind": f"{key[0]}List", "apiVersion": items[0]["apiVersion"] if items else "v1", "items": items}

    def scale(self, name: str, count: int) -> None:
        """Sets a Deployment's count, as an autoscaler does under load."""
        for key, one in self._objects.items():
            if key[0] == "Deployment" and key[2] == name:
                self._scale(one, count)

    def create(self, key: Key, document: Document, manager: str) -> Document:
        """Stores a new object. Its creator owns defaulted fields too."""
        _default(document)
        field_owners.create(document, (manager, field_owners.UPDATE), set(field_owners.leaves(document)))
        return self._store(key, document)

    def update(self, key: Key, document: Document, manager: str) -> Document:
        """Stores a changed object. Raises Invalid if an immutable field changes."""
        _default(document)
        field_owners.update(self._objects[key], document, (manager, field_owners.UPDATE))
        return self._store(key, document)

    def replace_owners(self, key: Key, patch: list[Document]) -> Document:
        """Runs kubectl's JSON patch of `managedFields`."""
        document = copy.deepcopy(self._objects[key])
        for step in patch:
            if step["path"] == "/metadata/managedFields":
                document["metadata"]["managedFields"] = step["value"]
            else:
                assert step["path"] == "/metadata/resourceVersion", step
        return self._store(key, document)

    def apply(self, key: Key, manifest: Document, manager: str, *, force: bool) -> Document:
        """Runs a server-side apply. Raises field_owners.Conflict and Invalid."""
        live = self._objects.get(key)
        if live is None:
            document = copy.deepcopy(manifest)
            field_owners.create(document, (manager, field_owners.APPLY), set(field_owners.leaves(document)))
        else:
            document = field_owners.apply(live, manifest, manager, force=force)
        _default(document)
        return self._store(key, document)

    def _store(self, key: Key, document: Document) -> Document:
        with self._lock:
            before = self._objects.get(key)
            if before is not None:
                _check_immutable(before, document)
            document["metadata"].setdefault("uid", "-".join(key))
            version = int(before["metadata"]["resourceVersion"]) if before else 0
            document["metadata"]["resourceVersion"] = str(version + 1)
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
                    self._scale(target, min(count, spec["maxReplicas"]))
        self._observe()

    def _scale(self, target: Document, count: int) -> None:
        before = copy.deepcopy(target)
        target["spec"]["replicas"] = count
        field_owners.update(before, target, ("kube-controller-manager", field_owners.UPDATE))

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
        found = None
        if key is not None:
            found = self.server.objects.get(key) if key[2] else self.server.objects.list(key)
        self._answer(200, found) if found else self._status(404, "NotFound", f"{path} not found")

    def do_POST(self) -> None:
        document = json.loads(self._body())
        key = self._key(urlsplit(self.path).path, document["metadata"]["name"])
        assert key, self.path
        self._answer(201, self.server.objects.create(key, document, self._query("fieldManager")))

    def do_PATCH(self) -> None:
        key = self._key(urlsplit(self.path).path)
        assert key, self.path
        try:
            self._answer(200, self._patched(key, self.headers["Content-Type"], self._query("fieldManager")))
        except Invalid as error:
            self._status(422, "Invalid", str(error))
        except field_owners.Conflict as error:
            self._status(409, "Conflict", str(error))

    def _patched(self, key: Key, kind: str, manager: str) -> Document:
        objects, body = self.server.objects, self._body()
        if kind.startswith("application/apply-patch"):
            return objects.apply(key, yaml.safe_load(body), manager, force=self._query("force") == "true")
        if kind.startswith("application/json-patch"):
            return objects.replace_owners(key, json.loads(body))
        live = objects.get(key)
        assert live is not None, self.path
        merge = strategic_merge if "strategic" in kind else json_merge
        return objects.update(key, merge(copy.deepcopy(live), json.loads(body)), manager)

    def _query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, ["unknown"])[0]

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


def _default(document: Document) -> None:
    if document["kind"] in _WORKLOADS:
        document["spec"].setdefault("replicas", 1)


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
