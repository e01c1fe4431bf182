"""The masks behind guessed tokens, by a copy of the request's matcher, which wrong guesses do not change."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher

from baton.worker.core import Int32
from baton.worker.sampling.grammar.added_tokens import AddedTokens

# Of one mask. The step waits for it, so a grammar with slower ones goes on without guesses from here.
_MAX_SECONDS = 0.001


class MatchWalk:
    """Implements MaskWalk. Ends where the answer may be complete, or where a token needs more than the matcher."""

    def __init__(
        self, matcher: LLMatcher | None, num_words: int, added: AddedTokens, narrowed: Callable[[Int32, int], Int32]
    ) -> None:
        """`matcher`: a copy, with masks of `num_words`; None: nothing is known behind the next token.

        `narrowed`: a mask of the matcher, after so many further tokens, without what the request's parameters forbid.
        """
        self._matcher = matcher
        self._num_words = num_words
        self._added = added
        self._narrowed = narrowed
        self._num_followed = 0

    def follow(self, token_id: int) -> Int32 | None:
        mask = None if self._matcher is None else self._mask_behind(self._matcher, token_id)
        if mask is None:
            self._matcher = None
        return mask

    def _mask_behind(self, matcher: LLMatcher, token_id: int) -> Int32 | None:
        began = time.thread_time()
        if token_id in self._added.in_texts or not matcher.consume_token(token_id) or matcher.is_stopped():
            return None
        self._num_followed += 1
        words = np.empty(self._num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # Some ends are found only by computing the mask.
        if matcher.is_error() or matcher.is_stopped() or self._added.spelled(matcher, words):
            return None
        mask = self._narrowed(words, self._num_followed)
        return mask if mask.any() and time.thread_time() - began <= _MAX_SECONDS else None
