"""Bodies of the Files and Batch APIs. One definition for parsing, encoding and the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

FINAL = ("completed", "failed", "expired", "cancelled")


class FileObject(Struct, kw_only=True):
    """An uploaded file, or the results of a batch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    """GET /v1/files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, kw_only=True):
    """The response to DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class UploadFile(Struct, kw_only=True):
    """POST /v1/files, as multipart/form-data."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: str


class ExpiresAfter(Struct, kw_only=True):
    """When a batch's result files expire."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(Struct, kw_only=True):
    """An error of an input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class BatchErrors(Struct, kw_only=True):
    """The errors of an input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, kw_only=True):
    """Requests by their state."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True):
    """A batch. Times are in Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str  # validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchList(Struct, kw_only=True):
    """GET /v1/batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
