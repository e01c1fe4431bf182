"""A small S3: one bucket in memory, for clients of the real protocol. Signatures are not checked."""

from __future__ import annotations

import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class S3Server:
    """Serves for the lifetime of a `with`. `failing`: every request is answered with 500."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.num_uploads = 0
        self.failing = False
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment of its clients."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": url, **keys}

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_state: S3Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *ignored: object) -> None:
        """Says nothing."""

    def do_PUT(self) -> None:
        body, (key, query), state = self._body(), self._target(), self.server_state
        if "partNumber" in query:
            state.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            state.objects[key] = body
        self._answer(200, headers={"ETag": f'"{uuid.uuid4().hex}"'})

    def do_POST(self) -> None:
        body, (key, query), state = self._body().decode(), self._target(), self.server_state
        if "uploads" in query:
            name = uuid.uuid4().hex
            state.uploads[name] = {}
            state.num_uploads += 1
            inner = f"<Bucket>b</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            self._xml(f"<InitiateMultipartUploadResult>{inner}</InitiateMultipartUploadResult>")
        elif "uploadId" in query:
            parts = state.uploads.pop(query["uploadId"])
            state.objects[key] = b"".join(parts[number] for number in sorted(parts))
            inner = f'<Location>x</Location><Bucket>b</Bucket><Key>{escape(key)}</Key><ETag>"x"</ETag>'
            self._xml(f"<CompleteMultipartUploadResult>{inner}</CompleteMultipartUploadResult>")
        else:
            names = re.findall(r"<Key>(.*?)</Key>", body)
            for name in names:
                state.objects.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._xml(f"<DeleteResult>{deleted}</DeleteResult>")

    def do_DELETE(self) -> None:
        key, query = self._target()
        if "uploadId" in query:
            self.server_state.uploads.pop(query["uploadId"], None)
        else:
            self.server_state.objects.pop(key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        _key, query = self._target()
        if "list-type" in query:
            self._list(query.get("prefix", ""))
        else:
            self._get()

    def _list(self, prefix: str) -> None:
        found = sorted((key, data) for key, data in self.server_state.objects.items() if key.startswith(prefix))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"x"</ETag><Size>{len(data)}</Size></Contents>'
            for key, data in found
        )
        self._xml(f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")

    def _get(self) -> None:
        data = self.server_state.objects.get(self._target()[0])
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        fields = {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted is None:
            self._answer(200, data, fields)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        fields["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(206, data[first : last + 1], fields)

    def _target(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).removeprefix("/bucket").lstrip("/"), query

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.server_state.failing:
            status, body = 403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
