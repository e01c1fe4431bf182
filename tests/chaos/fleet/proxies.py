"""Proxies in a separate process, so that the harness's work does not delay them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection

from support.network.byte_proxy import ByteProxy

_START_SECONDS = 30.0
_ANSWER_SECONDS = 30.0


class Proxies:
    """One proxy for each name, from now on. `targets`: host and port of each. Raises TimeoutError where it hangs."""

    def __init__(self, targets: Mapping[str, tuple[str, int]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(targets)), daemon=True)
        self._process.start()
        theirs.close()
        self.addresses: dict[str, str] = self._answer(_START_SECONDS)

    def cut(self, name: str) -> None:
        """Ends every connection."""
        self._ask("cut", name)

    def stall(self, name: str) -> None:
        """Drops all bytes without closing connections."""
        self._ask("stop", name)

    def slow(self, name: str, bytes_per_second: float) -> None:
        """What is sent towards the target takes its time."""
        self._ask("slow", name, bytes_per_second)

    def heal(self, name: str) -> None:
        """No faults from now on."""
        self._ask("heal", name)

    def close(self) -> None:
        """Ends all of them."""
        self._ours.close()
        self._process.join(_ANSWER_SECONDS)
        self._process.kill()

    def _ask(self, *words: object) -> None:
        self._ours.send(words)
        self._answer(_ANSWER_SECONDS)

    def _answer(self, seconds: float):  # type: ignore[no-untyped-def]
        if not self._ours.poll(seconds):
            raise TimeoutError(f"the proxies' process did not answer in {seconds:g} s")
        return self._ours.recv()


def _serve(commands: Connection, targets: dict[str, tuple[str, int]]) -> None:
    """The process: until the other end is closed."""
    proxies = {name: ByteProxy(target) for name, target in targets.items()}
    commands.send({name: proxy.address for name, proxy in proxies.items()})
    try:
        while True:
            word, name, *rest = commands.recv()
            proxy = proxies[name]
            if word == "slow":
                proxy.bytes_per_second = rest[0]
            else:
                getattr(proxy, word)()
            commands.send(None)
    except (EOFError, OSError, KeyboardInterrupt):
        return
