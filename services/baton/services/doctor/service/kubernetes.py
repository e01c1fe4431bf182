"""The API server that a router watches: whether this pod's account may list EndpointSlices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.services import extras
from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Targets

_TOPIC = "kubernetes"
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True)
class WatchFacts:
    """One k8s:// address. A status of 0 means no response."""

    source: str  # k8s://namespace/service:port
    status: int
    problem: str = ""
    num_slices: int = 0
    missing: str = ""  # a package without which there is no request

    @property
    def namespace(self) -> str:
        """The namespace of the Service."""
        return self.source.removeprefix("k8s://").partition("/")[0]

    @property
    def service(self) -> str:
        """The name of the Service."""
        return self.source.partition("://")[2].partition("/")[2].partition(":")[0]


def check_watches(facts: tuple[WatchFacts, ...]) -> Iterator[Finding]:
    for one in facts:
        if one.missing:
            what = f"{one.source}: the package {one.missing} is not installed"
            yield failed(_TOPIC, what, extras.install_line(extras.KUBERNETES))
        elif one.status == _FORBIDDEN:
            fix = (
                f"kubectl -n {one.namespace} create rolebinding baton-router --role=baton-router "
                f"--serviceaccount={one.namespace}:baton-router   (the Role: get, list, watch of endpointslices)"
            )
            yield failed(_TOPIC, f"{one.source}: the account may not list EndpointSlices (403)", fix)
        elif one.status == _UNAUTHORIZED:
            fix = "automountServiceAccountToken: true and serviceAccountName: baton-router in the pod"
            yield failed(_TOPIC, f"{one.source}: the API server does not take the token (401)", fix)
        elif one.problem:
            fix = "--kubernetes-api URL; in a pod: a NetworkPolicy that allows port 443 of the API server"
            yield failed(_TOPIC, f"{one.source}: {one.problem}", fix)
        elif not one.num_slices:
            what = f"{one.source}: there is no EndpointSlice of such a Service"
            yield warning(
                _TOPIC, what, f"kubectl -n {one.namespace} get endpointslices,service {one.service}; 0 replicas?"
            )
        else:
            yield ok(_TOPIC, f"{one.source}: {one.num_slices} EndpointSlices")


async def observe_watches(targets: Targets, seconds: float) -> tuple[WatchFacts, ...]:
    """Lists each Service's EndpointSlices once."""
    if not targets.watched:
        return ()
    from baton.router.discovery.kubernetes_api import ApiError, KubernetesApi

    api, found = KubernetesApi(targets.kubernetes_url), []
    for source in targets.watched:
        one = WatchFacts(source, 200)
        try:
            listed = await api.list_slices(one.namespace, one.service, seconds)
        except ApiError as error:
            found.append(WatchFacts(source, error.status, str(error).partition("\n")[0][:200]))
        except ModuleNotFoundError as error:
            found.append(WatchFacts(source, 0, missing=(error.name or str(error)).partition(".")[0]))
        except TimeoutError:
            found.append(WatchFacts(source, 0, f"no answer within {seconds:.0f} s"))
        else:
            found.append(WatchFacts(source, 200, num_slices=len(listed.slices)))
    return tuple(found)
