"""A small Kubernetes API server for EndpointSlices: pages, watches with bookmarks, and their faults.

Faults are a compacted history, connections that stay open and fall silent, a restored older state, and an outage. Other
resources are documents by path, read only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from urllib.parse import parse_qs, urlsplit

_WATCH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def endpoint(*addresses, **conditions):
    return {"addresses": list(addresses), "conditions": conditions}


def slice_of(name, *endpoints, port=8300, port_name="grpc", service="workers", address_type="IPv4"):
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": address_type,
        "ports": [{"name": "metrics", "port": 9000}, {"name": port_name, "port": port}],
        "endpoints": list(endpoints),
    }


class ApiServer:
    """An HTTP/1.1 server with chunked watches. Every change has a resourceVersion; old ones can be dropped.

    `bookmark_seconds` is the interval of bookmarks in a watch; 0: only by bookmark().
    """

    def __init__(self, token="secret", ssl_context=None, bookmark_seconds=0.0):
        self.token = token
        self.requests = []  # (path, query)
        self.version = 100
        self.page_size = 2
        self.fail_with = None  # a status for every request
        self.delay = 0.0  # seconds before every answer
        self.expire_pages = 0  # number of later pages that are too old when requested
        self.bookmark_seconds = bookmark_seconds
        self.documents = {}  # path -> (status, document) of other resources
        self._silent = set()  # connections that no longer send
        self._ssl_context = ssl_context
        self._oldest = 100
        self._objects = {}
        self._history = []  # (version, type, object)
        self._changed = asyncio.Event()
        self._connections = set()

    async def start(self, port=0):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._ssl_context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self):
        """Ends every connection."""
        for writer in self._connections:
            writer.transport.abort()

    def fall_silent(self):
        """Stops sending on all open connections without closing them. New ones work."""
        self._silent |= self._connections

    def restore(self, version, *items):
        """Restarts with an older state, as from a backup. Versions continue from there."""
        self._objects = {item["metadata"]["name"]: item for item in items}
        self.version, self._history, self._oldest = version, [], version
        self.cut()

    def drain(self, name, serving=True):
        """Deletes the pods of a slice: their endpoints terminate, and serve until their probes fail."""
        item = self._objects[name]
        conditions = {"ready": False, "serving": serving, "terminating": True}
        self.put({**item, "endpoints": [{**one, "conditions": conditions} for one in item["endpoints"]]})

    @property
    def num_watches(self):
        """Returns the number of watch requests."""
        return sum("watch" in query for _, query in self.requests)

    @property
    def num_lists(self):
        """Returns the number of requested pages of lists."""
        return sum("watch" not in query for _, query in self.requests)

    def put(self, item):
        self._change("MODIFIED" if item["metadata"]["name"] in self._objects else "ADDED", item)
        self._objects[item["metadata"]["name"]] = item

    def delete(self, name):
        self._change("DELETED", self._objects.pop(name))

    def bookmark(self):
        """Increments only the version, as after a change of another object."""
        self._change("BOOKMARK", {"metadata": {}})

    def compact(self):
        """Drops all changes, so that earlier watches are too old, including open ones."""
        self.version += 10  # of other resources
        self._history, self._oldest = [], self.version
        self._wake()

    def _change(self, kind, item):
        self.version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._history.append((self.version, kind, item))
        self._wake()

    def _wake(self):
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _serve(self, reader, writer):
        self._connections.add(writer)
        try:
            while True:
                await self._answer_one((await reader.readuntil(b"\r\n\r\n")).decode(), writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer_one(self, head, writer):
        url = urlsplit(head.split()[1])
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.requests.append((url.path, query))
        await asyncio.sleep(self.delay)
        if self.token is not None and f"authorization: bearer {self.token}" not in head.lower():
            await self._answer(writer, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif self.fail_with:
            status = {"kind": "Status", "code": self.fail_with, "message": "as asked for"}
            await self._answer(writer, self.fail_with, status)
        elif url.path in self.documents:
            await self._answer(writer, *self.documents[url.path])
        elif not url.path.endswith("/endpointslices"):
            await self._answer(writer, 404, {"kind": "Status", "code": 404, "message": "not found"})
        elif query.get("watch", "").lower() in ("1", "true"):
            await self._watch(writer, int(query["resourceVersion"]), query)
        else:
            await self._list(writer, query)

    async def _answer(self, writer, status, document):
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _list(self, writer, query):
        start = int(query.get("continue", 0))
        if start and self.expire_pages:
            self.expire_pages -= 1
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "the continue token is too old"}
            await self._answer(writer, 410, status)
            return
        chosen = [one for one in self._objects.values() if _matches(one, query)]
        page = chosen[start : start + self.page_size]
        metadata = {"resourceVersion": str(self.version)}
        if start + self.page_size < len(chosen):
            metadata["continue"] = str(start + self.page_size)
        await self._answer(
            writer,
            200,
            {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata, "items": page},
        )

    async def _watch(self, writer, since, query):
        writer.write(_WATCH_HEAD)
        loop = asyncio.get_running_loop()
        end = loop.time() + float(query.get("timeoutSeconds", 1e9))
        while loop.time() < end:
            changed = self._changed
            if writer in self._silent:
                await asyncio.Event().wait()
            if since < self._oldest:
                error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await self._chunk(writer, {"type": "ERROR", "object": error})
                break
            for version, kind, item in list(self._history):
                if version > since and (kind == "BOOKMARK" or _matches(item, query)):
                    await self._chunk(writer, {"type": kind, "object": item})
                since = max(since, version)
            pause = min(end - loop.time(), self.bookmark_seconds or 1e9)
            try:
                async with asyncio.timeout(pause):
                    await changed.wait()
            except TimeoutError:
                if self.bookmark_seconds and writer not in self._silent:
                    await self._chunk(writer, {"type": "BOOKMARK", "object": self._marked(self.version)})
        writer.write(b"0\r\n\r\n")

    def _marked(self, version):
        return {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(version)}}

    async def _chunk(self, writer, document):
        line = json.dumps(document).encode() + b"\n"
        # In two pieces, so that lines are received in parts.
        for piece in (line[:7], line[7:]):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)


def _matches(item, query):
    name, _, value = query["labelSelector"].partition("=")
    return item["metadata"]["labels"][name] == value


@contextlib.contextmanager
def api_server_thread(**settings):
    """Yields (server, call) of a server with its own loop. call(f, ...) runs f in it and returns the result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(function, *arguments):
        async def run():
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), loop).result(10)

    server = call(ApiServer(**settings).start)
    try:
        yield server, call
    finally:
        call(server.stop)
        call(_end_tasks)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end_tasks():
    """Ends the tasks of connections, some of which never end by themselves."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
