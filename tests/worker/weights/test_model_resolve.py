"""What an operator calls a model becomes a folder, or a clear error."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import torch
from support.engine.tiny_models import make_model
from support.gguf.files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from baton.rpc.errors import InvalidRequest, NotFound, Unavailable
from baton.worker.models.registry import load_config
from baton.worker.weights.loading import load_model
from baton.worker.weights.resolve import commit_of, resolve_model

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/nowhere/to/be/found", "./nowhere", "nowhere", "a/b/c", ""])
def test_invalid_folders_and_hub_ids_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="no such folder; it must be a folder in Hugging Face form, or a hub id"):
        resolve_model(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(InvalidRequest, match="is a file; it must be a folder"):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["model-q4.gguf", "quants/model-00001-of-00002.gguf"])
def test_a_gguf_file_on_the_hub_is_downloaded_with_all_its_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **SMALL))
    asked: list[str] = []

    def download(hub_id: str, file_name: str, revision: str | None) -> str:
        asked.append(f"{hub_id}:{file_name}@{revision}")
        path = tmp_path / Path(file_name).name
        return str(path if path.exists() else write_gguf(path, model))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    folder = resolve_model(f"some-org/some-model-GGUF:{name}", "v1")
    parts = [name] if "-of-" not in name else [name, name.replace("00001", "00002", 1)]
    assert asked == [f"some-org/some-model-GGUF:{part}@v1" for part in parts]
    assert load_config(folder).vocab_size == 16


@pytest.mark.parametrize("model", ["org/name:model.bin", "org/name:../model.gguf", "org/name:", "name:model.gguf"])
def test_other_files_of_the_hub_are_refused(model: str) -> None:
    with pytest.raises(InvalidRequest, match=r"or a GGUF file like model\.gguf or org/name:model\.gguf"):
        resolve_model(model)


def test_a_revision_of_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("some-org/some-model") == resolve_model("some-org/some-model", "v1.0") == tmp_path
    assert asked == [("some-org/some-model", None), ("some-org/some-model", "v1.0")]


def test_a_revision_that_the_hub_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: object) -> str:
        request = httpx.Request("GET", "https://hub")
        raise huggingface_hub.errors.RevisionNotFoundError("404", response=httpx.Response(404, request=request))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = "has no revision 'v9' on the hub: it must be a branch, a tag or a commit"
    with pytest.raises(NotFound, match=message) as error:
        resolve_model("some-org/some-model", "v9")
    assert error.value.field == "revision"


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"revision=main is of a hub id like org/name, but model .* is a folder"):
        resolve_model(str(tmp_path), "main")


def test_a_folder_of_the_hubs_cache_names_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0123456789abcdef" * 3)[:40]
    snapshot.mkdir(parents=True)
    assert commit_of(snapshot) == snapshot.name
    (tmp_path / "link").symlink_to(snapshot)
    assert commit_of(tmp_path / "link") == snapshot.name
    assert commit_of(tmp_path) == ""


def test_the_log_of_a_load_names_the_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = tmp_path / "snapshots" / ("0123456789abcdef" * 3)[:40]
    make_model("llama", snapshot)
    with caplog.at_level(logging.INFO):
        load_model(str(snapshot), "auto", torch.float32)
    (record,) = (record for record in caplog.records if "model loaded" in record.message)
    assert vars(record)["commit"] == snapshot.name
    assert " GB read at " in record.message


def test_an_unreachable_hub_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="the hub cannot be reached"):
        resolve_model("some-org/some-model-that-nobody-cached")


def test_without_the_hub_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'baton-inference\[hub\]'"):
        resolve_model("some-org/some-model")
