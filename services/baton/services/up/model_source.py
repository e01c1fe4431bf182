"""The source of a model: a folder or GGUF file on this machine, or one downloaded from the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from baton.model_folder.gguf.header import is_gguf
from baton.model_folder.hub import TOKENIZER_FILES, hub_file
from baton.services import extras
from baton.services.checkout import CHECKOUT, PACKAGE
from baton.services.settings import SettingsError

_FILES = ("*.json", "*.safetensors", "*.jinja", *TOKENIZER_FILES)
_SAMPLE = Path("models") / "storyteller-7m"
# A checkout has it at its top, a wheel in this package.
SAMPLE_MODELS = (CHECKOUT / _SAMPLE, PACKAGE / _SAMPLE)


def resolve_model(model: str, revision: str = "") -> str:
    """Returns the model's folder or GGUF file on this machine, downloading a hub id's revision. Raises SettingsError
    without one."""
    path = Path(model).expanduser()
    is_here = path.is_dir() or is_gguf(path)
    if revision and (not model or is_here):
        raise SettingsError(f"--revision: {revision} is of a hub id; --model is {model!r}, a folder or file")
    if not model:
        for folder in SAMPLE_MODELS:
            if folder.is_dir():
                return str(folder)
        raise SettingsError("--model is required: the sample model storyteller-7m is not installed")
    if is_here:
        return str(path.resolve())
    if hub_file(model) is None and (path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1):
        raise SettingsError(
            f"--model: {model!r} is no folder; give a Hugging Face model folder or a hub id, or a GGUF file"
        )
    return _download(model, revision)


def _download(hub_id: str, revision: str) -> str:
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        line = extras.install_line("hub")
        raise SettingsError(f"--model: {hub_id!r} is no folder, and a hub id needs huggingface-hub; {line}") from None
    try:
        if file := hub_file(hub_id):
            return str(file.download(partial(hf_hub_download, revision=revision or None)))
        return str(snapshot_download(hub_id, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--model: {hub_id!r} is no folder, and not to be had from the hub: {reason}") from error
