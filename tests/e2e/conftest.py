"""What several end-to-end tests compare with."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from load import story_prompts
from stack import start_stack


@pytest.fixture
def abort_seconds() -> float:
    """How long clients come and go; BATON_TEST_ABORT_SECONDS=600 is the long form."""
    return float(os.environ.get("BATON_TEST_ABORT_SECONDS", "20"))


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return story_prompts(32)


@pytest.fixture(scope="session")
def expected_texts(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> list[str]:
    """The greedy answers of one worker that does everything, one request after the other."""
    folder: Path = tmp_path_factory.mktemp("single")
    with ExitStack() as cleanup:
        stack = start_stack(folder, cleanup, prefill_workers=0, threads=1)
        answers = [stack.chat(prompt, temperature=0, max_tokens=48) for prompt in prompts]
    return [answer["choices"][0]["message"]["content"] for answer in answers]
