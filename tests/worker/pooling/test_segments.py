"""The segments of a step's hidden states: those of a plain loop over its rows, for any mix of texts and chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.worker.core import HeadKind, StepPlan
from baton.worker.executors.cuda.pooling.segments import Text, segments_of


def plan_of(rows: list[int], counts: list[int], before: list[int], ends: list[bool]) -> StepPlan:
    return StepPlan(
        1,
        rows=np.array(rows, np.int64),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens=np.array(before, np.int32),
        samples=np.array(ends, np.bool_),
        head=HeadKind.POOL,
    )


def by_a_loop(plan: StepPlan, texts: list[Text], keeps: bool) -> tuple[list[list[int]], list[tuple[Any, ...]]]:
    """Returns the columns of each vector, and the owners as (place, stop, ends)."""
    read: list[list[int]] = []
    unread: list[list[int]] = []
    owners = []
    first = 0
    for place, text in enumerate(texts):
        count, before = int(plan.num_scheduled_tokens[place]), int(plan.num_computed_tokens[place])
        ends, asked = bool(plan.samples[place]), [text.num_kept, int(text.activation)]
        slot = -1 if not keeps or (ends and not before) else int(plan.rows[place])
        if text.by_token:
            read += [[first + index, 1, -1, 0, *asked] for index in range(count)]
        elif ends:
            read.append([first, count, slot, before, *asked])
        elif keeps:
            unread.append([first, count, slot, before, *asked])
        if text.by_token or ends:
            owners.append((place, len(read), ends))
        first += count
    return read + unread, owners


@pytest.mark.parametrize("keeps", [True, False])
def test_segments_are_those_of_a_loop_over_rows(keeps: bool) -> None:
    random = np.random.default_rng(0)
    for num_rows in (1, 2, 7, 30):
        for _ in range(20):
            rows = random.permutation(64)[:num_rows].tolist()
            before = random.integers(0, 2, num_rows) * random.integers(0, 9, num_rows)
            ends = random.random(num_rows) < random.choice([0.0, 0.5, 1.0])
            plan = plan_of(rows, random.integers(1, 9, num_rows).tolist(), before.tolist(), ends.tolist())
            kinds = random.random((num_rows, 2)) < random.choice([0.0, 0.5])
            texts = [Text(bool(kind), int(random.integers(1, 9)), bool(applies)) for kind, applies in kinds]
            columns, asked, owners = segments_of(plan, texts, keeps=keeps)
            expected, expected_owners = by_a_loop(plan, texts, keeps)
            assert np.concatenate((columns, asked)).T.tolist() == expected
            assert list(zip(owners.places, owners.stops, owners.ends, strict=True)) == expected_owners
            assert all(text is texts[place] for text, place in zip(owners.texts, owners.places, strict=True))
            assert owners.num_vectors == (expected_owners[-1][1] if expected_owners else 0)
