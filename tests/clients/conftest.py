"""Fixtures of client tests: running services, a scripted model, and programs that report a client's results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from clients import minilm, processes
from clients.environments import NodeEnvironment, PythonEnvironment
from clients.scripted_model import ScriptedModel, scripted_model
from support.processes.stack import MODEL_NAME, Stack, start_stack

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


@pytest.fixture(scope="session")
def minilm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minilm.unpack(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="session")
def minilm_stack(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Running services for a model that embeds."""
    with ExitStack() as cleanup:
        yield start_stack(
            tmp_path_factory.mktemp("logs"), cleanup,
            model=str(minilm_folder), served_model_name=(minilm.NAME,), prefill_workers=0, decode_workers=1, threads=1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def report(tandem_stack: Stack, scripted: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Runs a program in an environment: `report(environment, "a_program.py")` is the JSON that it prints last."""

    def run(environment: PythonEnvironment | NodeEnvironment, program: str, **environ: str) -> dict[str, Any]:
        words = (tandem_stack.url, MODEL_NAME, scripted.url)
        return reported(environment, program, words, tmp_path_factory.mktemp("home"), environ)

    return run


@pytest.fixture(scope="module")
def minilm_report(minilm_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """As `report`, for clients that embed: the program gets the URL, the model's name, texts and questions."""

    def run(environment: PythonEnvironment | NodeEnvironment, program: str, **environ: str) -> dict[str, Any]:
        words = (minilm_stack.url, minilm.NAME, json.dumps(minilm.TEXTS), json.dumps(minilm.QUESTIONS))
        return reported(environment, program, words, tmp_path_factory.mktemp("home"), environ)

    return run


def reported(
    environment: PythonEnvironment | NodeEnvironment,
    program: str,
    words: Sequence[str],
    home: Path,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the JSON that a program prints last."""
    script = PROGRAMS / program
    if isinstance(environment, NodeEnvironment):
        # A module finds packages beside itself.
        copy = environment.folder() / program
        copy.write_text(script.read_text())
        command: list[str | Path] = [environment.node(), copy]
    else:
        command = [environment.python(), script]
    output = processes.run([*command, *words], home, processes.client_environ(home, **environ), PROGRAM_SECONDS)
    found = json.loads(output.splitlines()[-1])
    assert isinstance(found, dict)
    return found
