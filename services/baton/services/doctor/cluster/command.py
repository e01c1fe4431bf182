"""The settings of `baton doctor kubernetes`, and its findings.

`access` finds the API server, `reader` reads, `facts` holds the objects; each other file checks one topic. Reads only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.router.discovery.kubernetes_api import KubernetesApi
from baton.rpc.errors import InvalidRequest
from baton.services.doctor.cluster.access import Access, NoAccess, access_of
from baton.services.doctor.cluster.examination import examine_cluster
from baton.services.doctor.cluster.facts import ClusterFacts
from baton.services.doctor.cluster.promises import COMPONENTS, OVERLAYS
from baton.services.doctor.finding import Finding
from baton.services.settings import SettingsError

ABOUT = (
    "Compares a live namespace with what deploy/README.md promises, read only: cluster version, CRDs, rights, counts, "
    "arguments, Secrets, storage classes, Service ports. Exit code 1 means that something does not work."
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The cluster and the namespace to examine."""

    namespace: str = field(default="baton", metadata={"help": "The fleet's namespace."})
    overlay: str = field(
        default="",
        metadata={
            "help": "The overlay that was applied. Empty: inferred from the objects.",
            "choices": ("", *OVERLAYS),
        },
    )
    components: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": f"Enabled components that need CRDs: {', '.join(COMPONENTS)}.",
            "metavar": "NAME,..",
        },
    )
    kubeconfig: str = field(
        default="",
        metadata={
            "help": "A kubeconfig. Empty: $KUBECONFIG, ~/.kube/config, or in a pod its service account.",
            "metavar": "FILE",
        },
    )
    context: str = field(default="", metadata={"help": "Of the kubeconfig. Empty: its current one."})
    kubernetes_api: str = field(
        default="", metadata={"help": "The API server, without a kubeconfig.", "metavar": "URL"}
    )
    token_file: str = field(
        default="", metadata={"help": "A bearer token for --kubernetes-api. Empty: none.", "metavar": "FILE"}
    )
    ca_file: str = field(
        default="",
        metadata={"help": "The CA of --kubernetes-api. Empty: the system's authorities.", "metavar": "FILE"},
    )

    def validate(self) -> None:
        """Raises InvalidRequest if fields contradict each other."""
        unknown = [name for name in self.components if name not in COMPONENTS]
        if unknown:
            allowed = ", ".join(COMPONENTS)
            raise InvalidRequest(
                f"components={unknown[0]!r} is not allowed; give some of {allowed}", field="components"
            )
        if not self.namespace:
            raise InvalidRequest("namespace is empty", field="namespace")
        if self.kubernetes_api:
            KubernetesApi(self.kubernetes_api).validate("kubernetes_api")
        if self.kubernetes_api and self.kubeconfig:
            raise InvalidRequest("kubernetes_api and kubeconfig are both given; give one", field="kubeconfig")


def findings_of(config: ClusterConfig, environ: Mapping[str, str], seconds: float) -> list[Finding]:
    """Returns the findings. SettingsError: no cluster can be reached with these settings."""
    given = Access(config.kubernetes_api, config.token_file, config.ca_file, config.kubeconfig, config.context)
    facts = ClusterFacts(config.namespace, overlay=config.overlay, components=config.components)
    try:
        return asyncio.run(examine_cluster(access_of(given, environ), facts, seconds))
    except NoAccess as error:
        raise SettingsError(str(error)) from error
