"""AsyncLLM: offline generation on the caller's event loop, with outputs as they grow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from baton.gateway.core import Generation
from baton.llm.engine.arguments import engine_arguments
from baton.llm.engine.compute_threads import sleep_between_steps
from baton.llm.engine.engine_args import EngineArgs
from baton.llm.engine.local_engine import LocalEngine, open_engine
from baton.llm.engine.operations import Mode, Operations
from baton.llm.engine.weight_transfer import WeightTransfer
from baton.llm.parameters.names import InvalidParameter
from baton.llm.parameters.sampling_params import SamplingParams
from baton.llm.requests.adapters import LoRARequest, adapters_of, load_adapters
from baton.llm.requests.defaults import default_params
from baton.llm.requests.prepared import Source, Work, encode, prepare, start
from baton.llm.requests.prompts import Chat, ChatForm, Messages, check_tokenization, prompt_of
from baton.llm.results.collector import Collector
from baton.llm.results.metrics import Metric, snapshots
from baton.llm.results.outputs import RequestOutput
from baton.v1 import control_pb2


class AsyncLLM:
    """A model and an engine in this process. Arguments are those of LLM.

    The engine starts at the first call, on that event loop, and ends with `shutdown` or the end of an `async with`.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        sleep_between_steps()
        self._arguments = engine_arguments(model, arguments)
        self._numbers = itertools.count()
        self._opened = AsyncExitStack()
        self._opening: asyncio.Future[LocalEngine] | None = None
        self._transfer_of_engine: WeightTransfer | None = None
        self._running: dict[str, tuple[Collector, Generation]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Returns an engine with these arguments."""
        return cls(**vars(engine_args))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *ignored: object) -> None:
        await self.shutdown()

    async def start(self) -> LocalEngine:
        """Starts the engine, or waits until it has started. Raises a ServiceError."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._opened.enter_async_context(open_engine(self._arguments)))
        return await asyncio.shield(self._opening)

    async def shutdown(self) -> None:
        """Ends the engine and frees its memory. Running outputs end with an error. Idempotent."""
        if self._transfer_of_engine is not None:
            await self._transfer_of_engine.close()
        await self._opened.aclose()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output of one prompt as it grows, by the `output_kind` of its parameters.

        What arrives between two steps of the iteration is yielded together. Ending the iteration ends the request.
        """
        check_tokenization(tokenization_kwargs)
        source = prompt_of(prompt, tokenization_kwargs)
        async for output in self._run(source, sampling_params, request_id, priority, lora_request):
            yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer to one chat as it grows, as `generate`."""
        form = ChatForm(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        form.check()
        async for output in self._run(Chat(messages, form), sampling_params, request_id, priority):
            yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request, whose last output has the finish_reason "abort". Ignores unknown ids."""
        running = self._running.pop(request_id, None)
        if running is not None:
            collector, generation = running
            generation.abort()
            collector.abort()

    async def get_default_sampling_params(self) -> SamplingParams:
        """Returns the defaults of the model's generation_config.json."""
        return default_params((await self.start()).model)

    async def get_stats(self, audit: bool = False) -> control_pb2.GetStatsResponse:
        """Returns the engine's counters, blocks and activity. `audit`: checks every block. Raises DataLoss."""
        return await (await self.start()).stats(audit)

    async def get_metrics(self) -> list[Metric]:
        """Returns the engine's metrics, also under vLLM's names."""
        return list(snapshots(await (await self._operations()).metrics()))

    async def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Frees memory, as LLM.sleep. `mode`: whether running outputs end now, run to their ends, or are kept."""
        operations = await self._operations()
        await self._abort_all(mode)
        await operations.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back; kept requests continue."""
        await (await self._operations()).wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Returns whether the engine sleeps or is paused."""
        return await (await self._operations()).is_sleeping()

    async def pause_generation(self, *, mode: Mode = "abort", clear_cache: bool = True) -> None:
        """Stops the engine between two steps. Requests that come meanwhile are refused."""
        operations = await self._operations()
        await self._abort_all(mode)
        await operations.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        """Ends a pause; kept requests continue."""
        await (await self._operations()).resume()

    async def is_paused(self) -> bool:
        """Returns whether the engine is paused or sleeps."""
        return await self.is_sleeping()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached block. Returns True. Running requests keep theirs."""
        return await (await self._operations()).reset_prefix_cache(reset_running_requests, reset_connector)

    async def start_profile(self, profile_prefix: str | None = None) -> str:
        """Records steps into a file of AsyncLLM(profile_dir=...) until `stop_profile`. Returns its path."""
        return await (await self._operations()).start_profile(profile_prefix)

    async def stop_profile(self) -> str:
        """Writes the recorded steps. Returns the file's path."""
        return await (await self._operations()).stop_profile()

    async def reload_weights(self, weights_path: str = "", mode: Mode = "wait") -> None:
        """Replaces the weights by those of a folder of the same architecture; empty: reads the present one again."""
        await (await self._operations()).reload_weights(weights_path, mode)

    # New weights from a trainer, as in LLM.

    async def init_weight_transfer_engine(self, request: Any = None) -> None:
        """Chooses where tensors come from; with "gloo" or "nccl", returns when the trainer has joined."""
        await (await self._transfer()).init(request)

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begins to replace the weights. Requests run on with the present ones."""
        await (await self._transfer()).start(is_checkpoint_format)

    async def update_weights(self, request: Any = None) -> None:
        """Adds tensors by name, which must not change before `finish_weight_update` returns."""
        await (await self._transfer()).update(request)

    async def finish_weight_update(self, mode: Mode = "keep") -> None:
        """Uses the new weights from now on. Kept outputs continue with them, and their KV is computed again."""
        await (await self._transfer()).finish(mode)

    async def _transfer(self) -> WeightTransfer:
        engine = await self.start()
        if self._transfer_of_engine is None:
            self._transfer_of_engine = WeightTransfer(engine)
        return self._transfer_of_engine

    async def _operations(self) -> Operations:
        return Operations(await self.start())

    async def _abort_all(self, mode: Mode) -> None:
        for request_id in list(self._running) if mode == "abort" else ():
            await self.abort(request_id)

    async def _run(
        self,
        source: Source,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        engine = await self.start()
        (adapter,) = await load_adapters(engine, adapters_of(lora_request))
        number = next(self._numbers)
        name = str(number) if request_id is None else request_id
        if name in self._running:
            raise InvalidParameter(f"request_id {name!r} is running already", field="request_id")
        prepared = prepare(default_params(engine.model) if params is None else params, engine)
        changed = asyncio.Event()
        work = Work(0, name, number, source, prepared, priority, adapter)
        encoded = await encode(engine, work)
        collector, generation = await start(engine, work, encoded, lambda _: changed.set())
        self._running[name] = (collector, generation)
        try:
            while True:
                await changed.wait()
                changed.clear()
                if collector.error is not None:
                    raise collector.error
                output = collector.snapshot()
                yield output
                if output.finished:
                    return
        finally:
            if self._running.get(name, (None,))[0] is collector:
                del self._running[name]
            generation.abort()
