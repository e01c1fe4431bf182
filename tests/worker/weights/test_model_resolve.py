"""What an operator calls a model becomes a folder, or a clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest

from baton.rpc.errors import InvalidRequest, Unavailable
from baton.worker.weights.resolve import resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/nowhere/to/be/found", "./nowhere", "nowhere", "a/b/c", ""])
def test_invalid_folders_and_hub_ids_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="no such folder; it must be a folder in Hugging Face form, or a hub id"):
        resolve_model(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(InvalidRequest, match="is a file; it must be a folder"):
        resolve_model(str(path))


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("some-org/some-model") == tmp_path
    assert asked == ["some-org/some-model"]


def test_an_unreachable_hub_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="the hub cannot be reached"):
        resolve_model("some-org/some-model-that-nobody-cached")


def test_without_the_hub_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'baton-inference\[hub\]'"):
        resolve_model("some-org/some-model")
