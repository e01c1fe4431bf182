"""The console in headless Chromium, before a real router and gateway with a hundred scripted workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, expect
from support.gateway import browser
from support.gateway.browser import DESKTOP, PHONE
from support.gateway.console_fleet import run_fleet, start_gateway

NUM_WORKERS = 100


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as cleanup:
        router = run_fleet(cleanup, NUM_WORKERS, placements_per_second=20.0)
        yield start_gateway(tmp_path_factory.mktemp("hundred") / "gateway.log", router, (), cleanup)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


def test_a_hundred_workers_are_shown_filtered_sorted_and_drawn(chromium: Browser, url: str):
    with browser.open_tab(chromium, f"{url}/console", **DESKTOP) as tab:
        rows = tab["#worker-rows tr"]
        expect(rows).to_have_count(NUM_WORKERS)
        expect(tab["#map .map-cell"]).to_have_count(NUM_WORKERS)
        expect(tab["#map .map-cell[data-state=draining]"]).to_have_count(NUM_WORKERS // 20)
        expect(tab["#flows-chart path.flow"]).to_have_count(24)
        expect(tab["#flows-more"]).to_have_text("24 of 400 flows; the table has the largest 64.")
        tab["#worker-filter"].fill("draining")
        expect(rows).to_have_count(NUM_WORKERS // 20)
        tab["#worker-filter"].fill("")
        tab["#worker-head button:text-is('Worker')"].click()
        expect(rows.first.locator("th")).to_have_text("prefill-49")
        tab["#worker-head button:text-is('Output')"].click()
        expect(rows.first.locator("td").first).to_have_text("decode")


def test_on_a_phone_a_hundred_workers_fit_too(chromium: Browser, url: str):
    with browser.open_tab(chromium, f"{url}/console", **PHONE) as tab:
        expect(tab["#worker-rows tr"]).to_have_count(NUM_WORKERS)
        expect(tab["#flows-chart path.flow"]).to_have_count(12)
        width, room = tab.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room
