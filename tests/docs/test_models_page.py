"""The page of models has every architecture, and the tests that it names are there and are of that architecture."""

from __future__ import annotations

from pathlib import Path

import models_page
import pytest
import torch
from support.engine import encoder_models, gpu_engines, tiny_models

from baton.model_folder.gguf.architectures import ARCHITECTURES
from baton.worker.models.supported.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_architecture():
    page = models_page.models_page(ROOT)
    for family in FAMILIES.values():
        assert f"| `{family.architecture}`" in page, family.architecture
        assert family.former_name in page


def test_the_page_has_every_architecture_of_gguf_files():
    page = models_page.models_page(ROOT)
    for name, several in ARCHITECTURES.items():
        assert f"| `{name}` | {', '.join(f'`{one.architecture}`' for one in several)} |" in page
        assert all(one.architecture in FAMILIES for one in several)
    assert "def test_a_file_runs_as_the_model" in (ROOT / models_page.GGUF_TEST).read_text()


def test_every_architecture_is_compared_with_transformers():
    rows = models_page.rows_by_architecture(ROOT, models_page.CPU_ROWS + models_page.ENCODER_ROWS)
    assert [architecture for architecture in FAMILIES if not rows.get(architecture)] == []


@pytest.mark.parametrize(
    ("test", "sources", "models"),
    [
        (models_page.CPU_TEST, models_page.CPU_ROWS, tiny_models.MODELS),
        (models_page.ENCODER_TEST, models_page.ENCODER_ROWS, encoder_models.MAKERS),
        (models_page.GPU_TEST, models_page.GPU_ROWS, gpu_engines.MODELS),
    ],
)
def test_the_rows_are_parameters_of_the_named_test_and_of_their_architecture(test, sources, models):
    text = (ROOT / test).read_text()
    assert "equals_transformers(" in text or "equal_transformers(" in text or "are_those_of_transformers(" in text
    found = models_page.rows_by_architecture(ROOT, sources)
    assert {row for rows in found.values() for row in rows} == set(models)
    for architecture, rows in found.items():
        for row in rows:
            with torch.device("meta"):
                assert type(models[row]()).__name__ == architecture, row
