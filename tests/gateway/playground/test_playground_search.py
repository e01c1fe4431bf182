"""The playground's search in headless Chromium, over scripted vectors: ranks, refusals, stops, every screen."""

import asyncio
import http.client
import json
import shlex
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Request, expect
from support.gateway import browser
from support.gateway.browser import DESKTOP, LEAST_CONTRAST, PHONE, Tab
from support.gateway.threaded import in_thread
from support.gateway.vectors_rig import FakePooler, vectors_side

DOCUMENTS = ["A fox ran home.", "<b>The</b> ship sailed.", "Once upon a time", "A river"]


class Pooler(FakePooler):
    """Holds requests while `held` is set."""

    held = False

    async def pool(self, request: Any) -> Any:
        self.hold = asyncio.Event() if self.held else None
        return await super().pool(request)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@pytest.fixture
def pooler() -> Pooler:
    return Pooler()


@pytest.fixture
def url(pooler: Pooler) -> Iterator[str]:
    with in_thread(vectors_side(pooler)) as one:
        yield one


@pytest.fixture
def tab(chromium: Browser, url: str) -> Iterator[Tab]:
    with browser.open_tab(chromium, url, **DESKTOP) as one:
        expect(one["#search"]).to_be_visible()  # the model embeds
        yield one


def search(tab: Tab, documents: list[str], query: str, between: str = "\n") -> None:
    tab["#documents"].fill(between.join(documents))
    tab["#query"].fill(query)
    tab["#query"].press("Enter")


def asked(request: Request) -> bool:
    return request.url.endswith("/v1/rerank")


def post(url: str, body: Any) -> Any:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/rerank", json.dumps(body), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not true within 20 s")


def test_documents_are_shown_in_the_order_and_with_the_scores_of_the_api(tab: Tab, url: str):
    expect(tab["#chat"]).to_be_hidden()
    expect(tab["#search-send"]).to_be_disabled()
    with tab.page.expect_request(asked) as request:
        search(tab, DOCUMENTS, "Where is the fox?")
    expect(tab["#num-documents"]).to_have_text("4")
    body = request.value.post_data_json
    assert (body["documents"], body["query"]) == (DOCUMENTS, "Where is the fox?")
    results = post(url, body)["results"]
    expect(tab["#results .found"]).to_have_text([DOCUMENTS[one["index"]] for one in results])
    expect(tab["#results .score"]).to_have_text([f"{one['relevance_score']:.3f}" for one in results])
    expect(tab["#search-figures"]).to_contain_text("4 documents, ")
    expect(tab["#status"]).to_contain_text(f"The best: {DOCUMENTS[results[0]['index']]}")
    assert tab["#results :is(b, script, img)"].count() == 0
    tab["#show-curl"].click()
    words = shlex.split(tab["#curl-text"].inner_text())
    assert words[:3] == ["curl", "-N", f"{url}/v1/rerank"]
    assert json.loads(words[words.index("-d") + 1]) == body
    tab.page.keyboard.press("Escape")
    tab.page.reload()
    expect(tab["#query"]).to_have_value("Where is the fox?")
    expect(tab["#num-documents"]).to_have_text("4")


def test_paragraphs_are_documents_where_there_are_empty_lines_and_there_is_an_example(tab: Tab):
    with tab.page.expect_request(asked) as request:
        search(tab, ["One\ntwo", "three"], "Hi", between="\n \n\n")
    assert request.value.post_data_json["documents"] == ["One\ntwo", "three"]
    expect(tab["#results li"]).to_have_count(2)
    tab["#example-documents"].click()
    expect(tab["#query"]).to_be_focused()
    tab["#search-send"].click()
    expect(tab["#results li"]).to_have_count(5)


def test_a_refusal_names_the_document(tab: Tab):
    search(tab, ["A river", "fox " * 90], "Hi")
    expect(tab["#search-failure"]).to_contain_text(
        "Refused (400). Document 2: This model's maximum context length is 64"
    )
    expect(tab["#results li"]).to_have_count(0)
    tab.forgive("400 (Bad Request)")
    search(tab, ["A river"], "Hi")
    expect(tab["#results li"]).to_have_count(1)
    expect(tab["#search-failure"]).to_be_hidden()


def test_a_search_is_stopped_on_the_gateway(tab: Tab, pooler: Pooler):
    pooler.held = True
    for stop in (lambda: tab["#search-stop"].click(), lambda: tab.page.keyboard.press("Escape")):
        begun, cancelled = len(pooler.requests), pooler.num_cancelled
        search(tab, DOCUMENTS, "Hi")
        wait_until(lambda begun=begun: len(pooler.requests) > begun)
        stop()
        expect(tab["#search-send"]).to_be_visible()
        wait_until(lambda cancelled=cancelled: pooler.num_cancelled > cancelled)
    expect(tab["#status"]).to_have_text("Stopped.")


def test_a_model_that_generates_opens_the_chat_and_a_chosen_search_stays(chromium: Browser, pooler: Pooler):
    with in_thread(vectors_side(pooler, pools=None)) as url, browser.open_tab(chromium, url, **DESKTOP) as tab:
        expect(tab["#model"]).to_be_enabled()
        expect(tab["#chat"]).to_be_visible()
        expect(tab["#search"]).to_be_hidden()
        tab["#mode-search"].click()
        expect(tab["#query"]).to_be_focused()
        expect(tab["#new-chat"]).to_be_hidden()
        expect(tab[".skip"]).to_have_text("Skip to the query")
        search(tab, DOCUMENTS, "Hi")
        expect(tab["#search-failure"]).to_contain_text("has no task embed; use /v1/chat/completions for it")
        tab.forgive("400 (Bad Request)")
        tab.page.reload()
        expect(tab["#search"]).to_be_visible()
        expect(tab["#mode-search"]).to_have_attribute("aria-current", "page")
        tab["#mode-chat"].click()
        expect(tab["#prompt"]).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_readably(chromium: Browser, url: str, scheme: str):
    with browser.open_tab(chromium, url, color_scheme=scheme, **PHONE) as tab:
        expect(tab["#search"]).to_be_visible()
        search(tab, [*DOCUMENTS, "A" * 50], "Hi")
        expect(tab["#results li"]).to_have_count(5)
        assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        for id_ in ("mode-chat", "mode-search", "search-send", "show-curl", "theme", "show-settings", "model"):
            box = tab[f"#{id_}"].bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["height"] >= 36
        contrast, text = tab.page.evaluate(LEAST_CONTRAST)
        assert contrast >= 4.5, text
        tab["#show-settings"].click()
        expect(tab["#api_key"]).to_be_attached()
        expect(tab["#temperature"]).to_be_hidden()
        assert tab.page.evaluate("document.querySelector('#search').inert")
