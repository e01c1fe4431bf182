"""What the contract's messages say of one request: its end and its log-probabilities."""

from __future__ import annotations

import logging

from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import FinishReason, TokenLogprobs, TransferTimes
from baton.worker.requests.outputs import Finish
from baton.worker.scheduling.background import is_background

_log = logging.getLogger(__name__)

_NO_TRANSFER = TransferTimes(0, 0.0, 0.0)
_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}
_LOWEST_LOGPROB = -9999.0  # stands for minus infinity


def finish_message(slot: int, finish: Finish, num_prefill_cached_tokens: int) -> worker_pb2.SlotFinish:
    """Returns the contract's message of a request's end."""
    transfer = finish.request.transfer or _NO_TRANSFER
    return worker_pb2.SlotFinish(
        slot=slot,
        reason=_REASONS[finish.reason],
        stop_token_id=finish.stop_token_id,
        num_cached_tokens=finish.num_cached_tokens,
        num_transferred_tokens=finish.num_transferred_tokens,
        num_prefill_cached_tokens=num_prefill_cached_tokens,
        num_preemptions=finish.num_preemptions,
        queue_us=round(finish.queue_seconds * 1e6),
        prefill_us=round(finish.prefill_seconds * 1e6),
        transfer_us=round(transfer.seconds * 1e6),
        transfer_exposed_us=round(transfer.exposed_seconds * 1e6),
        num_transfer_bytes=transfer.num_bytes,
    )


def logprobs_message(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    """Returns the contract's message of one token's log-probabilities."""
    return types_pb2.TokenLogprobs(
        logprob=max(logprobs.logprob, _LOWEST_LOGPROB),
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=[max(one, _LOWEST_LOGPROB) for one in logprobs.top_logprobs],
    )


def log_finish(finish: Finish) -> None:
    """Logs how a request ended. Those of background requests, such as lines of batches, are details."""
    request = finish.request
    level = logging.DEBUG if is_background(request.priority) else logging.INFO
    if not _log.isEnabledFor(level):
        return
    facts = {
        "request_id": request.request_id,
        "reason": finish.reason.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": len(request.token_ids) - request.num_prompt_tokens,
        "num_cached_tokens": finish.num_cached_tokens,
        "num_transferred_tokens": finish.num_transferred_tokens,
    }
    _log.log(level, "request finished", extra=facts)
