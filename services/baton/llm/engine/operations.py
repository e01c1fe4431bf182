"""Operations on a running engine: sleep, pause, caches, profiles, metrics, weights from a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from prometheus_client.core import Metric as Family

from baton.llm.engine.local_engine import LocalEngine, called
from baton.llm.parameters.names import InvalidParameter
from baton.rpc.errors import Mismatch
from baton.v1 import control_pb2
from baton.worker.front.metrics.worker import metrics_of

# What happens to running requests. They end with an error, run to their end first, or continue afterwards.
Mode = Literal["abort", "wait", "keep"]

_MODES: Mapping[str, control_pb2.RunningRequests.ValueType] = {
    "abort": control_pb2.RUNNING_REQUESTS_ABORT,
    "wait": control_pb2.RUNNING_REQUESTS_WAIT,
    "keep": control_pb2.RUNNING_REQUESTS_KEEP,
}
_LONGEST_MS = 7 * 24 * 3600 * 1000  # for running requests to end
_TAGS = {"weights": control_pb2.MEMORY_PART_WEIGHTS, "kv_cache": control_pb2.MEMORY_PART_KV_CACHE}
# Those of the REST and gRPC servers say nothing here.
_PREFIXES = ("vllm:", "baton_worker_")


class Operations:
    """Raises ServiceErrors. Used on the engine's event loop."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._control = engine.control

    async def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Frees memory. Level 0 only pauses; 1 frees the KV cache and keeps weights in host memory; 2 drops both."""
        if level not in (0, 1, 2):
            raise InvalidParameter(f"level is {level!r}; give 0, 1 or 2", field="level")
        if level == 0:
            await self.pause(mode, clear_cache=False)
            return
        request = control_pb2.SleepRequest(level=level, running_requests=running_requests(mode), timeout_ms=_LONGEST_MS)
        await called(self._control.Sleep(request))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back, or that of "weights" or "kv_cache" alone, and ends a pause."""
        if unknown := [tag for tag in tags or () if tag not in _TAGS]:
            raise InvalidParameter(f"tags has {unknown[0]!r}; give {' and '.join(_TAGS)}", field="tags")
        if (await self._engine.stats()).sleep_level:
            parts = [_TAGS[tag] for tag in tags or ()]
            await called(self._control.WakeUp(control_pb2.WakeUpRequest(parts=parts)))
        else:
            await called(self._control.Resume(control_pb2.ResumeRequest()))
        await self._engine.refresh()

    async def is_sleeping(self) -> bool:
        """Returns whether the engine sleeps or is paused."""
        return (await self._engine.stats()).activity != control_pb2.WORKER_ACTIVITY_SERVING

    async def pause(self, mode: Mode = "abort", clear_cache: bool = True) -> None:
        """Stops the engine between two steps, until `resume`."""
        request = control_pb2.PauseRequest(running_requests=running_requests(mode), timeout_ms=_LONGEST_MS)
        await called(self._control.Pause(request))
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Continues after `pause`."""
        await called(self._control.Resume(control_pb2.ResumeRequest()))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached block, also in host memory. Returns True.

        Running requests keep their blocks, or are computed again. `reset_connector` changes nothing: host memory is
        always emptied.
        """
        request = control_pb2.ResetPrefixCacheRequest(recompute_running=reset_running_requests)
        await called(self._control.ResetPrefixCache(request))
        return True

    async def start_profile(self, profile_prefix: str | None = None) -> str:
        """Records steps until `stop_profile`. Returns the path of the trace."""
        if profile_prefix is not None:
            raise InvalidParameter("profile_prefix is not supported; leave it out", field="profile_prefix")
        try:
            return (await called(self._control.StartProfile(control_pb2.StartProfileRequest()))).path  # type: ignore[no-any-return]
        except Mismatch as error:
            if error.field == "profile_dir":
                raise InvalidParameter("profiling is off: give LLM(profile_dir=FOLDER)", field="profile_dir") from None
            raise

    async def stop_profile(self) -> str:
        """Writes the trace. Returns its path."""
        return (await called(self._control.StopProfile(control_pb2.StopProfileRequest()))).path  # type: ignore[no-any-return]

    async def reload_weights(self, weights_path: str = "", mode: Mode = "wait") -> None:
        """Replaces the weights by those of a folder of the same architecture; empty: reads the present one again."""
        request = control_pb2.ReloadWeightsRequest(
            model=weights_path, running_requests=running_requests(mode), timeout_ms=_LONGEST_MS
        )
        await called(self._control.ReloadWeights(request))
        await self._engine.refresh()

    async def metrics(self) -> list[Family]:
        """Returns the metrics of the engine and its requests, also under vLLM's names."""
        stats = await self._engine.stats()
        families = [*metrics_of(stats, self._engine.model.name), *self._engine.metrics.registry.collect()]
        return [family for family in families if family.name.startswith(_PREFIXES)]


def running_requests(mode: str) -> control_pb2.RunningRequests.ValueType:
    """Returns a mode's value in the contract. Raises InvalidParameter."""
    if mode not in _MODES:
        raise InvalidParameter(f"mode is {mode!r}; give {', '.join(_MODES)}", field="mode")
    return _MODES[mode]
