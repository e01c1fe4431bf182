"""The folder of a model's tokenizer.json: the model's own, or one that is made of a tokenizer in another format.

Transformers and mistral-common convert. They run in a process of their own: no service imports them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from baton.model_folder.cache import made_folder
from baton.model_folder.tokenizers.source import TOKENIZER_FILE, Kind, TokenizerSource, tokenizer_source
from baton.rpc.errors import InvalidRequest, Unsupported

_log = logging.getLogger(__name__)

_MODULE = "baton.model_folder.tokenizers.conversion"
_MOST_SECONDS = 600
# Nothing is looked for on the hub.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
MISSING_PACKAGE = 3  # exit code


def tokenizer_folder(folder: Path) -> Path:
    """Returns the folder if it has a tokenizer.json or no tokenizer at all; else one with a tokenizer.json made of it.

    Raises Unsupported if a package is missing, InvalidRequest if the tokenizer is broken.
    """
    if (folder / TOKENIZER_FILE).exists() or not folder.is_dir():
        return folder
    source = tokenizer_source(folder)
    if source is None:
        return folder
    made = made_folder(source.everything, folder.name, partial(_convert, source), f"tokenizer {_versions()}")
    if source.kind is not Kind.TRANSFORMERS and not any(made.glob("chat_template*")):
        _log.warning(
            "%s has no chat template: mistral-common writes it; pip install 'baton-inference[mistral]'", source.files[0]
        )
    return made


def _versions() -> str:
    """Returns the versions of what converts; others may make other files."""
    found = []
    for package in ("transformers", "mistral-common"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return " ".join(found)


def _convert(source: TokenizerSource, into: Path) -> None:
    words = [sys.executable, "-m", _MODULE, source.kind.value, str(into), *map(str, source.files)]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _broken(source, f"was not converted within {_MOST_SECONDS} s") from None
    if done.returncode == MISSING_PACKAGE:
        raise Unsupported(f"{source.files[0]} cannot be converted: {_last_line(done.stderr)}", field="model")
    if done.returncode or not (into / TOKENIZER_FILE).is_file():
        raise _broken(source, f"cannot be converted: {_last_line(done.stderr)}")


def _broken(source: TokenizerSource, problem: str) -> InvalidRequest:
    names = " and ".join(path.name for path in source.files)
    return InvalidRequest(f"tokenizer {names} of {source.folder} {problem}", field="model")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the converter ended without a reason"
