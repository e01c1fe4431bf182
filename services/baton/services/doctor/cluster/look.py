"""Reads all kinds of objects that the checks need from a namespace, one request each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from baton.services.doctor.cluster.facts import ClusterFacts, Document, Unread
from baton.services.doctor.cluster.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind and the path of its list."""

    kind: str
    api: str  # api/v1, apis/apps/v1
    name: str
    namespaced: bool = True
    metadata_only: bool = False

    def path(self, namespace: str) -> str:
        """Returns the path of its list."""
        return f"/{self.api}/namespaces/{namespace}/{self.name}" if self.namespaced else f"/{self.api}/{self.name}"


RESOURCES = (
    Resource("Deployment", "apis/apps/v1", "deployments"),
    Resource("StatefulSet", "apis/apps/v1", "statefulsets"),
    Resource("Service", "api/v1", "services"),
    Resource("ConfigMap", "api/v1", "configmaps"),
    Resource("Secret", "api/v1", "secrets", metadata_only=True),
    Resource("ServiceAccount", "api/v1", "serviceaccounts", metadata_only=True),
    Resource("PersistentVolumeClaim", "api/v1", "persistentvolumeclaims"),
    Resource("EndpointSlice", "apis/discovery.k8s.io/v1", "endpointslices"),
    Resource("HorizontalPodAutoscaler", "apis/autoscaling/v2", "horizontalpodautoscalers"),
    Resource("Role", "apis/rbac.authorization.k8s.io/v1", "roles"),
    Resource("RoleBinding", "apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    Resource("StorageClass", "apis/storage.k8s.io/v1", "storageclasses", namespaced=False),
)
_CUSTOM = {
    "keda.sh": Resource("ScaledObject", "apis/keda.sh/v1alpha1", "scaledobjects"),
}


async def observe_cluster(reader: Reader, namespace: str) -> ClusterFacts:
    """Reads a namespace. If the version cannot be read, reads nothing else."""
    version = await reader.get("/version")
    facts = ClusterFacts(namespace)
    if version.document is None:
        return replace(facts, unread=(Unread("version", version.status, version.problem),))
    groups = await reader.get("/apis")
    found = frozenset(one["name"] for one in (groups.document or {}).get("groups") or ())
    wanted = [*RESOURCES, *(one for group, one in _CUSTOM.items() if group in found)]
    readings = await asyncio.gather(*(reader.list(one.path(namespace), one.metadata_only) for one in wanted))
    pairs = list(zip(wanted, readings, strict=True))
    unread = [Unread(one.kind, reading.status, reading.problem, one.name) for one, reading in pairs if _failed(reading)]
    if groups.document is None:
        unread.append(Unread("API groups", groups.status, groups.problem))
    return replace(
        facts,
        version=str(version.document.get("gitVersion", "")),
        groups=found,
        objects={one.kind: _items(reading) for one, reading in pairs if not _failed(reading)},
        unread=tuple(unread),
    )


def _failed(reading: Reading) -> bool:
    return reading.document is None and not reading.is_missing


def _items(reading: Reading) -> tuple[Document, ...]:
    return tuple((reading.document or {}).get("items") or ())
