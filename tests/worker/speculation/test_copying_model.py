"""The model that copies continues its last four tokens with what followed them before, and n-grams guess that."""

from __future__ import annotations

import random
from pathlib import Path

from support.engine.copying_model import write_copying_model
from support.engine.spec_runs import make_engine, make_executor, run

from baton.worker.core import Request, SamplingParams, StopConditions


def prompts(count: int) -> list[list[int]]:
    """Returns texts of random tokens, some of them often, followed by their beginnings."""
    rng, found = random.Random(4), []
    for _ in range(count):
        text = [rng.choice((rng.randrange(5, 40), rng.randrange(5, 4096))) for _ in range(rng.randint(60, 700))]
        found.append([1, *text, *text[:6]])
    return found


def test_it_copies_and_ngrams_guess_nearly_all(tmp_path: Path) -> None:
    folder = tmp_path / "copying"
    write_copying_model(folder)
    texts = prompts(6)
    requests = [
        Request(f"r{index}", text, len(text), SamplingParams(temperature=0.0), StopConditions(50), bytes(16))
        for index, text in enumerate(texts)
    ]
    engine = make_engine(make_executor("ngram", 8, dtype="bfloat16", model=folder), budget=2048)
    found = run(engine, requests)
    for index, text in enumerate(texts):
        output = [token_id for token_id, _ in found[f"r{index}"].tokens]
        assert output == text[7 : 7 + len(output)]
    counters = engine.counters()
    assert counters.num_accepted_tokens > 0.7 * counters.num_output_tokens
