"""Applies a tenant's limits to a request: reserves before it runs, settles after its end. Used by REST and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.gateway.access.gate import Gate, Permit
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.core import Generation, GenerationRequest, Generator, Sink, Usage
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.serving.request_lists import check_lists
from baton.gateway.serving.running_requests import RunningRequest, RunningRequests
from baton.rpc.errors import NotFound


def allowed_models(catalog: ModelCatalog, identity: Identity) -> list[ServedModel]:
    """Returns the models that the tenant may use, and then the adapters."""
    return [model for model in (*catalog.models(), *catalog.adapters()) if _may_use(identity.tenant, model)]


def allowed_model(catalog: ModelCatalog, identity: Identity, name: str | None) -> ServedModel:
    """Returns the model with this name. Raises NotFound, also for a model that the tenant may not use."""
    model = catalog.get(name or "")
    if not _may_use(identity.tenant, model):
        raise NotFound(f"The model `{name}` does not exist.", field="model")
    return model.for_owner(identity.tenant.cache_owner)


def _may_use(tenant: Tenant, model: ServedModel) -> bool:
    """Returns whether the tenant may use the model. Tenants' lists may contain any of its names."""
    return any(map(tenant.may_use, model.names))


class AdmittedGenerator:
    """Implements Generator for the generations of one request.

    The first start() admits all of them, or raises RateLimited. `on_permit` is called before any runs. The reservation
    is held until every generation has ended and `close` was called.
    """

    def __init__(
        self,
        inner: Generator,
        gate: Gate,
        identity: Identity,
        requests: Sequence[GenerationRequest],
        max_model_len: int,
        on_permit: Callable[[Permit], None] | None = None,
        running: RunningRequests | None = None,
        request_ids: Sequence[str] = (),
    ) -> None:
        self._inner = inner
        self._gate = gate
        self._identity = identity
        self._requests = requests
        self._max_model_len = max_model_len
        self._on_permit = on_permit
        self._running = RunningRequests() if running is None else running
        self._request_ids = request_ids  # the client's names of the request
        self._permit: Permit | None = None
        self._num_open = 1
        self._closed = False
        self._input_tokens = 0
        self._output_tokens = 0

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        self._num_open += 1
        part = _Part(self, self._running.add(self._identity.tenant.name, *self._request_ids))
        try:
            if self._permit is None:
                check_lists(self._requests)
                tenant = self._identity.tenant
                self._permit = await self._gate.admit(
                    self._identity, _cost_of(self._requests, tenant, self._max_model_len)
                )
                if self._on_permit is not None:
                    self._on_permit(self._permit)
            generation = await self._inner.start(_as_tenants(request, self._identity.tenant, part.end), sink)
            part.running.started(generation)
            return generation
        except BaseException:
            part.end(None)
            raise

    @property
    def limit_headers(self) -> dict[str, str]:
        """Returns the tenant's x-ratelimit-* headers; empty before admission or without limits."""
        return self._permit.headers() if self._permit is not None else {}

    def close(self) -> None:
        """Ends the request: no generation is started any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self.part_ended(None)

    def part_ended(self, usage: Usage | None) -> None:
        """Adds the usage of a generation that has ended; None: it used nothing."""
        if usage is not None:
            self._input_tokens += usage.prompt_tokens
            self._output_tokens += usage.completion_tokens
        self._num_open -= 1
        if not self._num_open and self._permit is not None:
            self._permit.settle(TokensUsed(self._input_tokens, self._output_tokens))


class _Part:
    """Reports the end of one generation once."""

    __slots__ = ("_whole", "running")

    def __init__(self, whole: AdmittedGenerator, running: RunningRequest) -> None:
        self._whole: AdmittedGenerator | None = whole
        self.running = running

    def end(self, usage: Usage | None) -> None:
        self.running.end()
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.part_ended(usage)


def tenants_priority(tenant: Tenant, wanted: int) -> int:
    """Returns a request's priority. A client may lower it, but not raise it above its tenant's."""
    priority = tenant.priority + (max(0, wanted) if tenant.name else wanted)
    return min(priority, 2**31 - 1)


def _as_tenants(request: GenerationRequest, tenant: Tenant, on_end: Callable[[Usage], None]) -> GenerationRequest:
    return replace(
        request,
        tenant=tenant.name,
        tenant_salt=tenant.salt,
        tenant_weight=tenant.weight,
        priority=tenants_priority(tenant, request.priority),
        on_end=on_end,
    )


def _cost_of(requests: Sequence[GenerationRequest], tenant: Tenant, max_model_len: int) -> RequestCost:
    """Returns the prompts' tokens and the maximum output, or the tenant's assumption without max_tokens."""
    output = 0
    for request in requests:
        max_output = max(1, max_model_len - len(request.prompt_token_ids))
        stop = request.stop
        wanted = stop.max_tokens if stop.HasField("max_tokens") else _assumed(tenant)
        output += request.n * min(max_output, wanted)
    return RequestCost(sum(len(request.prompt_token_ids) for request in requests), output)


def _assumed(tenant: Tenant) -> int:
    limit = tenant.limits.output_tokens_per_minute
    return min(tenant.assumed_output_tokens, limit) if limit else tenant.assumed_output_tokens
