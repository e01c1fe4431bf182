"""LLM: offline generation for scripts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

from baton.llm.batch import Batch
from baton.llm.engine.arguments import engine_arguments
from baton.llm.engine.compute_threads import sleep_between_steps
from baton.llm.engine.local_engine import LocalEngine, open_engine
from baton.llm.engine.operations import Mode, Operations
from baton.llm.engine.weight_transfer import WeightTransfer
from baton.llm.loop_thread import LoopThread
from baton.llm.parameters.beam_search_params import BeamSearchParams
from baton.llm.parameters.names import InvalidParameter
from baton.llm.parameters.sampling_params import RequestOutputKind, SamplingParams
from baton.llm.progress import Progress
from baton.llm.requests.adapters import ManyAdapters, adapters_of, load_adapters
from baton.llm.requests.beams import prepare_beams, start_beams
from baton.llm.requests.defaults import default_params
from baton.llm.requests.prepared import Prepared, Source, Work, prepare, start
from baton.llm.requests.prompts import Chat, ChatForm, chats_of, check_tokenization, lengths, prompt_of, prompts_of
from baton.llm.requests.tokenizer import LlmTokenizer
from baton.llm.results.beams import BeamSearchOutput
from baton.llm.results.metrics import Metric, snapshots
from baton.llm.results.outputs import RequestOutput
from baton.v1 import control_pb2

ManyParams = SamplingParams | Sequence[SamplingParams] | None
# Callers get complete outputs, so tokens of several steps are handled together.
_PACE_SECONDS = 0.1

Wanted = bool | Callable[..., Any]  # True: a bar of ours; a callable makes tqdm bars


class LLM:
    """A model and an engine in this process, until `shutdown` or the end of a `with`.

    Arguments are vLLM's, and the settings of a worker by their names. Methods may be called from one thread at a time.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        sleep_between_steps()
        read = engine_arguments(model, arguments)
        self._numbers = itertools.count()
        self._thread = LoopThread("baton llm")
        self._opened = AsyncExitStack()
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self._opened)
        try:
            opening = open_engine(read, _PACE_SECONDS)
            self._engine: LocalEngine = self._thread.run(self._opened.enter_async_context(opening))
            self._operations = Operations(self._engine)
            self._transfer = WeightTransfer(self._engine)
            self._opened.push_async_callback(self._transfer.close)
        except BaseException:
            self._finalizer()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the engine and frees its memory. Idempotent."""
        self._finalizer()

    def generate(
        self,
        prompts: Any,
        sampling_params: ManyParams = None,
        *,
        use_tqdm: Wanted = True,
        lora_request: ManyAdapters = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns the outputs of one or many prompts, in their order.

        A prompt is a text, token ids, or a mapping with `prompt` or `prompt_token_ids` and perhaps `cache_salt`.
        `prompts` may be any iterable, which is read as the engine needs it. `sampling_params`: one for all, one for
        each, or None for the model's own defaults. `priority`: lower runs earlier. Raises InvalidRequest for a prompt
        or parameter that is wrong.
        """
        adapters = self._loaded(lora_request)
        check_tokenization(tokenization_kwargs)
        sources = (prompt_of(prompt, tokenization_kwargs) for prompt in prompts_of(prompts))
        total = _common_length("prompts", _counted(prompts_of(prompts)), sampling_params, priority, lora_request)
        return self._complete(self._works(sources, sampling_params, priority, adapters), total, use_tqdm)

    def generate_iter(
        self,
        prompts: Any,
        sampling_params: ManyParams = None,
        *,
        in_order: bool = True,
        use_tqdm: Wanted = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields outputs as they are complete, so that neither prompts nor outputs are held in memory together.

        `in_order`: in the order of the prompts. Closing the iterator ends the requests that run.
        """
        check_tokenization(tokenization_kwargs)
        sources = (prompt_of(prompt, tokenization_kwargs) for prompt in prompts_of(prompts))
        total = _common_length("prompts", _counted(prompts_of(prompts)), sampling_params, None)
        return self._outputs(self._works(sources, sampling_params, None), total, use_tqdm, in_order)

    def chat(
        self,
        messages: Any,
        sampling_params: ManyParams = None,
        use_tqdm: Wanted = True,
        lora_request: ManyAdapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to one chat, a list of messages, or to many.

        `tools` are shown to the model; its calls stay text. Otherwise as `generate`.
        """
        adapters = self._loaded(lora_request)
        if chat_template_content_format not in ("auto", "string", "openai"):
            given = chat_template_content_format
            raise InvalidParameter(
                f"chat_template_content_format is {given!r}; give auto", field="chat_template_content_format"
            )
        form = ChatForm(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        form.check()
        chats = chats_of(messages)
        total = _common_length("messages", _counted(chats), sampling_params, None, lora_request)
        works = self._works((Chat(one, form) for one in chats), sampling_params, None, adapters)
        return self._complete(works, total, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: ManyAdapters = None,
        use_tqdm: Wanted = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Returns the best `beam_width` continuations of each prompt, best first.

        `concurrency_limit`: prompts that are searched at a time; None: as many as fill the engine's batch.
        """
        adapters = self._loaded(lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            message = f"concurrency_limit is {concurrency_limit}; give at least 1"
            raise InvalidParameter(message, field="concurrency_limit")
        given = prompts_of(prompts)
        prepared = prepare_beams(params)
        works = self._numbered(((prompt_of(one), prepared) for one in given), None, adapters)
        progress, found = Progress(use_tqdm, _counted(given)), dict[int, BeamSearchOutput]()
        batch = Batch(
            self._thread,
            self._engine,
            partial(start_beams, params=params),
            window=(concurrency_limit or 0) * params.beam_width,
        )
        try:
            for work, output in batch.run(works):
                progress.count()
                found[work.index] = output
        finally:
            progress.close()
        return [found[index] for index in range(len(found))]

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the defaults of the model's generation_config.json."""
        return default_params(self._engine.model)

    def get_tokenizer(self) -> LlmTokenizer:
        """Returns the model's tokenizer."""
        return LlmTokenizer(self._engine.model)

    def get_stats(self, audit: bool = False) -> control_pb2.GetStatsResponse:
        """Returns the engine's counters, blocks and activity. `audit`: checks every block. Raises DataLoss."""
        return self._thread.run(self._engine.stats(audit))

    def get_metrics(self) -> list[Metric]:
        """Returns the engine's metrics, also under vLLM's names."""
        return list(snapshots(self._thread.run(self._operations.metrics())))

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Frees memory. Level 0 only pauses; 1 frees the KV cache and keeps weights in host memory; 2 drops both."""
        self._thread.run(self._operations.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back. After level 2, reads the weights again."""
        self._thread.run(self._operations.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Returns whether the engine sleeps or is paused."""
        return self._thread.run(self._operations.is_sleeping())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached block. Returns True."""
        return self._thread.run(self._operations.reset_prefix_cache(reset_running_requests, reset_connector))

    def start_profile(self, profile_prefix: str | None = None) -> str:
        """Records steps into a file of LLM(profile_dir=...) until `stop_profile`. Returns its path."""
        return self._thread.run(self._operations.start_profile(profile_prefix))

    def stop_profile(self) -> str:
        """Writes the recorded steps. Returns the file's path."""
        return self._thread.run(self._operations.stop_profile())

    def reload_weights(self, weights_path: str = "") -> None:
        """Replaces the weights by those of a folder of the same architecture; empty: reads the present one again."""
        self._thread.run(self._operations.reload_weights(weights_path))

    # New weights from a trainer.

    def init_weight_transfer_engine(self, request: Any = None) -> None:
        """Chooses where tensors come from: "local" or "ipc", or "gloo" or "nccl" from a trainer's WeightSender.

        `init_info` of the last two: vLLM's `master_address`, `master_port`, `rank_offset` and `world_size`, and perhaps
        `timeout` in seconds. Returns when the trainer has joined.
        """
        self._thread.run(self._transfer.init(request))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begins to replace the weights."""
        self._thread.run(self._transfer.start(is_checkpoint_format))

    def update_weights(self, request: Any = None) -> None:
        """Adds tensors: a mapping by the names of the checkpoint, pairs, or vLLM's update_info with `ipc_handles`.

        With a WeightSender: what it sends; update_info, if given, must agree with it.
        Tensors are read by `finish_weight_update`, and must not change before it. Raises InvalidRequest for one that
        does not fit the model.
        """
        self._thread.run(self._transfer.update(request))

    def finish_weight_update(self) -> None:
        """Uses the new weights from now on, and forgets every cached block. Raises Mismatch if tensors are missing."""
        self._thread.run(self._transfer.finish())

    def _complete(self, works: Iterable[Work], total: int | None, use_tqdm: Wanted) -> list[RequestOutput]:
        progress, found = Progress(use_tqdm, total), dict[int, RequestOutput]()
        try:
            for work, output in Batch(self._thread, self._engine, start).run(works):
                progress.add(output)
                found[work.index] = output
        finally:
            progress.close()
        return [found[index] for index in range(len(found))]

    def _outputs(
        self, works: Iterable[Work], total: int | None, use_tqdm: Wanted, in_order: bool
    ) -> Iterator[RequestOutput]:
        progress = Progress(use_tqdm, total)
        try:
            for _, output in Batch(self._thread, self._engine, start, in_order).run(works):
                progress.add(output)
                yield output
        finally:
            progress.close()

    def _works(
        self,
        sources: Iterable[Source],
        params: ManyParams,
        priority: Sequence[int] | None,
        adapters: Sequence[str] = ("",),
    ) -> Iterator[Work]:
        """Returns the requests. Parameters that several share are converted once. Raises InvalidRequest for them."""
        if params is None:
            params = self.get_default_sampling_params()
        listed = list(params) if isinstance(params, Sequence) else [params]
        by_identity = {id(one): one for one in listed}
        converted = {key: prepare(one, self._engine, RequestOutputKind.FINAL_ONLY) for key, one in by_identity.items()}
        prepared = [converted[id(one)] for one in listed]
        each = iter(prepared) if isinstance(params, Sequence) else itertools.repeat(prepared[0])
        works = self._numbered(zip(sources, each, strict=False), priority, adapters)
        # The engine gets no more than fill its batch and queue, so those that run earlier are given first.
        return works if priority is None else iter(sorted(works, key=lambda work: work.priority))

    def _numbered(
        self,
        requests: Iterable[tuple[Source, Prepared]],
        priority: Sequence[int] | None,
        adapters: Sequence[str] = ("",),  # of each request, or of all
    ) -> Iterator[Work]:
        for index, (source, prepared) in enumerate(requests):
            number = next(self._numbers)
            rank = 0 if priority is None else priority[index]
            adapter = adapters[index] if len(adapters) > 1 else adapters[0]
            yield Work(index, str(number), number, source, prepared, rank, adapter)

    def _loaded(self, lora_request: ManyAdapters) -> list[str]:
        """Loads adapters. Returns the name of each."""
        return self._thread.run(load_adapters(self._engine, adapters_of(lora_request))) or [""]


def _counted(values: Iterable[Any]) -> int | None:
    return next(lengths(values), None)


def _common_length(
    name: str, total: int | None, params: object, priority: object, adapters: object = None
) -> int | None:
    """Returns the number of requests, if it is known. Raises InvalidParameter for lists of another length."""
    for other, value in (("sampling_params", params), ("priority", priority), ("lora_request", adapters)):
        for length in lengths(value):
            if total is not None and length != total:
                raise InvalidParameter(f"{other} has {length} entries and {name} has {total}", field=other)
    return total


def _shut_down(thread: LoopThread, opened: AsyncExitStack) -> None:
    try:
        thread.run(opened.aclose())
    finally:
        thread.close()
