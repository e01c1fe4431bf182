"""Blobs in object storage: S3 and what speaks its protocol, Google Cloud Storage, Azure. By the library obstore."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from baton.gateway.batches.blobs.store import BlobMissing
from baton.rpc.errors import InvalidRequest, Unavailable

_log = logging.getLogger(__name__)

# Larger blobs are uploaded in parts of this size; S3 takes at most 10,000 parts.
_PART_BYTES = 8 << 20
_UPLOADS_AT_ONCE = 2


class ObjectBlobs:
    """Implements BlobStore. The cloud's own variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ..) hold the rest.

    Raises InvalidRequest for a wrong URL.
    """

    def __init__(self, url: str) -> None:
        # Object stores inside a cluster are often reached without TLS, which the endpoint's URL says.
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:")
        try:
            self._store: Any = from_url(url, client_options={"allow_http": plain})
        except (BaseError, ValueError) as error:
            raise InvalidRequest(f"batch_store: {url!r} is not allowed: {error}", field="batch_store") from error

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        with _translated("write"), ThreadPoolExecutor(1, "batch pieces") as thread:
            counted = _Counted(pieces, thread)
            obstore.put(self._store, name, iter(counted), chunk_size=_PART_BYTES, max_concurrency=_UPLOADS_AT_ONCE)
        return counted.num_bytes

    def read(self, name: str, offset: int, length: int) -> bytes:
        with _translated("read"):
            size = obstore.head(self._store, name)["size"]
            if offset >= size:
                return b""
            return bytes(obstore.get_range(self._store, name, start=offset, end=min(size, offset + length)))

    def delete(self, name: str) -> None:
        try:
            with _translated("delete"):
                obstore.delete(self._store, name)
        except BlobMissing:
            return

    def names(self, prefix: str) -> list[str]:
        with _translated("list"):
            pages = obstore.list(self._store, prefix.rstrip("/"))
            return sorted(str(entry["path"]) for page in pages for entry in page)


class _Counted:
    """Counts the bytes that it yields. Makes the pieces on another thread, because they may be read from a store:
    obstore refuses to read while it is asked for the next piece of a blob.
    """

    def __init__(self, pieces: Iterable[bytes], thread: ThreadPoolExecutor) -> None:
        self._pieces = iter(pieces)
        self._thread = thread
        self.num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._thread.submit(next, self._pieces, None).result()) is not None:
            self.num_bytes += len(piece)
            yield piece


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise BlobMissing("the stored bytes are missing") from error
    except (BaseError, OSError) as error:
        # Its text names hosts and buckets, which are for operators.
        _log.warning("cannot %s in batch_store: %s", what, str(error).partition("\n")[0][:300])
        raise Unavailable(f"cannot {what} in batch_store; retry later", retry_after_ms=1000) from error
