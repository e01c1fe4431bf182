"""DNS rebinding in Chromium: a page whose name comes to mean this machine reads nothing of a gateway without keys."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright
from support.gateway import browser
from support.gateway.scripted_gateway import Gateway, running

NAME = "rebound.example"
# What of an answer a page of the gateway's own origin can see.
READ = """async ([path, method]) => {
  try {
    const body = method === "POST" ? JSON.stringify({messages: [{role: "user", content: "Hi"}]}) : undefined;
    const answer = await fetch(path, {method, body, headers: body ? {"content-type": "application/json"} : {}});
    if (!answer.ok) return [answer.status, await answer.text()];
    const first = await answer.body.getReader().read();
    return [answer.status, new TextDecoder().decode(first.value)];
  } catch (error) { return ["blocked", String(error)]; }
}"""
READS = ("/v1/chat/completions", "/v1/models", "/metrics", "/console/stream", "/console", "/", "/openapi.json")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """It resolves NAME to this machine, as a page's owner can have it after the page was loaded."""
    found = browser.find()
    with sync_playwright() as playwright:
        flags = [*browser.FLAGS, f"--host-resolver-rules=MAP {NAME} 127.0.0.1"]
        one = playwright.chromium.launch(
            executable_path=found.program, env=dict(found.environ), args=flags, timeout=browser.LOAD_TIMEOUT_MS
        )
        yield one
        one.close()


def _serving(**settings: object) -> Iterator[Gateway]:
    """A gateway in a thread of its own: the browser's driver has this one's event loop."""
    started = threading.Event()
    found: list[tuple[Gateway, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(lambda submit: [10, 11, 4], **settings) as one:
            found.append((one, asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    one, loop, stop = found[0]
    try:
        yield one
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    yield from _serving()


@pytest.fixture(scope="module")
def named_gateway() -> Iterator[Gateway]:
    yield from _serving(allowed_hosts=(NAME,))


def test_a_rebound_page_reads_nothing(chromium: Browser, gateway: Gateway):
    with chromium.new_context() as context:
        page = context.new_page()
        # The page's name means this machine by now: whatever it loads from itself comes from the gateway.
        page.goto(f"http://{NAME}:{gateway.port}/health")
        for path in READS:
            status, text = page.evaluate(READ, [path, "GET"])
            assert (status, "host_not_allowed" in text) == (403, True), path
        assert page.evaluate(READ, ["/v1/chat/completions", "POST"])[0] == 403


def test_the_grpc_port_is_no_http_that_a_page_can_read(chromium: Browser, gateway: Gateway):
    port = gateway.config.grpc_listen.rpartition(":")[2]
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"http://{NAME}:{gateway.port}/health")
        for method in ("GET", "POST"):
            status, _ = page.evaluate(READ, [f"http://{NAME}:{port}/baton.v1.InferenceService/ListModels", method])
            assert status == "blocked"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "app.localhost"])
def test_pages_of_this_machine_read_as_before(chromium: Browser, gateway: Gateway, host: str):
    _reads_all(chromium, gateway, host)


def test_pages_of_an_allowed_name_read_and_ask(chromium: Browser, named_gateway: Gateway):
    _reads_all(chromium, named_gateway, NAME)


def _reads_all(chromium: Browser, gateway: Gateway, host: str) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"http://{host}:{gateway.port}/health")
        for path in READS:
            status, text = page.evaluate(READ, [path, "GET"])
            assert status == 200, (path, text)
            assert text
        assert page.evaluate(READ, ["/v1/chat/completions", "POST"])[0] == 200
