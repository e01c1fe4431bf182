"""`baton top`: the console in a terminal; without a terminal, one snapshot as text or as JSON."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.gateway.console.explanation import Explanation
from baton.gateway.console.snapshot import Snapshot
from baton.rpc.errors import InvalidRequest
from baton.services import settings
from baton.services.rest.client import RestError
from baton.services.top import text as top_text
from baton.services.top.client import Gateway

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2

_USAGE = "Shows the fleet as the console does. The gateway's URL may come first: baton top http://HOST:PORT."
_WIDTH = 160  # without a terminal


@dataclass(frozen=True, slots=True)
class TopConfig:
    """The settings of `baton top`."""

    url: str = field(default="http://127.0.0.1:8000", metadata={"help": "The gateway's REST API.", "metavar": "URL"})
    api_key: str = field(
        default="",
        metadata={"help": "A key with the scope admin. Others on this machine see flags, not variables."},
    )
    ca: str = field(
        default="", metadata={"help": "Certificates to trust, for https. Empty: the system's.", "metavar": "PATH"}
    )
    once: bool = field(default=False, metadata={"help": "One snapshot as text, also in a terminal."})
    json: bool = field(default=False, metadata={"help": "One snapshot as JSON."})
    request: str = field(
        default="",
        metadata={"help": "Show this request's times and why it was placed so.", "metavar": "ID"},
    )

    @property
    def gateway(self) -> Gateway:
        """Returns the configured gateway."""
        return Gateway(self.url, self.api_key, self.ca)

    def validate(self) -> None:
        """Raises InvalidRequest for an invalid URL."""
        self.gateway.check()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs `baton top`. Returns 1 if the gateway is unreachable or rejects the request, 2 for a wrong setting."""
    flags = ["--url", *argv] if argv and not argv[0].startswith("-") else list(argv)
    try:
        (config,) = settings.load("top", (TopConfig,), flags, environ, _USAGE)
    except (settings.SettingsError, InvalidRequest) as error:
        print(f"baton top: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    try:
        _run(config)
    except RestError as error:
        print(f"baton top: {error}", file=sys.stderr)
        return EXIT_FAILED
    except msgspec.MsgspecError as error:
        print(f"baton top: {config.url}: this gateway is of another release: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        sys.stderr.close()  # the reader has closed the pipe, like `head`
    except KeyboardInterrupt:
        pass
    return EXIT_OK


def _run(config: TopConfig) -> None:
    if config.request:
        data = config.gateway.explain("request_id", config.request)
        explanation = msgspec.json.decode(data, type=Explanation)
        _print(_pretty(data) if config.json else "\n".join(top_text.explained(explanation, _width())))
    elif config.json or config.once or not _has_screen():
        data, snapshot = _measured(config.gateway)
        _print(_pretty(data) if config.json else "\n".join(top_text.report(snapshot, _width())))
    else:
        from baton.services.top.screen import run_screen

        run_screen(config.gateway)


def _measured(gateway: Gateway) -> tuple[bytes, Snapshot]:
    """Returns the first snapshot with rates, which is the second; the first one if no router responds."""
    for data in gateway.snapshots():
        snapshot = msgspec.json.decode(data, type=Snapshot)
        if snapshot.window or all(one.problem for one in snapshot.routers):
            return data, snapshot
    raise AssertionError("snapshots end with an error only")


def _has_screen() -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        import curses

        curses.setupterm()
    except (ImportError, curses.error):  # no curses on this system, or an unknown terminal
        return False
    return True


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 50)).columns if sys.stdout.isatty() else _WIDTH


def _pretty(data: bytes) -> str:
    return msgspec.json.format(data, indent=2).decode()


def _print(text: str) -> None:
    print(text, flush=True)
