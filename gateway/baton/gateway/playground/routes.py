"""GET / and its files: the playground, a chat page that uses only this gateway's API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Route

FOLDER = Path(__file__).parent / "page"
ASSETS = "/playground/"

_CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Allows only its own files and its own API, and no text that becomes markup or code.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page."""

    body: bytes
    content_type: str
    etag: str

    def answer(self, exchange: Exchange) -> None:
        """Responds with the file, or 304 if the client has it."""
        headers = {
            "etag": self.etag,
            "cache-control": "no-cache",  # stored, but revalidated by its etag each time
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        if self._is_known(exchange):
            # The content-length of a 304 is that of the file.
            exchange.respond(304, headers={"content-length": str(len(self.body)), **headers})
        else:
            exchange.respond(200, self.body, self.content_type, headers)

    def _is_known(self, exchange: Exchange) -> bool:
        tags = exchange.headers.get(b"if-none-match", b"").decode("latin-1").split(",")
        return any(tag.strip().removeprefix("W/") in (self.etag, "*") for tag in tags)


def playground_routes(enabled: bool) -> list[Route]:
    """Returns the routes of the page and its files; none if the playground is disabled."""
    if not enabled:
        return []
    files = read_files(FOLDER)
    page = files.pop("index.html")
    return [
        Route("GET", "/", page.answer, "Returns the playground's page.", content_type="text/html", public=True),
        Route(
            "GET",
            ASSETS + "{file}",
            partial(_answer_file, files),
            "Returns a file of the playground.",
            errors=(404,),
            public=True,
        ),
    ]


def read_files(folder: Path) -> dict[str, StaticFile]:
    """Returns the files of a folder by name. Raises KeyError for an unknown kind of file."""
    return {path.name: _read(path) for path in sorted(folder.iterdir())}


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer_file(files: dict[str, StaticFile], exchange: Exchange) -> None:
    name = exchange.path.removeprefix(ASSETS)
    file = files.get(name)
    if file is None:
        raise HttpError(404, f"the playground has no file {name!r}", param="file")
    file.answer(exchange)
