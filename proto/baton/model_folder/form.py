"""The folder of a model in Hugging Face form: the model's own, or one that is made of a model in another form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.model_folder.cache import made_folder, write_json
from baton.model_folder.gguf.config import config_of
from baton.model_folder.gguf.header import is_gguf, parts_of, read_header
from baton.model_folder.gguf.metadata import Metadata
from baton.model_folder.gguf.tokenizer import end_token_ids, tokenizer_config_of, tokenizer_of
from baton.model_folder.mistral.params import PARAMS_FILE, config_of_params
from baton.rpc.errors import InvalidRequest

CONFIG_FILE = "config.json"
_SUFFIX = ".gguf"


def hugging_face_form(path: Path) -> Path:
    """Returns a folder with config.json and the weights of the model at this path, a folder or a GGUF file."""
    if path.is_dir():
        if (path / CONFIG_FILE).exists():
            return path
        if found := _gguf_files(path):
            return _of_gguf(_only(path, found))
        return _of_mistral(path) if (path / PARAMS_FILE).exists() else path
    if is_gguf(path):
        return _of_gguf(path)
    raise InvalidRequest(f"{path} is no model: it must be a folder, or a file that ends in {_SUFFIX}", field="model")


def gguf_file_of(folder: Path) -> Path | None:
    """Returns the GGUF file, or its first part, that holds the weights of a folder in Hugging Face form."""
    found = _gguf_files(folder)
    if len(found) != 1 or any(folder.glob("*.safetensors")):
        return None
    # A folder that is made has absolute links to the model's own files, whose names errors should have.
    target = found[0].readlink() if found[0].is_symlink() else found[0]
    return target if target.is_absolute() else found[0]


def _gguf_files(folder: Path) -> list[Path]:
    """Returns the GGUF files; of those in parts, the first part."""
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    return sorted({parts_of(path)[0] for path in files if not path.name.startswith("mmproj")})


def _only(folder: Path, found: list[Path]) -> Path:
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise InvalidRequest(f"{folder} has {len(found)} GGUF models: {names}; name one file", field="model")
    return found[0]


def _of_gguf(path: Path) -> Path:
    parts = parts_of(path)
    if missing := [part for part in parts if not part.is_file()]:
        raise InvalidRequest(f"{missing[0]} is missing: {path.name} is one of {len(parts)} parts", field="model")

    def make(folder: Path) -> None:
        header = read_header(parts[0])
        metadata = Metadata(header.metadata, path)
        write_json(folder / CONFIG_FILE, {**config_of(header), "eos_token_id": end_token_ids(metadata)})
        write_json(folder / "tokenizer.json", tokenizer_of(metadata))
        write_json(folder / "tokenizer_config.json", tokenizer_config_of(metadata))
        _link(parts, folder)

    return made_folder(parts, parts[0].name.removesuffix(_SUFFIX), make, "gguf")


def _of_mistral(path: Path) -> Path:
    """Returns a folder with the same files, and a config.json."""
    files = [file for file in path.iterdir() if file.is_file()]

    def make(folder: Path) -> None:
        write_json(folder / CONFIG_FILE, config_of_params(path / PARAMS_FILE))
        _link(files, folder)

    return made_folder(files, path.resolve().name, make, "mistral")


def _link(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        (folder / file.name).symlink_to(file.absolute())
