"""The models of these tests, and the mix of the requests that were compared, at the end of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.engine.mtp_models import write_mtp_model
from support.engine.spec_models import write_first_layers, write_small_head, write_small_model

MIX = "speculation mix"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with the sample model's tokenizer."""
    folder = tmp_path_factory.mktemp("small") / "model"
    write_small_model(folder)
    return folder


@pytest.fixture(scope="session")
def guessers(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What guesses for the small model, by the method."""
    folder = tmp_path_factory.mktemp("guessers")
    write_first_layers(folder / "draft", small, 2)
    write_small_head(folder / "head")
    return {"draft_model": folder / "draft", "eagle3": folder / "head"}


@pytest.fixture(scope="session")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with latent attention, experts and an MTP layer that often guesses right."""
    folder = tmp_path_factory.mktemp("with_mtp") / "model"
    write_mtp_model(folder, agreeing=True)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what the tests recorded as MIX, summed by method."""
    sums: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == MIX and report.when == "call":
                method, counts = value
                sums.setdefault(method, Counter()).update(counts)
    for method, counts in sums.items():
        mix = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        terminalreporter.write_line(f"{method}: {mix}")
