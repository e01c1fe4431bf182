"""GET requests to an API server. Never writes, and never receives a Secret's data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from baton.services.doctor.cluster.facts import Document

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.client.rest import RESTClientObject

_PAGE_SIZE = 500
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Reading:
    """A response. A status of 0 means that there was none."""

    status: int
    problem: str = ""
    document: Document | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the server does not have the resource."""
        return self.status == _NOT_FOUND


class Reader:
    """The requests of one connection, each with a deadline."""

    def __init__(self, client: RESTClientObject, settings: Configuration, seconds: float) -> None:
        self._client = client
        self._url = str(settings.host).rstrip("/")
        self._settings = settings
        self._seconds = seconds

    async def get(self, path: str, accept: str = "application/json") -> Reading:
        """Sends a GET request. Returns the response, or the reason why there is none."""
        import aiohttp

        headers = {"Accept": accept}
        token = await self._settings.get_api_key_with_prefix("BearerToken")
        if token:
            headers["Authorization"] = token
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._client.request("GET", self._url + path, headers=headers)  # type: ignore[no-untyped-call]
                body = await response.read()
        except TimeoutError:
            return Reading(0, f"no answer within {self._seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reading(0, str(error) or type(error).__name__)
        return _reading(response.status, body)

    async def list(self, path: str, metadata_only: bool = False) -> Reading:
        """Returns a document with the items of all pages. With `metadata_only`, the server omits contents."""
        items: list[Any] = []
        token = ""
        while True:
            query = f"?limit={_PAGE_SIZE}" + (f"&continue={quote(token)}" if token else "")
            page = await self.get(path + query, _METADATA_ONLY if metadata_only else "application/json")
            if page.document is None:
                return page
            items += page.document.get("items") or ()
            token = page.document.get("metadata", {}).get("continue", "")
            if not token:
                return Reading(page.status, document={"items": items})


@asynccontextmanager
async def reader(settings: Configuration, seconds: float) -> AsyncIterator[Reader]:
    """Yields a reader; `seconds` is the limit of one request."""
    from kubernetes.aio.client.rest import RESTClientObject

    client = RESTClientObject(settings)
    try:
        yield Reader(client, settings, seconds)
    finally:
        await client.close()


def _reading(status: int, body: bytes) -> Reading:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return Reading(0, f"not the answer of an API server: {body[:200]!r}")
    if status >= 300:
        return Reading(status, str(document.get("message") or "no reason was given")[:300])
    return Reading(status, document=document)
