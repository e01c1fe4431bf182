"""The API server and the credentials to read it: a URL, a kubeconfig, or the pod's own service account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.router.discovery.kubernetes_api import KubernetesApi

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration


class NoAccess(Exception):
    """There is no API server to examine, or a file cannot be used."""


@dataclass(frozen=True, slots=True)
class Access:
    """The cluster to read. Empty fields are not set."""

    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    kubeconfig: str = ""
    context: str = ""


def access_of(given: Access, environ: Mapping[str, str]) -> Access:
    """Returns `given`, or else $KUBECONFIG, ~/.kube/config or the pod's service account."""
    if given.url or given.kubeconfig:
        return given
    usual = Path(environ.get("HOME", "/")) / ".kube" / "config"
    kubeconfig = environ.get("KUBECONFIG", "") or (str(usual) if usual.is_file() else "")
    if kubeconfig:
        return Access(kubeconfig=kubeconfig, context=given.context)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        pod = KubernetesApi()
        return Access(pod.url, pod.token_file, pod.ca_file)
    raise NoAccess("no cluster is named; give --kubeconfig FILE or --kubernetes-api URL, or run it in a pod")


async def settings_of(access: Access) -> Configuration:
    """Returns the configuration of Kubernetes' client. NoAccess: a file cannot be used."""
    if access.url:
        _check_files(access)
        return KubernetesApi(access.url, access.token_file, access.ca_file).settings()
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config

    settings = Configuration()
    try:
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=access.kubeconfig,
            context=access.context or None,
            client_configuration=settings,
            persist_config=False,
        )
    except (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoAccess(f"--kubeconfig={access.kubeconfig}: {error}") from error
    settings.client_session_kwargs = {"trust_env": False}
    return settings


def _check_files(access: Access) -> None:
    for flag, file in (("--token-file", access.token_file), ("--ca-file", access.ca_file)):
        if file and not Path(file).is_file():
            raise NoAccess(f"{flag}={file}: there is no such file")
