"""A load client of Baton's public gRPC API."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from baton.rpc.channel import open_channel
from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt
from baton.services.bench.serve.stats import Record
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
SHORT_CALL_SECONDS = 30.0
_POLL_SECONDS = 0.05


class GrpcClient:
    """Implements Client with token ids in and out. All streams share one connection."""

    def __init__(self, address: str, chat: bool, model: str, timeout: float) -> None:
        self._channel = open_channel(address)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._chat = chat
        self._model = model
        self._timeout = timeout
        self._vocab_size = 0

    async def describe(self) -> str:
        """Returns the requested model, or the only one, once the gateway knows its vocabulary from a worker."""
        deadline = time.monotonic() + SHORT_CALL_SECONDS
        while not (model := await self._find()).vocab_size:
            if time.monotonic() > deadline:
                raise BenchFailed(
                    f"model {model.name!r}: no worker has said its vocabulary in {SHORT_CALL_SECONDS:g} s; start one"
                )
            await asyncio.sleep(_POLL_SECONDS)
        self._model, self._vocab_size = model.name, model.vocab_size
        return self._model

    async def _find(self) -> types_pb2.ModelInfo:
        """Returns the requested model, or the first one."""
        try:
            request = inference_pb2.ListModelsRequest()
            listed = await self._stub.ListModels(request, timeout=SHORT_CALL_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise BenchFailed(f"ListModels: {error.code().name}: {error.details()}") from error
        models: dict[str, types_pb2.ModelInfo] = {model.name: model for model in listed.models}
        name = self._model or next(iter(models), "")
        if name not in models:
            raise BenchFailed(f"model {name!r} is not served; there are {', '.join(models) or 'none'}")
        return models[name]

    async def token_pool(self) -> list[int]:
        """Returns the whole vocabulary."""
        return list(range(_FIRST_TOKEN_ID, self._vocab_size))

    async def count_tokens(self, text: str) -> int:
        """Counts with the server's Tokenize."""
        request = inference_pb2.TokenizeRequest(model=self._model, chat=_chat(text))
        try:
            return len((await self._stub.Tokenize(request, timeout=SHORT_CALL_SECONDS)).token_ids)
        except grpc.aio.AioRpcError as error:
            raise BenchFailed(f"Tokenize: {error.code().name}: {error.details()}") from error

    def encode(self, prompt: DatasetPrompt) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            model=self._model,
            sampling=types_pb2.SamplingParams(seed=prompt.seed),
            stop=types_pb2.StopConditions(max_tokens=prompt.num_output, ignore_eos=True),
            skip_detokenize=not self._chat,
        )
        if self._chat:
            request.chat.CopyFrom(_chat(prompt.text))
        elif prompt.text:
            request.text = prompt.text
        else:
            request.token_ids.token_ids.extend(prompt.token_ids)
        return request

    async def send(self, request: inference_pb2.GenerateRequest, record: Record) -> None:
        """Sends the request and reads its stream."""
        record.sent = time.perf_counter()
        try:
            async for response in self._stub.Generate(request, timeout=self._timeout):
                if response.token_ids:
                    record.token(time.perf_counter())
                if response.HasField("usage"):
                    record.num_prompt = response.usage.prompt_tokens
                    record.num_output = response.usage.completion_tokens
                    record.num_cached = response.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            record.error = f"{error.code().name}: {error.details()}"
        record.close(time.perf_counter())

    async def close(self) -> None:
        await self._channel.close()


def _chat(text: str) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=text)])
