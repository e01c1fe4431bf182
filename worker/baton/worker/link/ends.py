"""The two ends of the link between a worker's front and its engine, whatever carries the frames."""

from __future__ import annotations

from typing import Protocol

from baton.worker.link.frames import Frame


class EngineEnd(Protocol):
    """The engine's end: blocking, for one thread. Only `post` and `wake` are for any thread."""

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame for the next flush."""

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame at once from any thread. Drops it if the front is gone."""

    def wake(self) -> None:
        """Ends a wait in `receive`, now or the next one. Thread-safe."""

    def flush(self) -> None:
        """Sends queued frames. Waits only if the front is megabytes behind."""

    def receive(self, timeout: float | None, flush: bool = True) -> list[Frame]:
        """Flushes, waits for frames, a wake-up or the timeout, and returns the received frames.

        `flush`: False if the caller flushes soon. Raises LinkClosed when the front is gone.
        """

    def close(self) -> None:
        """Sends queued frames, then closes. Idempotent."""


class FrontEnd(Protocol):
    """The front's end, on an event loop."""

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame. Drops it after the link has closed."""

    async def writable(self) -> None:
        """Returns once the engine has received most of what was sent."""

    def close(self) -> None:
        """Closes the link; the engine sees the end."""
