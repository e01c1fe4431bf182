"""The console's column of adapters, in headless Chromium over simulated workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, expect
from support.gateway import browser
from support.gateway.browser import DESKTOP
from support.processes.stack import Stack, start_stack


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.running() as one:
        yield one


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--enable-lora", "--max-loras", "4", "--lora-folders", "/adapters")
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("console")
        yield start_stack(folder, cleanup, {"worker": flags}, executor="sim", prefill_workers=0)


def test_a_workers_row_has_its_adapters_on_the_device_and_their_names(chromium: Browser, running: Stack) -> None:
    wide = {**DESKTOP, "viewport": {"width": 1600, "height": 900}}
    with browser.open_tab(chromium, f"{running.url}/console", **wide) as tab:
        expect(tab["#live-text"]).to_have_text("Live")
        heads = [head.split("\n")[0] for head in tab["#worker-head th"].all_inner_texts()]
        cell = tab[f"#worker-rows tr > :nth-child({heads.index('Adapters') + 1})"]
        expect(cell).to_have_text("0 of 4")
        for name in ("poet", "judge", "idle"):
            body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
            assert running.post("/v1/load_lora_adapter", body)[0] == 200
        for name in ("poet", "judge"):
            running.chat("Hi", model=name, max_tokens=2)
        expect(cell).to_have_text("2 of 4")
        expect(cell).to_have_attribute("title", "On the device: judge, poet; 3 served")
