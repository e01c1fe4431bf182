"""Lets an output begin with given tokens: `"vllm_xargs": {"forced_prefix": [token ids]}`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from baton.worker.core import ExtraValue, Int32
from baton.worker.sampling.processors.interface import LogitsProcessor, Rows


class ForcedPrefix(LogitsProcessor):
    """Forbids every token but the next one of the prefix. Needs only the number of output tokens, so it never waits."""

    arguments = ("forced_prefix",)
    on_device = True

    def new_row(self, arguments: Mapping[str, ExtraValue], prompt_token_ids: Int32) -> tuple[int, ...]:
        """Returns the token ids that the output must begin with. Raises ValueError for others than token ids."""
        given = arguments["forced_prefix"]
        values = given if isinstance(given, tuple) else (given,)
        prefix = tuple(value for value in values if isinstance(value, int) and 0 <= value < self.context.vocab_size)
        if len(prefix) < len(values):
            raise ValueError(f"give token ids from 0 to {self.context.vocab_size - 1}")
        return prefix

    def apply(self, logits: Tensor, rows: Rows) -> None:
        for row, (prefix, count) in enumerate(zip(rows.states, rows.num_output_tokens, strict=True)):
            if count < len(prefix):
                logits[row].fill_(float("-inf"))
                logits[row, prefix[count]] = 0.0
