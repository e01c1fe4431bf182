"""CORS as a browser holds to it: pages of a named origin and of another one ask a gateway with keys, in Chromium."""

import asyncio
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.gateway import browser
from support.gateway.access_rig import key_file
from support.gateway.scripted_gateway import running

# What of an answer the page can see; "blocked" where the browser keeps it.
ASK = """async ([url, key, stream]) => {
  try {
    const answer = await fetch(url, {method: "POST", body: JSON.stringify({messages: [{role: "user", content: "Hi"}],
      stream}), headers: {"authorization": `Bearer ${key}`, "content-type": "application/json", "x-request-id": "r1"}});
    const text = await answer.text();
    const seen = ["x-request-id", "x-ratelimit-remaining-requests", "retry-after", "server"];
    const headers = Object.fromEntries(seen.map((name) => [name, answer.headers.get(name)]));
    return {status: answer.status, text, headers};
  } catch (error) { return "blocked"; }
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a site with an empty page. It has two origins: 127.0.0.1 and localhost."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text('<!doctype html><link rel="icon" href="data:,"><title>A page</title>')
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def gateway(site: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """The chat route of a gateway that names the site at 127.0.0.1, a key, and one with a single request a minute."""
    fields = [{"tenant": "acme"}, {"tenant": "small"}]
    tenants = {"acme": {"requests_per_minute": 100}, "small": {"requests_per_minute": 1}}
    path, (key, small) = key_file(Path(tmp_path_factory.mktemp("keys")), fields, tenants)
    loop, stop, ports, started = asyncio.new_event_loop(), asyncio.Event(), list[int](), threading.Event()

    async def serve() -> None:
        origins = (f"http://127.0.0.1:{site}",)
        async with running(lambda submit: [10, 11, 4], api_keys=str(path), cors_origins=origins) as one:
            ports.append(one.port)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{ports[0]}/v1/chat/completions", key, small
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def test_pages_of_a_configured_origin_read_answers_streams_refusals_and_limits(
    chromium: Browser, site: int, gateway: tuple[str, str, str]
):
    url, key, small = gateway
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{site}/")
        for stream in (False, True):
            answer = page.evaluate(ASK, [url, key, stream])
            assert answer["status"] == 200
            assert ("data: [DONE]" in answer["text"]) is stream
            assert answer["headers"]["x-request-id"] == "r1"
            assert int(answer["headers"]["x-ratelimit-remaining-requests"]) < 100
            assert answer["headers"]["server"] is None  # not among those exposed
        assert page.evaluate(ASK, [url, "wrong", False])["status"] == 401
        assert page.evaluate(ASK, [url, small, False])["status"] == 200
        refused = page.evaluate(ASK, [url, small, False])
        assert refused["status"] == 429
        assert int(refused["headers"]["retry-after"]) > 0


def test_pages_of_another_origin_get_nothing(chromium: Browser, site: int, gateway: tuple[str, str, str]):
    url, key, _ = gateway
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"http://localhost:{site}/")
        assert page.evaluate(ASK, [url, key, False]) == "blocked"
        assert page.evaluate(ASK, [url, "wrong", False]) == "blocked"
