"""The messages to routers and workers about one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.core import GenerationRequest
from baton.gateway.generation.hashed_prompt import HashedPrompt
from baton.gateway.generation.output.choice import Choice
from baton.gateway.models.sampling import ResolvedRequest, seed_of_choice
from baton.v1 import router_pb2, types_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class RequestMessages:
    """Builds the messages about one request. `timeout_ms` is the time that is left; 0: no limit."""

    request: GenerationRequest
    resolved: ResolvedRequest
    prompt: HashedPrompt
    model: str
    num_choices: int
    tokens_per_message: int = 1  # tokens that a worker sends together

    def place(self, choices: Sequence[Choice], excluded: Sequence[str], timeout_ms: int) -> router_pb2.PlaceRequest:
        """Returns the request for a placement of these choices on other than the excluded workers."""
        request = self.request
        num_output_tokens = max(len(choice.output_token_ids) for choice in choices)
        return router_pb2.PlaceRequest(
            request_id=request.request_id,
            model=self.model,
            block_hashes=self.prompt.block_hashes,
            num_prompt_tokens=len(self.prompt.token_ids) + num_output_tokens,
            max_tokens=self.resolved.stop.max_tokens - num_output_tokens,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            priority=request.priority,
            adapter=_name(self.prompt.adapter),
            timeout_ms=timeout_ms,
            excluded_worker_ids=excluded,
            num_choices=len(choices),
            session_id=request.session_id,
            worker_id=request.worker_id,
        )

    def submit(self, choice: Choice, placed: router_pb2.PlaceResponse, timeout_ms: int) -> worker_pb2.SubmitRequest:
        """Returns the submission of one choice to its worker, with its output so far; its stream adds the prompt."""
        request = self.request
        submit = worker_pb2.SubmitRequest(
            request_id=request.request_id,
            sampling=self.resolved.sampling,
            stop=self.resolved.stop,
            cache_namespace=self.prompt.namespace,
            priority=request.priority,
            timeout_ms=timeout_ms,
            adapter=_name(self.prompt.adapter),
            adapter_info=self.prompt.adapter,
            tenant=request.tenant,
            traceparent=request.traceparent,
        )
        if self.tokens_per_message > 1 and not choice.may_end_itself:
            submit.tokens_per_message = self.tokens_per_message
        submit.sampling.seed = seed_of_choice(self.resolved.seed, choice.index)
        if self.num_choices > 1:
            submit.request_id = f"{request.request_id}-{choice.index}"
        if choice.prompt_logprobs is None:
            submit.sampling.ClearField("prompt_logprobs")
        # Prefill workers do not transfer the prompt's log-probabilities.
        if placed.HasField("prefill") and choice.prompt_logprobs is None:
            submit.prefill.CopyFrom(placed.prefill)
        if request.output_parsing is not None and request.output_parsing.constraint is not None:
            submit.constraint.CopyFrom(request.output_parsing.constraint)
        elif request.constraint is not None:
            submit.constraint.CopyFrom(request.constraint)
        if choice.output_token_ids:
            submit.resume.output_token_ids.extend(choice.output_token_ids)
        return submit


def _name(adapter: types_pb2.AdapterInfo | None) -> str:
    return "" if adapter is None else adapter.name
