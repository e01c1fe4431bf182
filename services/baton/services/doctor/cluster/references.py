"""Objects that pods refer to by name: Secrets, ConfigMaps, claims, accounts; and the storage classes of claims."""

from __future__ import annotations

from collections.abc import Iterator

from baton.services.doctor.cluster.facts import ClusterFacts, Document, Workload, name_of
from baton.services.doctor.finding import Finding, failed, ok, warning

_TOPIC = "references"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_FIXES = {
    "Secret": "make it, as deploy/README.md shows: pods wait in ContainerCreating until it is there",
    "ConfigMap": "make it: pods wait in ContainerCreating until it is there",
    "PersistentVolumeClaim": "make it: pods wait in Pending until it is bound",
    "ServiceAccount": "kubectl apply -k of the overlay: no pod starts without it",
}


def check_references(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks all objects that pods refer to."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for workload in facts.workloads():
        for reference in sorted(set(_references(workload))):
            wanted.setdefault(reference, []).append(workload.name)
    for (kind, name), users in sorted(wanted.items()):
        if not facts.was_read(kind):
            continue
        if facts.named(kind, name) is None:
            yield failed(_TOPIC, f"{kind} {name} is missing; {', '.join(users)} need it", _FIXES[kind])
        else:
            yield ok(_TOPIC, f"{kind} {name} is there, for {', '.join(users)}")
    yield from _claims(facts)
    yield from _classes(facts)


def _references(workload: Workload) -> Iterator[tuple[str, str]]:
    pod = workload.pod
    if pod.get("serviceAccountName"):
        yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod.get("volumes") or ():
        yield from _of_volume(volume)
    for container in (*workload.containers, *(pod.get("initContainers") or ())):
        for variable in container.get("env") or ():
            source = variable.get("valueFrom", {})
            yield from _of_keys(source, "secretKeyRef", "configMapKeyRef")
        for source in container.get("envFrom") or ():
            yield from _of_keys(source, "secretRef", "configMapRef")


def _of_volume(volume: Document) -> Iterator[tuple[str, str]]:
    secret, settings = volume.get("secret", {}), volume.get("configMap", {})
    claim = volume.get("persistentVolumeClaim", {})
    if secret and not secret.get("optional"):
        yield "Secret", secret["secretName"]
    if settings and not settings.get("optional"):
        yield "ConfigMap", settings["name"]
    if claim:
        yield "PersistentVolumeClaim", claim["claimName"]
    for source in volume.get("projected", {}).get("sources") or ():
        yield from _of_keys(source, "secret", "configMap")


def _of_keys(source: Document, secret: str, settings: str) -> Iterator[tuple[str, str]]:
    for kind, key in (("Secret", secret), ("ConfigMap", settings)):
        one = source.get(key, {})
        if one.get("name") and not one.get("optional"):
            yield kind, one["name"]


def _claims(facts: ClusterFacts) -> Iterator[Finding]:
    for claim in facts.of_kind("PersistentVolumeClaim"):
        phase = claim.get("status", {}).get("phase", "Pending")
        if phase != "Bound":
            what = f"PersistentVolumeClaim {name_of(claim)} is {phase}, not Bound"
            yield warning(_TOPIC, what, f"kubectl -n {facts.namespace} describe pvc {name_of(claim)}")


def _classes(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.was_read("StorageClass"):
        return
    known = {name_of(one) for one in facts.of_kind("StorageClass")}
    has_default = any(_is_default(one) for one in facts.of_kind("StorageClass"))
    for user, spec in _claim_specs(facts):
        name = spec.get("storageClassName")
        if name is None and not spec.get("volumeName") and not has_default:
            fix = f"a StorageClass with the annotation {_DEFAULT_CLASS}=true, or storageClassName in a patch"
            yield failed(_TOPIC, f"{user} names no StorageClass, and the cluster has no default one", fix)
        elif name and name not in known and not spec.get("volumeName"):
            fix = "kubectl get storageclass shows those that there are"
            yield failed(_TOPIC, f"StorageClass {name} is missing; {user} needs it", fix)
        else:
            yield ok(_TOPIC, f"{user} has a StorageClass")


def _claim_specs(facts: ClusterFacts) -> Iterator[tuple[str, Document]]:
    for workload in facts.workloads():
        for template in workload.document.get("spec", {}).get("volumeClaimTemplates") or ():
            yield f"{workload.kind} {workload.name}", template.get("spec", {})
    for claim in facts.of_kind("PersistentVolumeClaim"):
        if claim.get("status", {}).get("phase") != "Bound":
            yield f"PersistentVolumeClaim {name_of(claim)}", claim.get("spec", {})


def _is_default(item: Document) -> bool:
    return (item.get("metadata", {}).get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
