"""The tokens of one request: what it came with as an array, which nobody walks, and what was generated since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class TokenIds(Sequence[int]):
    """A sequence that grows at its end. A slice is a list, `array` the whole."""

    __slots__ = ("generated", "given")

    def __init__(self, given: NDArray[np.int32] | Sequence[int]) -> None:
        self.given: NDArray[np.int32] = np.asarray(given, np.int32)  # never changed
        self.generated: list[int] = []

    def __len__(self) -> int:
        return len(self.given) + len(self.generated)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        num_given = len(self.given)
        if isinstance(index, slice):
            start, stop, step = index.indices(num_given + len(self.generated))
            if step != 1:
                return list(self)[index]
            if start >= num_given:
                return self.generated[start - num_given : max(0, stop - num_given)]
            head: list[int] = self.given[start:stop].tolist()
            return head + self.generated[max(0, start - num_given) : max(0, stop - num_given)]
        if index < 0:
            index += len(self)
            if index < 0:
                raise IndexError(f"there are {len(self)} tokens")
        return int(self.given[index]) if index < num_given else self.generated[index - num_given]

    def __iter__(self) -> Iterator[int]:
        yield from self.given.tolist()
        yield from self.generated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (TokenIds, list, tuple)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({list(self)})"

    def append(self, token_id: int) -> None:
        """One more token was generated."""
        self.generated.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        """More tokens were generated."""
        self.generated.extend(token_ids)

    def array(self, stop: int | None = None) -> NDArray[np.int32]:
        """The first `stop` tokens, or all. Not to be changed: it may be what the request came with."""
        if stop is not None and stop <= len(self.given):
            return self.given[:stop]
        if not self.generated:
            return self.given
        whole = np.concatenate((self.given, np.array(self.generated, np.int32)))
        return whole if stop is None else whole[:stop]
