"""A link between a front and an engine that are threads of one process: frames in memory, without a socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from baton.worker.link.frames import Frame, Kind, LinkClosed

# A turn of the front's event loop receives this much, so that what it causes runs before the rest arrives.
_TURN_BYTES = 1 << 18
# With more unread frames than this, the sender waits.
_MAX_PENDING_BYTES = 8 << 20
_OUTPUTS = frozenset((Kind.GENERATE, Kind.GENERATE_PLAIN, Kind.GENERATE_FIRST, Kind.GENERATE_LATER))


class _Lane:
    """Frames of one direction."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.num_bytes = 0

    def put(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.num_bytes += len(frame.payload)

    def take(self, most_bytes: int) -> list[Frame]:
        """Returns the first frames: at least one if there is one, and no more once they exceed `most_bytes`."""
        taken: list[Frame] = []
        size = 0
        while self.frames and size <= most_bytes:
            taken.append(self.frames.popleft())
            size += len(taken[-1].payload)
        self.num_bytes -= size
        return taken


class LocalLink:
    """Both ends and their state. Create it on the front's event loop. `engine` is for the engine's thread.

    Outputs of a busy engine wait up to `pace_seconds` and are delivered together: the front then takes fewer turns,
    for which the engine would wait, because both run Python.
    """

    def __init__(
        self, on_frame: Callable[[Frame], None], on_closed: Callable[[], None], pace_seconds: float = 0.0
    ) -> None:
        self.changed = threading.Condition()  # guards everything here
        self.to_engine = _Lane()
        self.to_front = _Lane()
        self.closed = False
        self.woken = False
        self.pace_seconds = pace_seconds
        self.due = 0.0  # monotonic seconds: outputs wait until then
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._scheduled = False  # whether the loop will call _deliver
        self.front = LocalFrontEnd(self)
        self.engine = LocalEngineEnd(self)

    def schedule(self) -> None:
        """Makes the loop deliver frames, and the end of the link. Call with `changed` held."""
        if not self._scheduled:
            self._scheduled = True
            self.due = time.monotonic() + self.pace_seconds
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self.closed = True

    def _deliver(self) -> None:
        with self.changed:
            self._scheduled = False
            frames = self.to_front.take(_TURN_BYTES)
            ends = self.closed and not self.to_front.frames
            if self.to_front.frames:
                self.schedule()
            self.changed.notify_all()
        self.front.notice()
        for frame in frames:
            self._on_frame(frame)
        if ends and self._on_closed is not _ignore:
            on_closed, self._on_closed = self._on_closed, _ignore
            on_closed()


class LocalFrontEnd:
    """Implements FrontEnd."""

    def __init__(self, link: LocalLink) -> None:
        self._link = link
        self._writable = asyncio.Event()
        self._writable.set()

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame. Drops it after the link has closed."""
        link = self._link
        with link.changed:
            if not link.closed:
                link.to_engine.put(Frame(kind, channel, payload))
                if link.to_engine.num_bytes > _MAX_PENDING_BYTES:
                    self._writable.clear()
                link.changed.notify_all()

    async def writable(self) -> None:
        """Returns once the engine has received most of what was sent."""
        await self._writable.wait()

    def close(self) -> None:
        """Closes the link; the engine receives what was sent before."""
        with self._link.changed:
            self._link.closed = True
            self._link.schedule()
            self._link.changed.notify_all()

    def notice(self) -> None:
        """Ends waits in `writable` if the engine has caught up or is gone."""
        if not self._writable.is_set() and (self._link.closed or self._link.to_engine.num_bytes <= _MAX_PENDING_BYTES):
            self._writable.set()


class LocalEngineEnd:
    """Implements EngineEnd."""

    def __init__(self, link: LocalLink) -> None:
        self._link = link
        self._outgoing: list[Frame] = []

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame for the next flush."""
        self._outgoing.append(Frame(kind, channel, payload))

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame at once from any thread. Drops it if the front is gone."""
        with self._link.changed:
            if not self._link.closed:
                self._link.to_front.put(Frame(kind, channel, payload))
                self._link.schedule()

    def wake(self) -> None:
        """Ends a wait in `receive`, now or the next one. Thread-safe."""
        with self._link.changed:
            self._link.woken = True
            self._link.changed.notify_all()

    def flush(self) -> None:
        """Sends queued frames. Waits only if the front is megabytes behind. Raises LinkClosed when it is gone."""
        if not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        link = self._link
        with link.changed:
            if link.closed:
                raise LinkClosed("the front closed the link")
            may_wait = time.monotonic() < link.due and link.to_front.num_bytes < _TURN_BYTES
            for frame in outgoing:
                link.to_front.put(frame)
                may_wait = may_wait and frame.kind in _OUTPUTS
            if not may_wait:
                link.schedule()
            while link.to_front.num_bytes > _MAX_PENDING_BYTES and not link.closed:
                link.changed.wait()

    def receive(self, timeout: float | None, flush: bool = True) -> list[Frame]:
        """Flushes, waits for frames, a wake-up or the timeout, and returns the received frames.

        Raises LinkClosed when the front is gone and everything that it sent was received.
        """
        if flush:
            self.flush()
        link = self._link
        with link.changed:
            if not (timeout is not None and timeout <= 0):
                if link.to_front.frames:
                    link.schedule()
                link.changed.wait_for(lambda: link.to_engine.frames or link.woken or link.closed, timeout)
            link.woken = False
            was_behind = link.to_engine.num_bytes > _MAX_PENDING_BYTES
            frames = link.to_engine.take(_MAX_PENDING_BYTES)
            if was_behind:
                link.schedule()
            if not frames and link.closed:
                raise LinkClosed("the front closed the link")
        return frames

    def close(self) -> None:
        """Sends queued frames, then closes. Idempotent."""
        link = self._link
        with link.changed:
            if not link.closed:
                for frame in self._outgoing:
                    link.to_front.put(frame)
                self._outgoing = []
            link.closed = True
            link.schedule()
            link.changed.notify_all()


def _ignore() -> None:
    """The end was reported."""
