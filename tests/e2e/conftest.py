"""What several end-to-end tests compare with."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes.load import story_prompts
from support.processes.stack import start_stack


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
