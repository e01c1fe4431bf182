"""A load client of Baton's public gRPC API: Embed."""

from __future__ import annotations

import time

import grpc

from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt
from baton.services.bench.serve.grpc_client import SHORT_CALL_SECONDS, GrpcClient
from baton.services.bench.serve.stats import Record
from baton.v1 import inference_pb2


class GrpcEmbedClient(GrpcClient):
    """Implements Client. All calls share one connection."""

    def __init__(self, address: str, model: str, timeout: float, dimensions: int) -> None:
        super().__init__(address, chat=False, model=model, timeout=timeout)
        self._dimensions = dimensions

    async def count_tokens(self, text: str) -> int:
        """Counts a text with the server's Tokenize."""
        request = inference_pb2.TokenizeRequest(model=self._model, text=text)
        try:
            return len((await self._stub.Tokenize(request, timeout=SHORT_CALL_SECONDS)).token_ids)
        except grpc.aio.AioRpcError as error:
            raise BenchFailed(f"Tokenize: {error.code().name}: {error.details()}") from error

    def encode(self, prompt: DatasetPrompt) -> inference_pb2.EmbedRequest:  # type: ignore[override]
        """Returns the request as a protobuf message."""
        request = inference_pb2.EmbedRequest(model=self._model, dimensions=self._dimensions)
        for one in prompt.several:
            if one.token_ids:
                request.token_ids.add(token_ids=one.token_ids)
            else:
                request.texts.append(one.text)
        return request

    async def send(self, request: inference_pb2.EmbedRequest, record: Record) -> None:  # type: ignore[override]
        """Sends the request and reads its stream."""
        found, num_texts = 0, len(request.texts) + len(request.token_ids)
        record.sent = time.perf_counter()
        try:
            async for response in self._stub.Embed(request, timeout=self._timeout):
                found += len(response.embeddings)
                if response.HasField("usage"):
                    record.num_prompt = response.usage.prompt_tokens
                    record.num_cached = response.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            record.error = f"{error.code().name}: {error.details()}"
        record.close(time.perf_counter())
        if not record.error and found != num_texts:
            record.error = f"the answer has {found} embeddings for {num_texts} texts"
