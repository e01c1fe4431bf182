"""Records that cannot be decoded: what is still legible of a batch, and the failed batch that takes its place."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.gateway.batches.records import StoredBatch
from baton.gateway.batches.state.store import Entry
from baton.gateway.batches.types import BatchError, BatchErrors, BatchObject


def failed_in_place_of(entry: Entry, record: bytes, reason: str, output_ids: tuple[str, str], now: int) -> StoredBatch:
    """Returns a batch that failed, with the fields of an unreadable record that can still be read.

    It is not final: its result files, with the ids `output_ids`, are written of the lines that are recorded.
    """
    fields: dict[str, Any] = {
        "endpoint": "",
        "input_file_id": "",
        "completion_window": "",
        "created_at": now,
        "expires_at": now,
        **_legible_fields(record),
        "id": entry.name,
        "status": "finalizing",
        "finalizing_at": now,
        "errors": BatchErrors(data=[BatchError(code="unreadable_record", message=reason)]),
    }
    output_id, error_id = output_ids
    batch = BatchObject(**fields)
    return StoredBatch(tenant=entry.tenant, batch=batch, outcome="failed", output_id=output_id, error_id=error_id)


def _legible_fields(record: bytes) -> dict[str, Any]:
    """Returns the batch's fields that have the right types, one by one."""
    try:
        stored = msgspec.json.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    batch = stored.get("batch") if isinstance(stored, dict) else None
    if not isinstance(batch, dict):
        return {}
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(BatchObject):
        if field.encode_name in batch:
            try:
                found[field.name] = msgspec.convert(batch[field.encode_name], field.type)
            except msgspec.ValidationError:
                continue
    return found
