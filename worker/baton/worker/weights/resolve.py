"""Finds or downloads the folder of a model."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path

from baton.model_folder.form import hugging_face_form
from baton.model_folder.gguf.header import is_gguf
from baton.model_folder.hub import TOKENIZER_FILES, hub_file
from baton.rpc.errors import InvalidRequest, NotFound, Unavailable

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ("*.json", "*.safetensors", "*.jinja", *TOKENIZER_FILES)
_CONFIGS = ("*.json",)
_ALLOWED = (
    "it must be a folder in Hugging Face form, or a hub id like org/name, or a GGUF file like model.gguf or"
    " org/name:model.gguf"
)


def resolve_model(model: str, revision: str = "") -> Path:
    """Returns the model's folder in Hugging Face form, else downloads a revision from the hub; empty: main."""
    return _resolve(model, revision, _FILES)


def resolve_config(model: str, revision: str = "") -> Path:
    """Returns the model's folder if it exists, else one with the hub's JSON files alone."""
    return _resolve(model, revision, _CONFIGS)


def _resolve(model: str, revision: str, files: tuple[str, ...]) -> Path:
    path = Path(model).expanduser()
    if model and (path.is_dir() or is_gguf(path)):
        if revision:
            raise InvalidRequest(
                f"revision={revision} is of a hub id like org/name, but model {model!r} is a folder", field="revision"
            )
        return hugging_face_form(path)
    if path.is_file():
        raise InvalidRequest(f"model {model!r} is a file; {_ALLOWED}", field="model")
    if not hub_file(model) and not _HUB_ID.fullmatch(model):
        raise InvalidRequest(f"model {model!r}: no such folder; {_ALLOWED}", field="model")
    return hugging_face_form(_download(model, revision, files))


def commit_of(folder: Path) -> str:
    """Returns the commit of a folder in the hub's cache; empty for all others."""
    resolved = folder.resolve()
    is_snapshot = resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name)
    return resolved.name if is_snapshot else ""


def _download(hub_id: str, revision: str, files: tuple[str, ...]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise InvalidRequest(
            f"model {hub_id!r}: no such folder, and huggingface_hub is not installed to look on the hub:"
            " pip install 'baton-inference[hub]'",
            field="model",
        ) from None
    _log.info("looking for %s on the hub", hub_id)
    try:
        if file := hub_file(hub_id):
            return file.download(partial(huggingface_hub.hf_hub_download, revision=revision or None))
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision or None, allow_patterns=list(files)))
    except errors.RevisionNotFoundError as error:
        raise NotFound(
            f"model {hub_id!r} has no revision {revision!r} on the hub: it must be a branch, a tag or a commit",
            field="revision",
        ) from error
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.RemoteEntryNotFoundError) as error:
        raise NotFound(
            f"model {hub_id!r}: no such folder, and the hub does not give it: {error}", field="model"
        ) from error
    except Exception as error:
        # The hub's client raises many errors (offline, DNS, proxy, disk), which are all handled alike.
        raise Unavailable(
            f"model {hub_id!r}: no such folder, and the hub cannot be reached ({type(error).__name__}: {error})",
            field="model",
        ) from error
