"""The masks of a step's rows behind the tokens that they got in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.worker.core import Int32, Int64, MaskGuide, MaskWalk, TokenMasks


class MaskedRows:
    """The rows under a mask, as indices into the plan's rows with `samples`."""

    def __init__(self, masks: TokenMasks | None) -> None:
        """`masks`: those of the first tokens."""
        self._guides: dict[int, MaskGuide | None] = {}
        if masks is not None:
            guides = masks.guides or (None,) * len(masks.indices)
            self._guides = dict(zip(masks.indices.tolist(), guides, strict=True))
        self._walks: dict[int, MaskWalk] = {}

    def behind(self, drawn: Int64, last_token: Callable[[int], int]) -> tuple[Int64, TokenMasks | None]:
        """Returns which of these rows may get another token, and the masks of some of them.

        `last_token`: what each of them got last, which was guessed.
        """
        if not self._guides:
            return drawn, None
        kept: list[int] = []
        found: dict[int, Int32] = {}
        for which in drawn.tolist():
            if which in self._guides:
                mask = self._follow(which, last_token(which))
                if mask is None:
                    continue
                found[which] = mask
            kept.append(which)
        rows = np.array(kept, np.int64)
        return rows, TokenMasks(np.array(list(found), np.int32), np.stack(list(found.values()))) if found else None

    def _follow(self, which: int, token_id: int) -> Int32 | None:
        if which not in self._walks:
            guide = self._guides[which]
            if guide is None:
                return None
            self._walks[which] = guide.walk()
        return self._walks[which].follow(token_id)
