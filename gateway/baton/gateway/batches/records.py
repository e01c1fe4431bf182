"""The stored records of files and batches, and the names of their blobs."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from baton.gateway.batches.types import FINAL, BatchObject, FileObject
from baton.rpc.errors import DataLoss

T = TypeVar("T")

# How long files and batches are kept whose client does not say otherwise, as OpenAI keeps batches' files.
KEPT_SECONDS = 30 * 86400

# A file, or the record of a batch.
FILE = "file"
BATCH = "batch"


class Unreadable(DataLoss):
    """A record cannot be decoded."""


class StoredFile(Struct, kw_only=True):
    """A file of a tenant."""

    tenant: str
    file: FileObject


class StoredBatch(Struct, kw_only=True):
    """A batch of a tenant. Only the holder of its lease replaces it."""

    tenant: str
    batch: BatchObject
    output_seconds: int = KEPT_SECONDS  # until the result files expire
    outcome: str = ""  # completed, expired, cancelled or failed; empty: lines are still run
    num_defects: int = 0  # unexpected errors that stopped it
    # Ids of the result files, chosen before they are written, so that a second attempt writes the same files.
    output_id: str = ""
    error_id: str = ""

    @property
    def is_final(self) -> bool:
        """Returns whether the batch has ended."""
        return self.batch.status in FINAL


class StoredPart(Struct, kw_only=True):
    """Results of some lines: a blob that becomes a piece of a result file."""

    name: str
    size: int
    is_error: bool  # of the error file


def file_blob(file_id: str) -> str:
    """Returns the blob of a file."""
    return f"files/{file_id}"


def batch_folder(batch_id: str) -> str:
    """Returns the folder of a batch's parts."""
    return f"batches/{batch_id}/"


_files = msgspec.json.Decoder(StoredFile)
_batches = msgspec.json.Decoder(StoredBatch)
_parts = msgspec.json.Decoder(StoredPart)


def file_of(record: bytes) -> StoredFile:
    """Decodes a file's record. Raises Unreadable."""
    return _decoded(_files, record, "file")


def batch_of(record: bytes) -> StoredBatch:
    """Decodes a batch's record. Raises Unreadable."""
    return _decoded(_batches, record, "batch")


def part_of(record: bytes) -> StoredPart:
    """Decodes a part's record. Raises Unreadable."""
    return _decoded(_parts, record, "part of a batch")


def _decoded(decoder: msgspec.json.Decoder[T], record: bytes, what: str) -> T:
    try:
        return decoder.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"the stored record of this {what} cannot be read: {error}") from error
