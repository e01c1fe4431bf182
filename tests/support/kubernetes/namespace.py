"""A namespace of a cluster after an overlay was applied and became ready, served by the small API server."""

from __future__ import annotations

import copy

from support.kubernetes.api_server import endpoint, slice_of
from support.kubernetes.manifests import rendered

from baton.services.doctor.cluster.look import RESOURCES

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_GROUPS = ("apps", "autoscaling", "discovery.k8s.io", "metrics.k8s.io", "custom.metrics.k8s.io")


class Namespace:
    """Objects by kind, which tests change before they are served."""

    def __init__(self, overlay, name="baton", version="v1.36.0"):
        self.name = name
        self.version = version
        self.groups = set(_GROUPS)
        self.refusals = {}  # kind -> HTTP status
        self.objects = {one.kind: [] for one in RESOURCES}
        for one in rendered(overlay):
            if one["kind"] in self.objects:
                self.objects[one["kind"]].append(copy.deepcopy(one))
        self._make_by_hand()
        self._bring_up()

    def find(self, kind, name):
        (found,) = [one for one in self.objects[kind] if one["metadata"]["name"] == name]
        return found

    def workload(self, name):
        (found,) = [one for one in self._workloads() if one["metadata"]["name"] == name]
        return found

    def container(self, name):
        return self.workload(name)["spec"]["template"]["spec"]["containers"][0]

    def delete(self, kind, name):
        self.objects[kind].remove(self.find(kind, name))

    def autoscaler_of(self, name):
        """Returns the autoscaler of a workload, if the overlay has one."""
        found = [
            one for one in self.objects["HorizontalPodAutoscaler"] if one["spec"]["scaleTargetRef"]["name"] == name
        ]
        return found[0] if found else None

    def serve(self, api):
        """Stores the documents in the server."""
        api.documents.clear()
        api.documents["/version"] = (200, {"gitVersion": self.version})
        api.documents["/apis"] = (200, {"kind": "APIGroupList", "groups": [{"name": one} for one in self.groups]})
        for resource in RESOURCES:
            document = {"kind": f"{resource.kind}List", "metadata": {}, "items": self.objects[resource.kind]}
            if resource.kind in self.refusals:
                status = self.refusals[resource.kind]
                document = {"kind": "Status", "code": status, "message": f"{resource.name} is forbidden"}
                api.documents[resource.path(self.name)] = (status, document)
            else:
                api.documents[resource.path(self.name)] = (200, document)

    def _workloads(self):
        return self.objects["Deployment"] + self.objects["StatefulSet"]

    def _make_by_hand(self):
        """Creates the objects that deploy/README.md requires: Secrets, the models' claim, and the storage class."""
        self.objects["StorageClass"] = [{"metadata": {"name": "standard", "annotations": {_DEFAULT_CLASS: "true"}}}]
        for pod in (one["spec"]["template"]["spec"] for one in self._workloads()):
            for volume in pod.get("volumes", ()):
                if "secret" in volume:
                    self._make("Secret", volume["secret"]["secretName"])
                if "persistentVolumeClaim" in volume:
                    self._make("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], phase="Bound")
            for variable in pod["containers"][0].get("env", ()):
                source = variable.get("valueFrom", {}).get("secretKeyRef")
                if source:
                    self._make("Secret", source["name"])

    def _make(self, kind, name, **status):
        if all(one["metadata"]["name"] != name for one in self.objects[kind]):
            self.objects[kind].append({"metadata": {"name": name}, "spec": {}, "status": status})

    def _bring_up(self):
        """Sets the fields that controllers set."""
        for one in self._workloads():
            autoscaler = self.autoscaler_of(one["metadata"]["name"])
            least = autoscaler["spec"]["minReplicas"] if autoscaler else 1
            one["spec"].setdefault("replicas", least)
            one["status"] = {"readyReplicas": one["spec"]["replicas"]}
        for service in self.objects["Service"]:
            service["spec"].setdefault("clusterIP", "10.96.0.7")
            name = service["metadata"]["name"]
            self.objects["EndpointSlice"].append(slice_of(f"{name}-x", endpoint("10.0.0.1", ready=True), service=name))
