"""The process that converts a tokenizer: `python -m baton.model_folder.tokenizers.conversion KIND INTO FILE..`.

It writes tokenizer.json, tokenizer_config.json and the chat template to INTO. The last line on stderr says what is
wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from baton.model_folder.cache import write_json
from baton.model_folder.tokenizer_json import (
    AddsSpace,
    Pieces,
    added_token,
    around,
    sentencepiece_parts,
    tokenizer_json,
)
from baton.model_folder.tokenizers.folder import MISSING_PACKAGE
from baton.model_folder.tokenizers.source import TOKENIZER_FILE, Kind

_EXTRAS = {"mistral_common": "mistral"}  # of packages; of the others it is slow-tokenizers


class _MissingPackage(Exception):
    """A package that the conversion needs is not installed."""


def main(argv: list[str]) -> int:
    """Converts one tokenizer. Returns an exit code."""
    kind, into, *files = argv
    try:
        _CONVERTERS[Kind(kind)](Path(files[0]), Path(into))
    except _MissingPackage as error:
        print(error, file=sys.stderr)
        return MISSING_PACKAGE
    except Exception as error:  # the libraries raise whatever their readers run into
        reason = str(error).strip().partition("\n")[0]
        print(f"{type(error).__name__}: {reason}", file=sys.stderr)
        return 1
    return 0


def _require(package: str) -> None:
    if find_spec(package) is None:
        extra = _EXTRAS.get(package, "slow-tokenizers")
        raise _MissingPackage(
            f"the package {package.replace('_', '-')} is not installed; pip install 'baton-inference[{extra}]'"
        )


def _of_transformers(path: Path, into: Path) -> None:
    """Converts the tokenizer of the class that the folder names."""
    _require("transformers")
    from transformers import AutoTokenizer

    if path.suffix == ".model":
        _require("sentencepiece")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no fast form")
    tokenizer.save_pretrained(into)


def _of_tekken(path: Path, into: Path) -> None:
    """Converts Mistral's own format. Files of 2024 do not name their special tokens, but mistral-common does."""
    _require("transformers")
    if "special_tokens" not in json.loads(path.read_bytes()):
        _require("mistral_common")
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.mistral import convert_tekken_tokenizer  # type: ignore[attr-defined]

    tokenizer = convert_tekken_tokenizer(str(path))
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(into)


def _of_mistral(path: Path, into: Path) -> None:
    """Converts a sentencepiece model, whose control tokens are special."""
    _require("sentencepiece")
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(path))
    token_ids = range(model.GetPieceSize())
    tokens = [model.IdToPiece(token_id) for token_id in token_ids]
    scores = [model.GetScore(token_id) for token_id in token_ids]
    parts = sentencepiece_parts(
        {token: token_id for token_id, token in enumerate(tokens)},
        Pieces(tokens, scores, model.unk_id(), AddsSpace.FIRST),
    )
    special = [i for i in token_ids if model.IsControl(i) or model.IsUnknown(i)]
    added = [added_token(token_id, tokens[token_id], special=True) for token_id in special]
    write_json(into / TOKENIZER_FILE, tokenizer_json(parts, added, around(tokens, [model.bos_id()], [])))
    names = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    write_json(into / "tokenizer_config.json", {name: tokens[token_id] for name, token_id in names.items()})
    if template := _mistral_template(path):
        (into / "chat_template.jinja").write_text(template, encoding="utf-8")


def _mistral_template(path: Path) -> str | None:
    """Returns the chat template of a tokenizer's version, or None without mistral-common, which writes it."""
    if find_spec("mistral_common") is None:
        return None
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    template: str = convert_tokenizer_to_chat_template(path)
    return template


_CONVERTERS: Mapping[Kind, Callable[[Path, Path], None]] = {
    Kind.TEKKEN: _of_tekken,
    Kind.MISTRAL: _of_mistral,
    Kind.TRANSFORMERS: _of_transformers,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
