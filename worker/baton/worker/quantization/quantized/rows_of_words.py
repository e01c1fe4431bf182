"""Integers of 4 bits that a checkpoint packs along rows in the order of AWQ, as words along columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from baton.worker.quantization.base import Finish, LinearShape, Params, Source
from baton.worker.quantization.quantized.grouped import WORD, Grouped, Packing, words_of
from baton.worker.quantization.quantized.method import parts_of

_BITS = 4
_PER_WORD = WORD // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's integers, for its rows: the even ones come first
_VALUES_AT_ONCE = 1 << 22


class RowsOfWords(Grouped):
    """`NAME.qweight` [in, out / 8]. Words of 8 rows and as many columns hold the same integers either way: a load
    reads the file's words into the parameter, and exchanges rows and columns of each such square in place."""

    def __init__(self, packing: Packing, ending: str) -> None:
        super().__init__(packing)
        self._ending = ending

    def refusal(self, shape: LinearShape) -> str:
        for part in shape.parts:
            if part.rows % _PER_WORD:
                return f"{part.rows} output features are no multiple of the {_PER_WORD} that a word packs"
        return super().refusal(shape)

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills the rows of each part with the file's words, which the finish packs again."""
        finish = super().load(params, shape, self._without_weight(source))
        for part, rows in parts_of(shape):
            words = _as_rows(params["weight"][rows])
            source(part.name + self._ending, (shape.in_features, part.rows // _PER_WORD), words.t())
        return partial(_repack, params, finish)

    def _without_weight(self, source: Source) -> Source:
        def others(name: str, size: tuple[int, ...], into: Tensor) -> None:
            if not name.endswith(self._ending):
                source(name, size, into)

        return others


def _repack(params: Params, finish: Finish) -> None:
    for weight in _runs(params["weight"]):
        weight.copy_(words_of(_rows_of(_as_rows(weight)), _BITS))
    params["zero"].copy_(_in_order(params["zero"]))
    finish()


def _runs(weight: Tensor) -> Iterator[Tensor]:
    """Yields some rows at a time, whole words of them."""
    step = max(1, _VALUES_AT_ONCE // (weight.shape[1] * _PER_WORD * _PER_WORD)) * _PER_WORD
    yield from weight.split(step)  # type: ignore[no-untyped-call]


def _as_rows(weight: Tensor) -> Tensor:
    """Returns the memory of words [rows, columns / 8] as words [rows / 8, columns]."""
    return weight.view(len(weight) // _PER_WORD, -1)


def _rows_of(words: Tensor) -> Tensor:
    """Returns the integers [rows, columns] of words [rows / 8, columns]."""
    return torch.stack([words >> _BITS * place & 15 for place in _PLACES], dim=1).flatten(0, 1)


def _in_order(words: Tensor) -> Tensor:
    """Returns words whose first row is in the lowest bits."""
    ordered = torch.zeros_like(words)
    for row, place in enumerate(_PLACES):
        ordered |= (words >> _BITS * place & 15) << _BITS * row
    return ordered
