"""The public gRPC API (baton.v1.InferenceService), over the same generator as REST."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.gate import Gate, OpenGate
from baton.gateway.access.identity import Identity
from baton.gateway.access.refusals import Refusals
from baton.gateway.access.rpc_guard import identity_of
from baton.gateway.access_log import is_request_id
from baton.gateway.core import Generation, GenerationRequest, Generator
from baton.gateway.fields.validation import check_template
from baton.gateway.generation.generator import adapted
from baton.gateway.grpc.access_line import AccessLine
from baton.gateway.grpc.adapter_methods import AdapterMethods
from baton.gateway.grpc.beams import generator_for
from baton.gateway.grpc.chat import chat_of, encode_chat
from baton.gateway.grpc.conversations import ConversationMethods
from baton.gateway.grpc.field_names import name_fields
from baton.gateway.grpc.responses.calls import ResponseCalls
from baton.gateway.grpc.responses.methods import ResponseMethods
from baton.gateway.grpc.resume import begin_stream, find_stream
from baton.gateway.grpc.server_methods import ServerFacts, ServerMethods
from baton.gateway.grpc.stream_sink import StreamSink
from baton.gateway.grpc.vectors.calls import VectorCalls
from baton.gateway.grpc.vectors.methods import VectorMethods
from baton.gateway.models.constraints.structured_output import check_constraint
from baton.gateway.models.sampling import RequestLimits
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.serving.affinity import check_session_name, session_name
from baton.gateway.serving.name_resolver import NameResolver
from baton.gateway.serving.reasoning_limit import limit_reasoning
from baton.gateway.serving.running_requests import RunningRequests
from baton.gateway.serving.tenancy import AdmittedGenerator, allowed_model, allowed_models
from baton.gateway.system.adapters import AdapterService
from baton.gateway.tracing.calls import trace_call
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError, Unsupported
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from baton.gateway.resume.store import StreamStore


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    token_ids: list[int]
    output_parsing: OutputParsing | None = None
    use: ToolUse = field(default_factory=ToolUse)


class InferenceServicer(
    AdapterMethods,
    ConversationMethods,
    ResponseMethods,
    ServerMethods,
    VectorMethods,
    inference_pb2_grpc.InferenceServiceServicer,
):
    """Implements InferenceService: takes text, chats or token ids and streams deltas."""

    def __init__(
        self,
        generator: Generator,
        catalog: ModelCatalog,
        limits: RequestLimits | None = None,
        gate: Gate | None = None,
        streams: StreamStore | None = None,
        responses: ResponseCalls | None = None,
        trust_templates: bool = False,
        tracing: GatewayTracing | None = None,
        listen: str = "127.0.0.1:0",
        running: RunningRequests | None = None,
        server: ServerFacts | None = None,
        vectors: VectorCalls | None = None,  # None: Embed and its like are refused
        adapters: AdapterService | None = None,  # None: AddAdapter and RemoveAdapter are refused
        names: NameResolver | None = None,  # None: no adapter is loaded when a request first names it
    ) -> None:
        self._generator = generator
        self._catalog = catalog
        self._limits = limits or RequestLimits()
        self._gate = gate or OpenGate()
        self._admin = AdminCheck(self._gate, listen)
        self._running = RunningRequests() if running is None else running
        self._server = server or ServerFacts()
        self._refusals = Refusals(self._gate)
        self._streams = streams
        self._responses = responses
        self._vector_calls = vectors
        self._adapters = adapters
        self._names = names
        self._trust_templates = trust_templates
        self._tracing = tracing

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        line = AccessLine("Generate", context)
        sink = StreamSink(request.request_id or f"gen-{uuid.uuid4().hex}")
        sink.traceparent = trace_call(self._tracing, context, "Generate", lambda: sink.outcome)
        identity: Identity | None = None
        try:
            identity = identity_of(self._gate, context)
            if request.HasField("resume"):
                request, sink.journal = await find_stream(self._streams, request, identity)
            async with self._refusals.counting(identity, request.ByteSize()):
                await self._resolve(identity, request.adapter or request.model)
                model = self._model_of(request, identity)
                generation, admitted = await self._start(model, request, sink, context, identity)
        except ServiceError as error:
            name_fields(error)
            sink.on_error(error)
            line.write(sink.request_id, sink.outcome, identity)
            sink.end_journal()
            raise
        # A call that is cancelled during a write leaves its iterator to the garbage collector.
        context.add_done_callback(lambda _: generation.abort())  # type: ignore[arg-type]
        context.add_done_callback(lambda _: sink.end_journal())  # type: ignore[arg-type]
        admitted.close()
        try:
            if admitted.limit_headers:
                await context.send_initial_metadata(tuple(admitted.limit_headers.items()))
            async for response in sink.responses(generation):
                yield response
        finally:
            generation.abort()
            sink.end_journal()
            line.write(sink.request_id, sink.outcome, identity)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        models = [
            _info_of(name, model)
            for model in allowed_models(self._catalog, identity_of(self._gate, context))
            for name in model.names
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        identity, num_bytes = identity_of(self._gate, context), request.ByteSize()
        try:
            async with self._refusals.counting(identity, num_bytes):
                await self._resolve(identity, request.model)
                model = allowed_model(self._catalog, identity, request.model)
                token_ids = (await self._encode(model, request)).token_ids
        except ServiceError as error:
            name_fields(error)
            raise
        self._refusals.count_response(identity, 200, num_bytes, admitted=False)
        max_model_len = model.info.max_model_len if model.info is not None else 0
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        identity, num_bytes = identity_of(self._gate, context), request.ByteSize()
        async with self._refusals.counting(identity, num_bytes):
            await self._resolve(identity, request.model)
            model = allowed_model(self._catalog, identity, request.model)
            token_ids = list(request.token_ids)
            model.check_token_ids(token_ids, "token_ids")
            text = await model.tokenizer.decode_async(token_ids)
        self._refusals.count_response(identity, 200, num_bytes, admitted=False)
        return inference_pb2.DetokenizeResponse(text=text)

    @property
    def _conversations(self) -> ConversationStore:
        return self._kept.conversations

    def _identity(self, context: Context) -> Identity:
        return identity_of(self._gate, context)

    async def _resolve(self, identity: Identity, name: str) -> None:
        if self._names is not None:
            await self._names.ensure(identity, name)

    @property
    def _vectors(self) -> VectorCalls:
        if self._vector_calls is None:
            raise Unsupported("this gateway computes no vectors")
        return self._vector_calls

    @property
    def _kept(self) -> ResponseCalls:
        if self._responses is None:
            raise Unsupported("responses are not stored here")
        return self._responses

    async def _start(
        self,
        model: ServedModel,
        request: inference_pb2.GenerateRequest,
        sink: StreamSink,
        context: Context,
        identity: Identity,
    ) -> tuple[Generation, AdmittedGenerator]:
        self._check(request, sink, identity)
        generator = generator_for(request, self._generator, self._catalog, self._limits)
        prompt = await self._encode(model, request)
        if most := request.max_prompt_tokens:
            ids = prompt.token_ids
            prompt = replace(prompt, token_ids=ids[:most] if request.keep_prompt_start else ids[-most:])
        generation = self._generation(model, request, prompt, sink, identity)
        admitted = AdmittedGenerator(
            generator,
            self._gate,
            identity,
            [generation],
            model.require_info().max_model_len,
            running=self._running,
            request_ids=(sink.request_id,),
        )
        try:
            return await admitted.start(generation, sink), admitted
        except BaseException:
            admitted.close()
            raise

    def _check(self, request: inference_pb2.GenerateRequest, sink: StreamSink, identity: Identity) -> None:
        """Raises for what is wrong whatever the prompt is."""
        if not is_request_id(sink.request_id):
            raise InvalidRequest(
                "invalid request_id; give 1 to 256 visible ASCII characters without spaces", field="request_id"
            )
        check_session_name(request.session_id, "session_id")
        if request.worker_id:
            self._admin.check(identity, {}, "worker_id")
        if request.HasField("constraint"):
            check_constraint(request.constraint)

    def _generation(
        self,
        model: ServedModel,
        request: inference_pb2.GenerateRequest,
        prompt: _EncodedPrompt,
        sink: StreamSink,
        identity: Identity,
    ) -> GenerationRequest:
        """Returns the generation of a prompt. Starts its journal, which the sink writes."""
        constraint = request.constraint if request.HasField("constraint") else None
        output_parsing, constraint = _form_of(model, prompt, constraint)
        sampling = _sampling_of(model, request, prompt)
        if request.return_prompt:
            sink.prompt_token_ids = prompt.token_ids
        model.require_info()  # before the journal starts
        sink.journal = sink.journal or begin_stream(self._streams, request, identity)
        if sink.journal is not None:
            sampling.seed = sink.journal.head.seed
        return GenerationRequest(
            request_id=sink.request_id,
            model=model.name,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            stop=request.stop,
            n=request.n or 1,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_ms=request.timeout_ms,
            adapter=request.adapter,
            traceparent=sink.traceparent,
            session_id=session_name(identity.tenant.name, request.session_id),
            worker_id=request.worker_id,
            detokenize=not request.skip_detokenize,
            skip_special_tokens=not request.keep_special_tokens,
            output_parsing=output_parsing,
            constraint=constraint,
            journal=sink.journal,
        )

    def _model_of(self, request: inference_pb2.GenerateRequest, identity: Identity) -> ServedModel:
        """Returns the model, with the adapter if one is given. Raises NotFound."""
        if not request.adapter:
            return allowed_model(self._catalog, identity, request.model)
        try:
            allowed = allowed_model(self._catalog, identity, request.adapter)
        except NotFound as error:
            raise NotFound(f"The adapter `{request.adapter}` does not exist.", field="adapter") from error
        adapted(self._catalog, request.model or allowed.base_name, request.adapter)
        return allowed

    async def _encode(
        self, model: ServedModel, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> _EncodedPrompt:
        whole = isinstance(request, inference_pb2.TokenizeRequest) or bool(request.max_prompt_tokens)
        if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("token_ids"):
            return _EncodedPrompt(list(request.token_ids.token_ids))
        if request.HasField("chat"):
            check_template(request.chat.chat_template or None, self._trust_templates)
            chat = chat_of(request.chat, model.require_info().max_model_len)
            token_ids = await encode_chat(model, chat, whole)
            return _EncodedPrompt(
                token_ids, model.output_parsing(chat.use, token_ids, chat.include_reasoning), chat.use
            )
        if request.HasField("text"):
            bare = isinstance(request, inference_pb2.GenerateRequest) and request.omit_special_tokens
            return _EncodedPrompt(await model.encode_text(request.text, add_special_tokens=not bare, whole=whole))
        raise InvalidRequest("prompt is missing; give chat, text or token_ids", field="prompt")


def _form_of(
    model: ServedModel, prompt: _EncodedPrompt, constraint: types_pb2.Constraint | None
) -> tuple[OutputParsing | None, types_pb2.Constraint | None]:
    """Returns the output's parser, and the client's constraint combined with the tools."""
    output_parsing = prompt.output_parsing
    if constraint is None or output_parsing is None:
        return output_parsing, constraint
    if output_parsing.constraint is not None:
        if prompt.use.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
            return output_parsing, None
        output_parsing = replace(output_parsing, constraint=None)
    return output_parsing, model.constraint(constraint, "constraint", prompt.use, prompt.token_ids)


def _sampling_of(
    model: ServedModel, request: inference_pb2.GenerateRequest, prompt: _EncodedPrompt
) -> types_pb2.SamplingParams:
    """Returns a copy of the request's sampling with the limit of reasoning tokens."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if request.HasField("chat") and request.chat.HasField("thinking_token_budget"):
        budget = request.chat.thinking_token_budget
        limit_reasoning(sampling, model, prompt.token_ids, budget, "chat.thinking_token_budget")
    return sampling


def _info_of(name: str, model: ServedModel) -> types_pb2.ModelInfo:
    """Returns the model's info under one of its names."""
    info = types_pb2.ModelInfo()
    if model.info is not None:
        info.CopyFrom(model.info)
    info.name = name
    return info
