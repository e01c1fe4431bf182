"""A scripted router and scripted workers: the real contracts over real gRPC, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from baton.rpc.errors import NoCapacity, ServiceError, Unavailable, Unsupported
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import router_pb2, router_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

MODEL = types_pb2.ModelInfo(
    name="storyteller-7m",
    digest=bytes(range(16)),
    max_model_len=2048,
    vocab_size=4096,
    block_size=16,
    eos_token_ids=[4, 2],
)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Polls until a condition holds."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not true within {seconds} s")


Script = Callable[[worker_pb2.SubmitRequest], list[int]]  # the whole output of a request


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends each request its script's tokens, one frame per step for all. A resumed request continues its output."""

    def __init__(self, worker_id: str, script: Script, step_seconds: float = 0.002, tokens_a_step: int = 1) -> None:
        self.worker_id = worker_id
        self.script = script
        self.step_seconds = step_seconds
        self.tokens_a_step = tokens_a_step
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.aborts: list[int] = []
        self.dropped: list[int] = []  # slots that ran when their stream ended
        self.refusal: ServiceError | None = None  # the error of every submit
        self.break_after_tokens: int | None = None  # breaks the stream when a request has this many tokens
        self.dies_in_queue: int | None = None  # reports this many waiting requests, then breaks the stream
        self.cached_tokens = 0
        self.silent = False  # reads, but sends nothing
        self.steps_last = False  # answers pings, but no step ends
        self.computes_prompts = False  # steps end without tokens
        self.num_streams = 0
        self._server = RpcServer("127.0.0.1:0", [], 0)

    async def __aenter__(self) -> Self:
        name = "baton.v1.WorkerService"
        register = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        self._server = RpcServer("127.0.0.1:0", [Service(name, self, register)], grace_seconds=0)
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._server.__aexit__(None, None, None)

    @property
    def endpoint(self) -> types_pb2.Endpoint:
        return types_pb2.Endpoint(worker_id=self.worker_id, epoch=1, address=f"127.0.0.1:{self._server.port}")

    async def GenerateStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.num_streams += 1
        active: dict[int, tuple[worker_pb2.SubmitRequest, list[int]]] = {}
        context.add_done_callback(lambda _: self.dropped.extend(active))
        inbox: asyncio.Queue[worker_pb2.GenerateStreamRequest | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, inbox))
        step = 0
        try:
            while True:
                held = self.silent or self.steps_last or self.computes_prompts
                messages = [] if active and not held else [await inbox.get()]
                while not inbox.empty():
                    messages.append(inbox.get_nowait())
                step += 1
                frame = worker_pb2.GenerateStreamResponse(step=step)
                for message in messages:
                    if message is None:
                        return
                    self._take(message, active, frame)
                if self.dies_in_queue is not None and len(active) >= self.dies_in_queue:
                    yield worker_pb2.GenerateStreamResponse(step=step, waiting_slots=active)
                    raise Unavailable("the worker broke")
                if not self.silent:
                    if not (self.steps_last or self.computes_prompts):
                        self._advance(active, frame)
                    yield frame
                await asyncio.sleep(self.step_seconds)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, inbox: asyncio.Queue[Any]) -> None:
        async for message in requests:
            inbox.put_nowait(message)
        inbox.put_nowait(None)

    def _take(self, message: Any, active: dict[int, Any], frame: Any) -> None:
        for slot in message.aborts:
            self.aborts.append(slot)
            if active.pop(slot, None) is not None:
                frame.finishes.add(
                    slot=slot, reason=types_pb2.FINISH_REASON_ABORT, num_cached_tokens=self.cached_tokens
                )
        frame.pong = message.ping
        frame.progress = frame.step if self.computes_prompts else 0
        for submit in message.submits:
            self.submits.append(submit)
            if self.refusal is not None:
                frame.failures.add(
                    slot=submit.slot,
                    code=self.refusal.code.value[0],
                    message=self.refusal.message,
                    detail=self.refusal.detail,
                )
            else:
                tokens = self.script(submit)[: submit.stop.max_tokens]
                active[submit.slot] = (submit, tokens[len(submit.resume.output_token_ids) :])
                self._add_prompt_logprobs(frame, submit)

    def _advance(self, active: dict[int, Any], frame: Any) -> None:
        for slot, (submit, left) in list(active.items()):
            new, left[:] = left[: self.tokens_a_step], left[self.tokens_a_step :]
            if new:
                frame.slots.append(slot)
                frame.token_ids.extend(new)
                frame.token_counts.append(len(new))
                self._add_logprobs(frame, submit, new)
            if self.break_after_tokens is not None:
                done = len(self.script(submit)) - len(left)
                if done >= self.break_after_tokens:
                    raise Unavailable("the worker broke")
            if not left:
                self._finish(frame, submit, new)
                del active[slot]
        if all(count == 1 for count in frame.token_counts):
            del frame.token_counts[:]

    def _add_logprobs(self, frame: Any, submit: worker_pb2.SubmitRequest, new: list[int]) -> None:
        if submit.sampling.HasField("logprobs"):
            frame.logprobs.add(slot=submit.slot, tokens=_logprobs(new, submit.sampling.logprobs))

    def _add_prompt_logprobs(self, frame: Any, submit: worker_pb2.SubmitRequest) -> None:
        if submit.sampling.HasField("prompt_logprobs") and len(submit.prompt_token_ids) > 1:
            entries = _logprobs(submit.prompt_token_ids[1:], submit.sampling.prompt_logprobs)
            frame.prompt_logprobs.add(slot=submit.slot, first_position=1, tokens=entries)

    def _finish(self, frame: Any, submit: worker_pb2.SubmitRequest, new: list[int]) -> None:
        last = new[-1] if new else -1
        finish = frame.finishes.add(slot=submit.slot, num_cached_tokens=self.cached_tokens)
        finish.reason = types_pb2.FINISH_REASON_LENGTH
        if last in MODEL.eos_token_ids:
            finish.reason = types_pb2.FINISH_REASON_STOP
        elif last in submit.stop.stop_token_ids:
            finish.reason = types_pb2.FINISH_REASON_STOP
            finish.stop_token_id = last


def _logprobs(token_ids: Sequence[int], num_top: int) -> list[types_pb2.TokenLogprobs]:
    top = range(num_top)
    return [
        types_pb2.TokenLogprobs(
            logprob=-0.5, rank=1, top_token_ids=[token + at for at in top], top_logprobs=[-0.5 - at for at in top]
        )
        for token in token_ids
    ]


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Places on the first worker that is not excluded."""

    def __init__(self, workers: list[ScriptedWorker]) -> None:
        self.workers = workers
        self.unary_only = False
        self.num_streams = 0
        self.stream_messages: list[router_pb2.PlaceStreamRequest] = []
        self.models = [MODEL]
        self.places: list[router_pb2.PlaceRequest] = []
        self.outcomes: list[router_pb2.PlacementOutcome] = []
        self.refusal: ServiceError | None = None
        self.hangs = False
        self.predicted_cached_tokens = 0
        self.prefills: list[types_pb2.Endpoint] = []  # of placements; the first that is not excluded
        self._changed = asyncio.Condition()
        self._server: RpcServer | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Starts, or restarts on the same port."""
        name = "baton.v1.RouterService"
        register = router_pb2_grpc.add_RouterServiceServicer_to_server
        server = RpcServer(f"127.0.0.1:{self.port}", [Service(name, self, register)], grace_seconds=0)
        await server.__aenter__()
        self._server, self.port = server, server.port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.__aexit__(None, None, None)
            self._server = None

    async def __aexit__(self, *exception: Any) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def set_models(self, models: list[types_pb2.ModelInfo]) -> None:
        async with self._changed:
            self.models = models
            self._changed.notify_all()

    async def Place(self, request: Any, context: Any) -> router_pb2.PlaceResponse:  # noqa: N802
        self.places.append(request)
        if self.hangs:
            await asyncio.sleep(60)
        if self.refusal is not None:
            raise self.refusal
        for worker in self.workers:
            if worker.worker_id not in request.excluded_worker_ids:
                placed = router_pb2.PlaceResponse(
                    placement_id=len(self.places),
                    decode=worker.endpoint,
                    decode_cached_tokens=self.predicted_cached_tokens,
                )
                if self.prefills:
                    placed.prefill.CopyFrom(self.prefills[0])
                return placed
        raise NoCapacity("no worker is left") if not self.workers else Unavailable("no live worker")

    async def PlaceStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self.unary_only:
            raise Unsupported("no method PlaceStream")
        self.num_streams += 1
        answers: asyncio.Queue[router_pb2.PlaceAnswer | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_stream(request_iterator, answers, tasks))
            while (answer := await answers.get()) is not None:
                ready = [answer]
                while not answers.empty() and (more := answers.get_nowait()) is not None:
                    ready.append(more)
                yield router_pb2.PlaceStreamResponse(answers=ready)
            reading.cancel()

    async def _read_stream(self, messages: Any, answers: asyncio.Queue[Any], tasks: asyncio.TaskGroup) -> None:
        placing: dict[int, asyncio.Task[None]] = {}
        async for message in messages:
            self.stream_messages.append(message)
            for entry in message.entries:
                if entry.HasField("cancel"):
                    placing.pop(entry.call_id).cancel()
                else:
                    placing[entry.call_id] = tasks.create_task(self._answer(entry, answers))
        for task in placing.values():
            task.cancel()
        answers.put_nowait(None)

    async def _answer(self, entry: router_pb2.PlaceEntry, answers: asyncio.Queue[Any]) -> None:
        answer = router_pb2.PlaceAnswer(call_id=entry.call_id)
        try:
            answer.placed.CopyFrom(await self.Place(entry.place, None))
        except ServiceError as error:
            failure = router_pb2.PlaceFailure(code=error.code.value[0], message=error.message, detail=error.detail)
            answer.failure.CopyFrom(failure)
        answers.put_nowait(answer)

    async def Report(self, request: Any, context: Any) -> router_pb2.ReportResponse:  # noqa: N802
        self.outcomes.extend(request.outcomes)
        return router_pb2.ReportResponse()

    async def WatchModels(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        while True:
            yield router_pb2.WatchModelsResponse(models=self.models)
            async with self._changed:
                await self._changed.wait()
