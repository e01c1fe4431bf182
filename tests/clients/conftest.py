"""Fixtures of client tests: running services, a scripted model, and programs that report a client's results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import processes
from clients.environments import NodeEnvironment, PythonEnvironment
from clients.scripted_model import ScriptedModel, scripted_model
from support.processes.stack import MODEL_NAME, Stack

PROGRAMS = Path(__file__).parent / "programs"
PROMPT = "Tell me a story about a dog and a river."
NUM_TOKENS = 24
PROGRAM_SECONDS = 100

Report = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def story(tandem_stack: Stack) -> str:
    """The first tokens of the model's greedy answer, which every client must get."""
    answer = tandem_stack.chat(PROMPT, temperature=0, max_tokens=NUM_TOKENS)
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedModel]:
    with scripted_model(tmp_path_factory.mktemp("scripted")) as model:
        yield model


@pytest.fixture(scope="module")
def report(tandem_stack: Stack, scripted: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Runs a program in an environment: `report(environment, "a_program.py")` is the JSON that it prints last."""

    def run(environment: PythonEnvironment | NodeEnvironment, program: str, **environ: str) -> dict[str, Any]:
        home = tmp_path_factory.mktemp("home")
        script = PROGRAMS / program
        if isinstance(environment, NodeEnvironment):
            # A module finds packages beside itself.
            copy = environment.folder() / program
            copy.write_text(script.read_text())
            words: list[str | Path] = [environment.node(), copy]
        else:
            words = [environment.python(), script]
        words += [tandem_stack.url, MODEL_NAME, scripted.url]
        output = processes.run(words, home, processes.client_environ(home, **environ), PROGRAM_SECONDS)
        found = json.loads(output.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    return run
