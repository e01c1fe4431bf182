"""The requests of a chaos run: short, of a few sessions that share prefixes, so that a small cache is always in use."""

from __future__ import annotations

import random
from collections.abc import Iterator

from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import Turn, Workload

_NUM_KINDS = 6


def _sessions(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    kinds = [texts.start(texts.new_content(), draws.randint(100, 500)) for _ in range(_NUM_KINDS)]
    while True:
        text = texts.extend(draws.choice(kinds), texts.new_content(), draws.randint(20, 150))
        turns: list[Turn] = []
        offset = 0.0
        for _ in range(draws.randint(1, 5)):
            num_output, output = draws.randint(4, 40), texts.new_content()
            turns.append(Turn(offset, text, num_output, output))
            text = texts.extend(texts.extend(text, output, num_output), texts.new_content(), draws.randint(5, 120))
            offset += 0.02 * num_output + draws.uniform(0.1, 0.8)
        yield turns


TRAFFIC = Workload("chaos", "short requests of sessions that share prefixes", _sessions, 3.0, past_seconds=5.0)
