"""Which segments of a step's hidden states become vectors, and whose these are. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64, StepPlan

Vectors = NDArray[np.float32]


@dataclass(slots=True)
class Text:
    """A request in a row of the batch."""

    by_token: bool  # has a vector for each token
    num_kept: int  # first values of its vectors that are kept
    activation: bool
    chunks: list[Vectors] = field(default_factory=list)  # vectors of its tokens, of earlier steps


class Owners(NamedTuple):
    """The texts that get a step's vectors, in the order of the vectors."""

    places: list[int]  # among the plan's rows
    texts: list[Text]
    stops: list[int]  # index after the text's last vector
    ends: list[bool]  # the text ends in this step

    @property
    def num_vectors(self) -> int:
        return self.stops[-1] if self.stops else 0


class Segments(NamedTuple):
    """The segments of a step."""

    columns: Int64  # [4, num_segments], as pick_vectors takes them; vectors without an owner come last
    asked: Int64  # [2, num_segments], as finish_vectors takes it
    owners: Owners


def segments_of(plan: StepPlan, texts: list[Text], *, keeps: bool) -> Segments:
    """Returns the segments of the plan's rows, which belong to `texts`.

    `keeps`: what the chunks of a text add up to is kept by row, so that chunks which do not end it are segments too.
    """
    counts, before = plan.num_scheduled_tokens.astype(np.int64), plan.num_computed_tokens.astype(np.int64)
    by_token = np.array([text.by_token for text in texts], np.bool_)
    num_vectors = np.where(by_token, counts, plan.samples)
    stops = np.cumsum(num_vectors)
    places = num_vectors.nonzero()[0]
    unread = (~by_token & ~plan.samples).nonzero()[0] if keeps else places[:0]
    rows = np.concatenate((np.repeat(np.arange(len(texts)), num_vectors), unread))
    slots = np.where((before == 0) & plan.samples, -1, plan.rows) if keeps else np.full(len(texts), -1)
    columns = np.stack((np.cumsum(counts) - counts, counts, slots, before))[:, rows]
    if by_token.any():
        alone = by_token[rows].nonzero()[0]
        columns[0, alone] += alone - (stops - num_vectors)[rows[alone]]
        columns[1:, alone] = np.array([[1], [-1], [0]])
    asked = np.array([[text.num_kept for text in texts], [text.activation for text in texts]], np.int64)[:, rows]
    owners = Owners(
        places.tolist(),
        [texts[place] for place in places.tolist()],
        stops[places].tolist(),
        plan.samples[places].tolist(),
    )
    return Segments(columns, asked, owners)
