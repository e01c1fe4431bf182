"""A request's progress in its grammar, and the mask of its next token. Knows no threads and no engine."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.worker.core import Constraint, Int32, Request
from baton.worker.sampling.grammar.compilation.compile import problem_of, refusal
from baton.worker.sampling.grammar.compilation.wording import SIMPLER
from baton.worker.sampling.grammar.matching.cpu_allowance import CpuAllowance
from baton.worker.sampling.grammar.matching.walk import MatchWalk
from baton.worker.sampling.grammar.translation.constraint import field_of
from baton.worker.sampling.grammar.vocabulary import Vocabulary, mask_of

# The library's messages for limits that a token reaches, and for a token that is not in the grammar.
_LIMITS = ("lexer error", "parser error")
_NOT_IN_GRAMMAR = "satisfy the grammar"
_TAKEN_AT_ONCE = 32  # output tokens between measurements of their cost


class Lane(enum.Enum):
    """The lane of a match, by the cost of its masks. Only matches of one lane share batches and delay each other."""

    PLAIN = "plain"  # known to be cheap
    OTHER = "other"
    SLOW = "slow"  # was slow alone in a batch


class GrammarMatch:
    """One request's progress in its grammar. Until it is `ready`, another thread may write to it.

    `mask` [ceil(vocab_size / 32)] has the tokens that may come next. `ended` is set when the answer is complete, and
    `error` when the request cannot continue.
    """

    def __init__(self, request: Request, owner: object, allowance: CpuAllowance) -> None:
        assert request.constraint is not None, f"request {request.request_id} has no constraint"
        self.owner = owner
        self.ready = False
        self.ended = False
        self.error: ServiceError | None = None
        self.mask: Int32 = np.empty(0, np.int32)
        self.constraint: Constraint = request.constraint
        self.namespace = request.cache_namespace
        self.payer = request.tenant.encode() or request.cache_namespace  # charged for its compilation and its memory
        self.lane = Lane.PLAIN
        self.abandoned = False  # the request has ended; written by the engine's thread while others read
        self.ending: ServiceError | None = None  # the error of its next token; written by any thread
        self._sampling = request.sampling
        self._num_prompt_tokens = request.num_prompt_tokens
        self._token_ids = request.token_ids  # read by `open` only
        self._num_outputs = 0
        self._reasoning_end = list(request.constraint.reasoning_end_token_ids)
        self._reasoning_start = request.constraint.reasoning_start_token_id if self._reasoning_end else None
        self._tail: list[int] = []  # last tokens of the reasoning, as many as in its end
        self._spelled: tuple[int, ...] = ()  # the only next tokens, if they spell an added token
        self._allowance = allowance
        self._matcher: LLMatcher | None = None

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher; None before `open`, during reasoning, and while reasoning may begin."""
        return None if self._reasoning_end else self._matcher

    @property
    def num_words(self) -> int:
        """Words of the library's masks. Known after `open`."""
        return self._num_words

    def open(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        """Sets the matcher and advances it by the output that the request came with. Raises InvalidRequest."""
        self._matcher = matcher
        self._prepare(vocabulary)
        output = self._token_ids[self._num_prompt_tokens :]
        for first in range(0, len(output), _TAKEN_AT_ONCE):
            taken, began = output[first : first + _TAKEN_AT_ONCE], time.thread_time()
            if not self.consume(taken):
                raise self.limit_error() or InvalidRequest(
                    f"the {len(output)} output tokens that the request came with are not what its constraint allows",
                    field="resume.output_token_ids",
                )
            self.spend(time.thread_time() - began, len(taken))
            if self.error is not None:
                raise self.error

    def spend(self, cpu_seconds: float, num_tokens: int = 1) -> None:
        """Adds the CPU time of some tokens. Sets `error` if the request exceeds its allowance."""
        if self._allowance.spend(cpu_seconds, num_tokens) or self.error is not None or self.ended:
            return
        field, most = field_of(self.constraint), 1000 * self._allowance.seconds
        self.error = InvalidRequest(
            f"{field}: finding the tokens that it allows next takes more than {most:g} ms of CPU time: it is too"
            f" ambiguous or too large; {SIMPLER}",
            field=field,
        )

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Advances by tokens of the output. Returns False if the grammar does not allow them."""
        self._num_outputs += len(token_ids)
        rest = self._after_reasoning(token_ids)
        matcher = self._matcher
        assert matcher is not None, "consume before open"
        if self._added.in_texts.isdisjoint(rest):
            return not rest or (not matcher.is_stopped() and bool(matcher.consume_tokens(rest)))
        return all(
            not matcher.is_stopped() and bool(matcher.consume_tokens([*self._added.as_taken(matcher, token_id)]))
            for token_id in rest
        )

    def limit_error(self) -> InvalidRequest | None:
        """Returns the error if the matcher reached a limit while it consumed a token."""
        problem = problem_of(self._matcher) if self._matcher is not None else ""
        met = problem.lower().startswith(_LIMITS) and _NOT_IN_GRAMMAR not in problem
        return refusal(self.constraint, problem) if met else None

    def walk(self) -> MatchWalk:
        """Begins a walk behind the output so far. Only while `ready`."""
        walks = self.lane is not Lane.SLOW and not self._spelled and self.ending is None
        matcher = self.matcher if walks else None
        return MatchWalk(
            None if matcher is None else matcher.deep_copy(), self._num_words, self._added, self._narrowed_after
        )

    def _narrowed_after(self, words: Int32, num_further: int) -> Int32:
        return self._narrowed(words[: len(self._permitted)] & self._permitted, self._num_outputs + num_further)

    def is_spelled(self, token_id: int) -> bool:
        """Returns whether the matcher consumes the token's text instead of the token."""
        return token_id in self._spelled and token_id in self._added.in_texts

    def count(self) -> None:
        """Counts an output token that `matcher` has already consumed."""
        self._num_outputs += 1

    def fill(self, words: Int32 | None = None) -> None:
        """Updates mask, ended and error. `words` is the matcher's mask if it is already computed."""
        if self._reasoning_end and self._reasoning_start is None:
            self._narrow(self._reasoning_mask)
            return
        matcher = self._matcher
        assert matcher is not None, "fill before open"
        if words is None and not matcher.is_stopped():
            words = np.empty(self._num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._spelled = ()
        # Some ends are found only by computing the mask.
        if matcher.is_error():
            self.error = refusal(self.constraint, problem_of(matcher))
        elif matcher.is_stopped() or words is None:
            self.ended = True
        else:
            self._spelled = self._added.spelled(matcher, words)
            if self._spelled:
                words = mask_of(self._spelled, 32 * len(words))
            self._narrow((words[: len(self._permitted)] | self._start_mask) & self._permitted)

    def _prepare(self, vocabulary: Vocabulary) -> None:
        sampling, vocab_size = self._sampling, len(vocabulary.every_token) * 32
        self._num_words = vocabulary.num_words
        self._added = vocabulary.added
        self._permitted = vocabulary.every_token
        if sampling.allowed_token_ids:
            self._permitted = self._permitted & mask_of(sampling.allowed_token_ids, vocab_size)
        self._suppressed = mask_of(sampling.suppressed_token_ids if sampling.min_tokens else (), vocab_size)
        start = () if self._reasoning_start is None else (self._reasoning_start,)
        self._start_mask = mask_of(start, vocab_size)
        # An end of sequence during reasoning would leave the client without an answer.
        ends = () if self.constraint.may_end_in_reasoning else vocabulary.eos_token_ids
        self._reasoning_mask = self._permitted & ~mask_of(ends, vocab_size)

    def _narrow(self, mask: Int32) -> None:
        """Sets the mask, without tokens that the request's parameters forbid."""
        mask = self.mask = self._narrowed(mask, self._num_outputs)
        if not mask.any():
            self.error = InvalidRequest(
                f"after {self._num_outputs} output tokens no token is left that the constraint, allowed_token_ids and"
                " min_tokens all allow",
                field="constraint",
            )

    def _narrowed(self, mask: Int32, num_outputs: int) -> Int32:
        return mask & ~self._suppressed if num_outputs < self._sampling.min_tokens else mask

    def _after_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens after the reasoning, which the grammar applies to."""
        if self._reasoning_start is not None and token_ids:
            if token_ids[0] != self._reasoning_start:
                self._reasoning_end = []
            self._reasoning_start = None
            self._start_mask = np.zeros_like(self._start_mask)
        if not self._reasoning_end:
            return list(token_ids)
        length = len(self._reasoning_end)
        for index, token_id in enumerate(token_ids):
            self._tail = [*self._tail, token_id][-length:]
            if self._tail == self._reasoning_end:
                self._reasoning_end = []
                return list(token_ids[index + 1 :])
        return []
