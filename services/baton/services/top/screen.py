"""`baton top` on a screen. A thread receives snapshots from the gateway; the main thread draws and reads keys."""

from __future__ import annotations

import contextlib
import curses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.gateway.console.explanation import Explanation
from baton.gateway.console.snapshot import Snapshot
from baton.services.rest.client import RestError
from baton.services.top import text
from baton.services.top.client import Gateway
from baton.services.top.table import Column, render

_KEY_WAIT_MS = 150
_RETRY_SECONDS = 1.0
_KEYS = "Tab view  Up/Down line  s sort  r reverse  Enter request  p pause  q quit"
_ESCAPE = 27
_ENTER = (10, 13, curses.KEY_ENTER)
_VIEWS: Sequence[tuple[str, Sequence[Column[Any]]]] = (
    ("Workers", text.WORKERS),
    ("Transfers", text.FLOWS),
    ("Requests", text.REQUESTS),
)
_REQUESTS = 2


class Feed:
    """The latest snapshot, received by a thread until the process ends."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.snapshot: Snapshot | None = None
        self.problem = "connecting"
        self.final: RestError | None = None

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._follow, name="baton-top", daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                for data in self.gateway.snapshots():
                    self.snapshot = msgspec.json.decode(data, type=Snapshot)
                    self.problem = ""
            except RestError as error:
                self.problem = str(error)
                if error.is_final:
                    self.final = error
                    return
            except msgspec.MsgspecError as error:
                self.final = RestError(f"{self.gateway.url}: this gateway is of another release: {error}", True)
                return
            time.sleep(_RETRY_SECONDS)


@dataclass(slots=True)
class Picture:
    """The state of the screen."""

    view: int = 0  # index of _VIEWS
    line: int = 0  # the selected line
    sorted: list[int] = field(default_factory=lambda: [0, 2, 2])  # column, by view
    reverse: bool = False
    held: Snapshot | None = None  # while paused
    detail: list[str] = field(default_factory=list)  # of one request; empty: the lists are shown

    def rows(self, snapshot: Snapshot) -> list[Any]:
        """Returns the view's rows, in order."""
        lists: tuple[list[Any], ...] = (snapshot.workers, snapshot.flows, snapshot.placements)
        key = _VIEWS[self.view][1][self.sorted[self.view]].key
        return sorted(lists[self.view], key=key, reverse=self.reverse)

    def lines(self, snapshot: Snapshot | None, problem: str, width: int, height: int) -> tuple[list[str], int]:
        """Returns the screen's lines, and the index of the selected one; -1: none."""
        lines, marked = self._lines(snapshot, problem, width, height)
        return [line[:width] for line in lines], marked

    def _lines(self, snapshot: Snapshot | None, problem: str, width: int, height: int) -> tuple[list[str], int]:
        if self.detail:
            self.line = max(0, min(self.line, len(self.detail) - height + 1))
            return [*self.detail[self.line : self.line + height - 1], "Esc back  Up/Down scroll  q quit"], -1
        if snapshot is None:
            return [f"baton top: {problem}", "q quit"], -1
        top = [*text.head(snapshot, width), *([f"! {problem}"] if problem else []), self._tabs(snapshot)]
        rows = self.rows(snapshot)
        num_rows = max(1, height - len(top) - 2)
        self.line = max(0, min(self.line, len(rows) - 1))
        first = max(0, min(self.line - num_rows // 2, len(rows) - num_rows))
        table = render(_VIEWS[self.view][1], rows[first : first + num_rows], width)
        if not rows:
            table = ["nothing yet"]
        body = [*top, *table]
        body += [""] * (height - 1 - len(body))
        marked = len(top) + 1 + self.line - first if rows else -1
        return [*body[: height - 1], _KEYS], marked

    def _tabs(self, snapshot: Snapshot) -> str:
        counts = (len(snapshot.workers), snapshot.fleet.num_flows, len(snapshot.placements))
        names = [f"[{name} {count}]" if at == self.view else f" {name} {count} " for at, ((name, _), count) in
                 enumerate(zip(_VIEWS, counts, strict=True))]  # fmt: skip
        column = _VIEWS[self.view][1][self.sorted[self.view]].head
        paused = "   PAUSED" if self.held is not None else ""
        return f"{' '.join(names)}   by {column}{', reversed' if self.reverse else ''}{paused}"


def run_screen(gateway: Gateway) -> None:
    """Shows the fleet until q is pressed. Raises RestError if the gateway refuses."""
    feed = Feed(gateway)
    feed.start()
    curses.wrapper(lambda screen: _show(screen, feed))
    if feed.final is not None:
        raise feed.final


def _show(screen: Any, feed: Feed) -> None:
    picture = Picture()
    screen.timeout(_KEY_WAIT_MS)
    curses.set_escdelay(25)
    for action in (lambda: curses.curs_set(0), curses.use_default_colors):
        with contextlib.suppress(curses.error):  # not all terminals can hide the cursor
            action()
    while feed.final is None:
        height, width = screen.getmaxyx()
        lines, marked = picture.lines(picture.held or feed.snapshot, feed.problem, max(1, width - 1), height)
        _draw(screen, lines[:height], marked)
        key = screen.getch()
        if key == ord("q") or (key == _ESCAPE and not picture.detail):
            return
        press(picture, key, feed, max(1, width - 1), height)


def _draw(screen: Any, lines: list[str], marked: int) -> None:
    screen.erase()
    for at, line in enumerate(lines):
        style = curses.A_REVERSE if at == marked else curses.A_BOLD if line.startswith("!") else curses.A_NORMAL
        with contextlib.suppress(curses.error):  # the terminal has become smaller
            screen.addstr(at, 0, line, style)
    screen.refresh()


def press(picture: Picture, key: int, feed: Feed, width: int, height: int) -> None:
    moves = {curses.KEY_UP: -1, curses.KEY_DOWN: 1, curses.KEY_PPAGE: -(height // 2), curses.KEY_NPAGE: height // 2}
    if key in moves:
        picture.line = max(0, picture.line + moves[key])
    elif key == _ESCAPE:
        picture.detail, picture.line = [], 0
    elif picture.detail:
        return
    elif key == ord("\t"):
        picture.view, picture.line = (picture.view + 1) % len(_VIEWS), 0
    elif key == ord("s"):
        columns = _VIEWS[picture.view][1]
        picture.sorted[picture.view] = (picture.sorted[picture.view] + 1) % len(columns)
    elif key == ord("r"):
        picture.reverse = not picture.reverse
    elif key == ord("p"):
        picture.held = None if picture.held is not None else feed.snapshot
    elif key in _ENTER:
        _open(picture, feed, width)


def _open(picture: Picture, feed: Feed, width: int) -> None:
    """Shows the selected request's time and evidence."""
    snapshot = picture.held or feed.snapshot
    rows = picture.rows(snapshot) if snapshot is not None and picture.view == _REQUESTS else []
    if not rows:
        return
    chosen = rows[min(picture.line, len(rows) - 1)]
    try:
        explanation = msgspec.json.decode(feed.gateway.explain("placement_id", chosen.placement_id), type=Explanation)
        picture.detail = text.explained(explanation, width)
    except (RestError, msgspec.MsgspecError) as error:
        picture.detail = [str(error)]
    picture.line = 0
