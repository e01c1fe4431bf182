"""The console in headless Chromium, on a running stack; a second gateway has keys."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.gateway import browser
from support.gateway.browser import DESKTOP, LEAST_CONTRAST, PHONE, Tab
from support.processes import ports, stack
from support.processes.stack import Service, Stack

STORY = "Tell me a story about a dog and a river and a red kite that flew away over the hills. " * 8


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield stack.start_stack(tmp_path_factory.mktemp("console"), cleanup)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file of keys, and one key for each of two scopes."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    return {"path": str(path), **{scope: make_key(path, scope) for scope in ("admin", "inference")}}


def make_key(path: Path, scope: str) -> str:
    words = [sys.executable, "-m", "baton.services.cli", "keys", "create", "--api-keys", str(path), "--scopes", scope]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def guarded(running: Stack, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a second gateway of the same fleet, with keys."""
    rest, rpc = ports.free_ports(2)
    plan = running["gateway"].plan
    flags = list(plan.flags)
    for name, value in (("--rest-listen", f"127.0.0.1:{rest}"), ("--grpc-listen", f"127.0.0.1:{rpc}")):
        flags[flags.index(name) + 1] = value
    address = f"127.0.0.1:{rest}"
    moved = replace(plan, name="guarded", flags=(*flags, "--api-keys", keys["path"]), probe_address=address)
    service = Service(moved, tmp_path_factory.mktemp("guarded") / "gateway.log")
    try:
        service.start()
        yield address
    finally:
        service.stop_by_force()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@contextmanager
def opened(chromium: Browser, url: str, **options: object) -> Iterator[Tab]:
    with browser.open_tab(chromium, f"{url}/console", **options) as tab:
        yield tab


@pytest.fixture
def tab(chromium: Browser, running: Stack) -> Iterator[Tab]:
    with opened(chromium, running.url, **DESKTOP) as one:
        expect(one["#live-text"]).to_have_text("Live")
        yield one


def worker_row(tab: Tab, worker_id: str) -> dict[str, str]:
    """Returns a worker's row of the table, by column."""
    heads = tab["#worker-head th"].all_inner_texts()
    cells = tab[f"#worker-rows tr:has(th:text-is('{worker_id}')) > *"].all_inner_texts()
    return dict(zip([head.split("\n")[0] for head in heads], cells, strict=True))


def tile(tab: Tab, name: str) -> str:
    return tab[f".tile:has(dt:text-is('{name}'))"].inner_text()


def ask(running: Stack, prompt: str = STORY, **fields: object) -> None:
    running.chat(prompt, **{"max_tokens": 8, **fields})


def answer_of(address: str, path: str, key: str = "") -> tuple[int, dict[str, object]]:
    """Status and JSON of a refusal."""
    connection = HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_console_shows_an_idle_fleet_and_then_a_request_with_times_and_evidence(tab: Tab, running: Stack):
    expect(tab["#workers-count"]).to_have_text("2 workers")
    expect(tab["#placements-none"]).to_contain_text("No request has been placed yet")
    expect(tab["#flows-none"]).to_have_text("No KV has moved in the last seconds.")
    assert "no request has ended recently" in tile(tab, "TTFT")
    row = worker_row(tab, "prefill-0")
    assert (row["Role"], row["State"], row["Running"]) == ("prefill", "serving", "0")
    assert int(row["Epoch"]) > 0
    for number in range(3):
        ask(running, f"{number} {STORY}")
    expect(tab["#placement-rows tr"]).to_have_count(3)
    expect(tab["#placement-rows tr[data-state=finished]"]).to_have_count(3)
    expect(tab[".tile:has(dt:text-is('TTFT'))"]).to_contain_text("of the last")
    assert "ms" in tile(tab, "TTFT")
    tab["#placement-rows .id"].first.click()
    expect(tab["#detail"]).to_be_visible()
    lanes = tab[".timeline dt"].all_inner_texts()
    assert [lane for lane in lanes if lane != "Transfer"] == ["Place", "Queue", "Prefill", "Decode"]
    assert all(figure != "–" for figure in tab[".timeline strong"].all_inner_texts())
    expect(tab[".ways li.taken .way"]).to_contain_text("decode-0")
    expect(tab["#detail-body tbody th"]).to_contain_text(["decode-0"])
    tab.page.keyboard.press("Escape")
    expect(tab["#detail"]).to_be_hidden()


def test_kv_that_moves_is_a_flow_from_its_prefill_worker_to_its_decode_worker(tab: Tab, running: Stack):
    """Prompts come until the router has sent one to the prefill worker, as it does while the decode worker is busy."""
    done = threading.Event()

    def load(number: int) -> None:
        at = 0
        while not done.is_set():
            at += 1
            ask(running, f"{number} {at} {STORY}", max_tokens=60, ignore_eos=True)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        expect(tab["#flows-chart path.flow"]).to_have_count(1)
        expect(tab["#flows-chart .flow-name"]).to_contain_text(["prefill-0", "decode-0"])
        expect(tab["#flows-total"]).to_contain_text("B/s in all")
        tab["#flows-details summary"].click()
        expect(tab["#flows-rows tr"]).to_contain_text(["prefill-0"])
        open_one_with_a_transfer(tab)
        expect(tab[".timeline dt"]).to_have_text(["Place", "Queue", "Prefill", "Transfer", "Decode"])
        expect(tab[".lane-words:has-text('B/s')"]).to_be_visible()
        expect(tab[".ways li.taken .way"]).to_have_text("prefill-0 → decode-0")
    finally:
        done.set()
        for thread in threads:
            thread.join()


def open_one_with_a_transfer(tab: Tab) -> None:
    """A prefill worker that was named may not have been needed, or in time: looks for one that was."""
    rows = tab["#placement-rows tr[data-state=finished]:has(td:text-is('prefill-0')) .id"]
    for _ in range(30):
        rows.first.click()
        expect(tab["#detail"]).to_be_visible()
        if tab[".timeline dt:text-is('Transfer')"].count():
            return
        tab["#detail-close"].click()
        tab.page.wait_for_timeout(500)
    raise AssertionError("no request had its KV from the prefill worker")


def test_a_request_is_found_by_its_id_and_an_unknown_id_is_reported(tab: Tab, running: Stack):
    ask(running, request_id="the-one-i-look-for")
    tab["#find-id"].fill("the-one-i-look-for")
    tab["#find-id"].press("Enter")
    expect(tab["#detail-title"]).to_have_text("Request the-one-i-look-for")
    tab["#detail-close"].click()
    tab["#find-id"].fill("nobody")
    tab["#find-id"].press("Enter")
    expect(tab["#find-problem"]).to_contain_text("'nobody' is unknown, or too old")
    tab.forgive("404 (Not Found)")


def test_workers_are_sorted_and_filtered_and_the_picture_can_be_held(tab: Tab):
    names = tab["#worker-rows th"]
    expect(names).to_have_text(["decode-0", "prefill-0"])
    tab["#worker-head button:text-is('Worker')"].click()
    expect(names).to_have_text(["prefill-0", "decode-0"])
    expect(tab["#worker-head th[aria-sort=descending]"]).to_have_count(1)
    tab["#worker-role"].select_option("decode")
    expect(names).to_have_text(["decode-0"])
    expect(tab["#workers-count"]).to_have_text("1 of 2 workers")
    tab["#worker-filter"].fill("nothing like it")
    expect(names).to_have_count(0)
    tab["#pause"].click()
    expect(tab["#live-text"]).to_have_text("Paused")
    tab["#pause"].click()
    expect(tab["#live-text"]).to_have_text("Live")


def test_without_the_scope_admin_nothing_is_shown_and_the_page_asks_for_a_key(
    chromium: Browser, guarded: str, keys: dict[str, str]
):
    for path in ("/console/stream", "/console/placement?request_id=x"):
        assert answer_of(guarded, path)[0] == 401
        status, body = answer_of(guarded, path, keys["inference"])
        assert (status, body["error"]["message"]) == (403, "This API key lacks the required scope admin.")
    with opened(chromium, f"http://{guarded}", **DESKTOP) as tab:
        expect(tab["#sign-in"]).to_contain_text("This gateway shows its fleet to operators only.")
        expect(tab["#api_key"]).to_be_focused()
        expect(tab["#fleet"]).to_be_hidden()
        for key, reason in (("bt-wrong", "Incorrect API key"), (keys["inference"], "lacks the required scope admin")):
            tab["#api_key"].fill(key)
            tab["#api_key"].press("Enter")
            expect(tab["#sign-in-reason"]).to_contain_text(reason)
        tab["#api_key"].fill(keys["admin"])
        tab["#api_key"].press("Enter")
        expect(tab["#live-text"]).to_have_text("Live")
        expect(tab["#sign-in"]).to_be_hidden()
        tab.page.reload()
        expect(tab["#live-text"]).to_have_text("Live")
        tab["#change-key"].click()
        expect(tab["#sign-in"]).to_be_visible()
        tab.page.reload()
        expect(tab["#sign-in"]).to_be_visible()
        tab.forgive("401 (Unauthorized)")
        tab.forgive("403 (Forbidden)")


def test_everything_can_be_reached_with_the_keyboard_and_has_a_name(tab: Tab):
    expect(tab["#worker-rows tr"]).to_have_count(2)
    tab[".skip"].focus()
    reached = []
    for _ in range(80):
        tab.page.keyboard.press("Tab")
        name, is_seen = tab.page.evaluate(
            "(() => { const node = document.activeElement;"
            " return [node.id || node.textContent.trim(), getComputedStyle(node).outlineStyle !== 'none']; })()"
        )
        assert is_seen, f"no visible focus on {name}"
        reached.append(name)
        if name == "API reference":
            break
    order = ["pause", "theme", "worker-filter", "worker-role", "workers-scroll", "Worker", "Epoch", "placement-state",
             "find-id", "Find", "API reference"]  # fmt: skip
    places = [reached.index(name) for name in order]
    assert places == sorted(places), reached
    unnamed = tab.page.evaluate(
        "[...document.querySelectorAll('button, input, select, summary, [role=region], [role=img], dialog')]"
        ".filter((n) => !(n.labels?.length || n.getAttribute('aria-label') || n.getAttribute('aria-labelledby')"
        " || n.textContent.trim())).map((n) => n.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_and_can_be_read(chromium: Browser, running: Stack, options: dict[str, object], scheme: str):
    with opened(chromium, running.url, **{**options, "color_scheme": scheme}) as tab:
        expect(tab["#live-text"]).to_have_text("Live")
        ask(running)
        expect(tab["#placement-rows tr[data-state=finished]"]).not_to_have_count(0)
        tab["#placement-state"].select_option("finished")
        tab["#pause"].click()
        contrast, text = tab.page.evaluate(LEAST_CONTRAST)
        assert contrast >= 4.5, text
        tab["#placement-rows .id"].first.click()
        expect(tab["#detail"]).to_be_visible()
        contrast, text = tab.page.evaluate(LEAST_CONTRAST)
        assert contrast >= 4.5, text
        width, room = tab.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room


def test_a_dead_worker_and_an_unreachable_router_are_shown_until_they_return(tab: Tab, running: Stack):
    expect(tab["#worker-rows tr[data-state=serving]"]).to_have_count(2)
    worker = running["worker-prefill-0"]
    worker.kill()
    expect(tab["#worker-rows tr[data-state=dead]"]).to_have_count(1)
    expect(tab[".tile:has(dt:text-is('Workers'))"]).to_contain_text("1 dead")
    worker.start()
    expect(tab["#worker-rows tr[data-state=serving]"]).to_have_count(2)
    running["router"].kill()
    expect(tab["#notice"]).to_contain_text("No router answers")
    expect(tab["#live-text"]).to_have_text("No router answers")
    expect(tab["#worker-rows tr"]).to_have_count(2)
    running["router"].start()
    expect(tab["#live-text"]).to_have_text("Live")
    expect(tab["#notice"]).to_be_hidden()
    expect(tab["#worker-rows tr[data-state=serving]"]).to_have_count(2)


def test_a_lost_gateway_is_shown_and_reconnected(tab: Tab, running: Stack):
    running["gateway"].kill()
    expect(tab["#live-text"]).to_have_text("Reconnecting")
    expect(tab["#worker-rows tr"]).to_have_count(2)
    running["gateway"].start()
    expect(tab["#live-text"]).to_have_text("Live")
    expect(tab["#notice"]).to_be_hidden()
    tab.complaints = [one for one in tab.complaints if "ERR_" not in one]
