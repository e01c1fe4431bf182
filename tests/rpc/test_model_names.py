"""A model without a name gets the same one from every service."""

from pathlib import Path

import pytest

from baton.rpc.model_names import default_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/name", "name"),
        ("/models/llama-8b/", "llama-8b"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("org/name-GGUF:model-Q4_K_M.gguf", "model-Q4_K_M"),
        ("org/name:quants/model-00001-of-00003.gguf", "model"),
        ("storyteller-7m", "storyteller-7m"),
        ("", ""),
    ],
)
def test_the_default_name_is_the_end_of_the_models(model: str, name: str) -> None:
    assert default_name(model) == name


def test_a_folder_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "current").symlink_to("llama-8b")
    monkeypatch.chdir(tmp_path / "llama-8b")
    assert default_name(".") == default_name(str(tmp_path / "current")) == "llama-8b"
