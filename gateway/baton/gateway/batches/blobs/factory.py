"""Opens the blob store that the settings select."""

from __future__ import annotations

from baton.gateway.batches.blobs.store import BlobStore
from baton.rpc.errors import InvalidRequest

# Schemes that obstore serves as shared storage.
_OBJECTS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


def open_blobs(batch_store: str) -> BlobStore:
    """Returns the store of a folder or a URL. Raises InvalidRequest."""
    scheme, separator, _ = batch_store.partition("://")
    if not separator:
        from baton.gateway.batches.blobs.folder import FolderBlobs

        return FolderBlobs(batch_store)
    if scheme not in _OBJECTS:
        raise InvalidRequest(
            f"batch_store: {batch_store!r} is not allowed; give a folder, or s3://BUCKET/PREFIX, gs:// or az://",
            field="batch_store",
        )
    try:
        from baton.gateway.batches.blobs.objects import ObjectBlobs
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"batch_store: {scheme}:// needs the package obstore: pip install 'baton-inference[objects]'",
            field="batch_store",
        ) from error
    return ObjectBlobs(batch_store)
