"""Requests with a LoRA adapter: they wait until it is on the device, and keep it there until they end."""

from __future__ import annotations

from collections.abc import Callable

from baton.worker.core import Request
from baton.worker.engine.adapters.pool import AdapterPool, Granted
from baton.worker.engine.live_requests import LiveRequests
from baton.worker.engine.submit import no_adapters
from baton.worker.requests.outputs import AdapterWait
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.scheduler import Scheduler

_SHORT_SECONDS = 0.001  # below which a request has not waited


class AdapterRequests:
    """Gives requests the slots of their adapters. Without a pool, no request has an adapter.

    `go_on`: continues a request that has its slot.
    """

    def __init__(
        self,
        pool: AdapterPool[RequestState] | None,
        scheduler: Scheduler,
        requests: LiveRequests,
        go_on: Callable[[RequestState], None],
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self._clock = clock
        self._scheduler = scheduler
        self._requests = requests
        self._go_on = go_on
        requests.adapters = pool

    @property
    def pending(self) -> bool:
        """Whether `settle` would do something now."""
        return self.pool is not None and self.pool.pending

    @property
    def due(self) -> float | None:
        """When `settle` must be called at the latest."""
        return None if self.pool is None else self.pool.due

    def check(self, request: Request) -> None:
        """Raises Unsupported for an adapter without a pool."""
        if request.adapter is not None and self.pool is None:
            raise no_adapters(request.adapter.name)

    def open(self, state: RequestState) -> None:
        """Holds a new request until its adapter is on the device. It may go on at once."""
        pool, adapter = self.pool, state.request.adapter
        assert pool is not None, "checked at submit"
        assert adapter is not None, "only requests with an adapter wait for one"
        self._scheduler.load_first(state)
        pool.want(state, adapter)
        self.settle()

    def settle(self) -> None:
        """Continues requests whose adapter is on the device, and fails those whose adapter cannot be loaded."""
        if self.pool is None:
            return
        for granted in self.pool.settle(self._scheduler.collected_step):
            state = granted.owner
            if state.phase is not Phase.LOADING:
                continue
            if granted.error is not None:
                self._requests.fail(state, granted.error)
            else:
                state.adapter_slot = granted.slot
                self._note(state, granted)
                self._go_on(state)

    def _note(self, state: RequestState, granted: Granted[RequestState]) -> None:
        now = self._clock()
        if now - granted.since < _SHORT_SECONDS:
            return
        self._requests.outputs.adapter_waits.append(
            AdapterWait(state.request, granted.since, now, granted.source, granted.read_seconds, granted.copy_seconds)
        )
