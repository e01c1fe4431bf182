"""The source of a model: a folder on this machine, or one downloaded from the hub."""

from __future__ import annotations

from pathlib import Path

from baton.services import extras
from baton.services.checkout import CHECKOUT, PACKAGE
from baton.services.settings import SettingsError

_SAMPLE = Path("models") / "storyteller-7m"
# A checkout has it at its top, a wheel in this package.
SAMPLE_MODELS = (CHECKOUT / _SAMPLE, PACKAGE / _SAMPLE)


def resolve_model(model: str, revision: str = "") -> str:
    """Returns the model's folder on this machine, downloading a hub id's revision. Raises SettingsError without one."""
    if revision and (not model or Path(model).expanduser().is_dir()):
        raise SettingsError(f"--revision: {revision} is of a hub id; --model is {model!r}, a folder")
    if not model:
        for folder in SAMPLE_MODELS:
            if folder.is_dir():
                return str(folder)
        raise SettingsError("--model is required: the sample model storyteller-7m is not installed")
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise SettingsError(f"--model: {model!r} is no folder; give a Hugging Face model folder or a hub id")
    return _download(model, revision)


def _download(hub_id: str, revision: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        line = extras.install_line("hub")
        raise SettingsError(f"--model: {hub_id!r} is no folder, and a hub id needs huggingface-hub; {line}") from None
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        return str(snapshot_download(hub_id, revision=revision or None, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--model: {hub_id!r} is no folder, and not to be had from the hub: {reason}") from error
