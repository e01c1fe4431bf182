"""What several end-to-end tests compare with."""

from __future__ import annotations

import fcntl
import json
import os
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
    """The greedy answers of one worker that does everything, one request after the other.

    The first of a run's processes asks for them, and the others read its file.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # one for all processes of this run
    kept = folder / "expected_texts.json"
    with (folder / "expected_texts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(_texts_of_one_worker(tmp_path_factory.mktemp("single"), prompts)))
    texts: list[str] = json.loads(kept.read_text())
    return texts


def _texts_of_one_worker(folder: Path, prompts: list[str]) -> list[str]:
    with ExitStack() as cleanup:
        stack = start_stack(folder, cleanup, prefill_workers=0, threads=1)
        answers = [stack.chat(prompt, temperature=0, max_tokens=48) for prompt in prompts]
    return [answer["choices"][0]["message"]["content"] for answer in answers]
