"""EndpointSlices of a Kubernetes API server, listed and watched with Kubernetes' own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from baton.router.discovery.pace import Pace
from baton.rpc.errors import InvalidRequest

if TYPE_CHECKING:
    import aiohttp
    from kubernetes.aio.client import Configuration, V1EndpointSlice
    from kubernetes.aio.watch import Watch

_PAGE_SIZE = 500
# A machine that vanished is noticed after 30 s, earlier than by its missing bookmarks.
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # some systems name them otherwise
_MAX_LINE_BYTES = 16 << 20
DEFAULT_URL = "https://kubernetes.default.svc"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class ApiError(Exception):
    """The server refused (its HTTP status), or cannot be spoken to (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}" if status else message)
        self.status = status


class UnexpectedAnswer(ApiError):
    """The server sent an invalid response. A retry of the same request would get the same."""

    def __init__(self, what: str) -> None:
        super().__init__(0, f"not the answer of an API server: {what[:500]}")


class Silence(ApiError):
    """An open watch sent nothing for too long, not even bookmarks."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0, f"no event and no bookmark for {seconds:g} s")


@dataclass(frozen=True, slots=True)
class SliceList:
    """Every EndpointSlice of a Service as of one version, from which it can be watched."""

    slices: tuple[V1EndpointSlice, ...]
    version: str


@dataclass(frozen=True, slots=True)
class SliceEvent:
    """The type of a watch event. BOOKMARK confirms that all events up to its version were sent."""

    kind: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    version: str
    slice: V1EndpointSlice | None = None  # None: a bookmark


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """An API server, and how to be believed there. The files are read for each connection: tokens change."""

    url: str = DEFAULT_URL
    token_file: str = f"{_ACCOUNT}/token"  # one that does not exist: no token is sent
    ca_file: str = f"{_ACCOUNT}/ca.crt"  # one that does not exist: the system's authorities

    def validate(self, field: str) -> None:
        """Raises InvalidRequest for a URL that cannot be one."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{field}={self.url!r} is not http://host or https://host", field=field)

    def load_client(self, field: str) -> None:
        """Imports Kubernetes' client, so that a router without it does not start. Raises InvalidRequest."""
        try:
            import kubernetes.aio.client  # noqa: F401
        except ImportError as error:
            package = (error.name or str(error)).partition(".")[0]
            raise InvalidRequest(
                f'{field}: k8s:// needs the package {package}: pip install "baton-inference[kubernetes]"',
                field=field,
            ) from error

    async def list_slices(self, namespace: str, service: str, page_seconds: float) -> SliceList:
        """Returns all pages. ApiError, TimeoutError."""
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api

        slices: list[V1EndpointSlice] = []
        token: str | None = None
        with _errors():
            async with ApiClient(self.settings()) as client:
                while True:
                    async with asyncio.timeout(page_seconds):
                        page = await DiscoveryV1Api(client).list_namespaced_endpoint_slice(
                            namespace, label_selector=_selector(service), limit=_PAGE_SIZE, _continue=token
                        )
                    slices += page.items
                    metadata = page.metadata
                    token = metadata.var_continue if metadata is not None else None
                    if not token:
                        return SliceList(tuple(slices), (metadata and metadata.resource_version) or "")

    async def watch_slices(
        self, namespace: str, service: str, version: str, pace: Pace
    ) -> AsyncGenerator[SliceEvent, None]:
        """Yields everything after that version, until the server ends the watch.

        ApiError (410: the version is too old; Silence), TimeoutError.
        """
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api

        with _errors():
            async with ApiClient(self.settings()) as client, _watch() as watch:
                events = watch.stream(
                    DiscoveryV1Api(client).list_namespaced_endpoint_slice,
                    namespace,
                    label_selector=_selector(service),
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=pace.watch,
                    _request_timeout=pace.watch + pace.silence,
                )
                # Connecting has no limit of its own: a server that vanished would be waited for to the end.
                async with asyncio.timeout(pace.request):
                    watch.resp = await watch.func()
                _probe_connection(watch.resp)
                while (event := await _next_event(events, pace.silence)) is not None:
                    if not isinstance(event, dict):
                        raise UnexpectedAnswer(str(event))
                    item = event["object"] if event["type"] != "BOOKMARK" else None
                    yield SliceEvent(event["type"], watch.resource_version or version, item)

    def settings(self) -> Configuration:
        """Returns what Kubernetes' client needs; reads the files."""
        from kubernetes.aio.client import Configuration

        settings = Configuration(
            host=self.url.rstrip("/"),
            ssl_ca_cert=self.ca_file if self.ca_file and Path(self.ca_file).exists() else None,
            # An API server is not behind the proxy that an environment may name.
            client_session_kwargs={"trust_env": False, "read_bufsize": _MAX_LINE_BYTES},
        )
        token = Path(self.token_file)
        if self.token_file and token.exists():
            settings.api_key["BearerToken"] = f"Bearer {token.read_text().strip()}"
        return settings


def _watch() -> Watch:
    from kubernetes.aio.watch import Watch

    return Watch("V1EndpointSlice")  # type: ignore[no-untyped-call]


async def _next_event(events: Any, silence_seconds: float) -> Any:
    """Returns the next event, or None if the server ended the watch. Raises Silence if none arrived in time."""
    try:
        async with asyncio.timeout(silence_seconds):
            return await anext(events, None)
    except TimeoutError as error:
        raise Silence(silence_seconds) from error


def _probe_connection(response: aiohttp.ClientResponse) -> None:
    """Enables TCP keepalive for a watch's connection."""
    connection = response.connection
    transport = connection.transport if connection is not None else None
    if transport is not None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _selector(service: str) -> str:
    return f"kubernetes.io/service-name={service}"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Translates the client's exceptions, some of which are bare Exceptions."""
    import aiohttp
    from kubernetes.aio.client import ApiException

    try:
        yield
    except (ApiError, TimeoutError):
        raise
    except ApiException as error:
        raise ApiError(int(error.status or 0), _reason(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(0, str(error) or type(error).__name__) from error
    except Exception as error:
        raise UnexpectedAnswer(f"{type(error).__name__}: {error}") from error


def _reason(error: Exception) -> str:
    """Formats a Status in one line."""
    body = getattr(error, "body", None)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(body or "").get("message") or error.reason)  # type: ignore[attr-defined]
    return str(body or getattr(error, "reason", "") or "no reason was given")[:500]
