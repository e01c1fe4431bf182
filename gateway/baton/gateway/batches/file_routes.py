"""The routes of /v1/files."""

from __future__ import annotations

import asyncio

import msgspec

from baton.gateway.batches.blobs.store import BlobMissing
from baton.gateway.batches.files import Files, check_expiry, check_purpose
from baton.gateway.batches.pages import page_query
from baton.gateway.batches.records import file_blob
from baton.gateway.batches.types import DeletedFile, FileList, FileObject, UploadFile
from baton.gateway.batches.upload import Form, boundary_of, read_form
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Parameter, Route
from baton.rpc.errors import InvalidRequest, Unavailable

PATH = "/v1/files"

_MAX_PAGE = 10_000
_IDS = "file-[^/]+"
_PIECE_BYTES = 1 << 20
_CONTENT_TYPE = "application/octet-stream"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_PARAMETERS = (
    Parameter("limit", "Files per page.", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE}),
    Parameter("after", "The id of the file before the page.", {"type": "string"}),
    Parameter("order", "Order by time.", {"enum": ["asc", "desc"], "default": "desc"}),
    Parameter("purpose", "Only files with this purpose.", {"type": "string"}),
)


class FileRoutes:
    """Handles the routes of files."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def create(self, exchange: Exchange) -> None:
        """Handles POST /v1/files."""
        if exchange.spool is None:
            message = "the API key became valid after the upload had begun; send it again"
            raise Unavailable(message, retry_after_ms=1)
        body, boundary = await exchange.spool.complete(), boundary_of(exchange.headers)
        form = await asyncio.to_thread(read_form, body, boundary)
        purpose, expires_after = check_purpose(form.values.get("purpose")), _expires_after(form)
        if form.file is None:
            raise InvalidRequest("file is required; give it as a part with a filename", field="file")
        if not form.file.size:
            raise InvalidRequest("file is empty", field="file")
        tenant = exchange.identity.tenant.name
        sent = form.file
        file = await self._files.create(tenant, sent.filename, purpose, sent.size, sent.pieces(), expires_after)
        exchange.respond(200, msgspec.json.encode(file))

    async def list(self, exchange: Exchange) -> None:
        """Handles GET /v1/files."""
        query = page_query(exchange.query, _MAX_PAGE, _MAX_PAGE)
        files, has_more = await self._files.page(exchange.identity.tenant.name, query)
        first, last = (files[0].id, files[-1].id) if files else (None, None)
        page = FileList(data=files, first_id=first, last_id=last, has_more=has_more)
        exchange.respond(200, msgspec.json.encode(page))

    async def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/files/{file_id}."""
        exchange.respond(200, msgspec.json.encode(await self._found(exchange)))

    async def delete(self, exchange: Exchange) -> None:
        """Handles DELETE /v1/files/{file_id}."""
        file_id = _id_of(exchange)
        await self._files.delete(exchange.identity.tenant.name, file_id)
        exchange.respond(200, msgspec.json.encode(DeletedFile(id=file_id)))

    async def content(self, exchange: Exchange) -> None:
        """Handles GET /v1/files/{file_id}/content, at the client's speed."""
        file = await self._found(exchange)
        if exchange.method == "HEAD" or not file.bytes:
            fields = {"content-type": _CONTENT_TYPE, "content-length": str(file.bytes)}
            exchange.respond(200, headers=fields)
            return
        moved = asyncio.Event()
        exchange.on_writable.append(moved.set)
        exchange.on_end.append(lambda _: moved.set())
        offset = 0
        while offset < file.bytes and not exchange.ended:
            piece = await self._files.blobs.read(file_blob(file.id), offset, min(_PIECE_BYTES, file.bytes - offset))
            if not piece:
                raise BlobMissing(f"the stored bytes of {file.id} end at {offset} of {file.bytes}")
            if not offset:
                exchange.stream(_CONTENT_TYPE)
            exchange.write(piece)
            offset += len(piece)
            while not (exchange.writable or exchange.ended):
                moved.clear()
                await moved.wait()
        exchange.end()

    async def _found(self, exchange: Exchange) -> FileObject:
        return await self._files.get(exchange.identity.tenant.name, _id_of(exchange))


def file_routes(files: Files) -> list[Route]:
    """Returns the routes under /v1/files."""
    handlers = FileRoutes(files)
    one, errors = f"{PATH}/{{file_id}}", (400, 404, 503)
    return [
        Route(
            "POST",
            PATH,
            handlers.create,
            "Stores a file, sent as multipart/form-data.",
            UploadFile,
            FileObject,
            errors=(400, 408, 413, 503),
            body_type="multipart/form-data",
        ),
        Route(
            "GET",
            PATH,
            handlers.list,
            "Lists the files.",
            response=FileList,
            errors=(400, 503),
            parameters=_PARAMETERS,
        ),
        Route("GET", one, handlers.get, "Returns a file.", response=FileObject, errors=errors, ids=_IDS),
        Route("DELETE", one, handlers.delete, "Deletes a file.", response=DeletedFile, errors=errors, ids=_IDS),
        Route(
            "GET",
            f"{one}/content",
            handlers.content,
            "Returns a file's bytes.",
            content_type=_CONTENT_TYPE,
            errors=errors,
            ids=_IDS,
        ),
    ]


def _id_of(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{PATH}/").partition("/")[0]


def _expires_after(form: Form) -> int | None:
    anchor, seconds = form.values.get(_ANCHOR), form.values.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"{_ANCHOR} is {(anchor or '')[:40]!r}; give created_at", field="expires_after")
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidRequest(f"{_SECONDS} is {(seconds or '')[:40]!r}; give a number", field="expires_after")
    return check_expiry(int(seconds), _SECONDS)
