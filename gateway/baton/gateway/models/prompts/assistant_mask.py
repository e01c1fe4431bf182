"""Which tokens of a rendered chat are the assistant's, as its template marks them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]  # of characters


def split_edges(text: str, edge: str) -> tuple[str, list[Span]]:
    """Returns a text without the edges around the assistant's texts, and where these are."""
    pieces, spans, at = text.split(edge), list[Span](), 0
    for index, piece in enumerate(pieces):
        if index % 2 and piece:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans


def mask_of(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Returns 1 for each token, given as its characters, that has one of a span; otherwise 0. Both are in order."""
    mask, waiting = [], list(reversed(spans))
    for begin, end in offsets:
        while waiting and waiting[-1][1] <= begin:
            waiting.pop()
        mask.append(int(bool(waiting) and begin < end and end > waiting[-1][0]))
    return mask
