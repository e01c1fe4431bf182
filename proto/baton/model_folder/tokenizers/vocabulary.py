"""Whether a tokenizer belongs to a model, by the number of its tokens. Loads no tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path

from baton.model_folder.tokenizers.folder import tokenizer_folder
from baton.model_folder.tokenizers.source import TOKENIZER_FILE
from baton.rpc.errors import InvalidRequest, Unsupported


def check_fits(tokenizer: Path, num_tokens: int, model_vocab_size: int, source: str) -> None:
    """Raises InvalidRequest if the model, by its config `source`, lacks some of the tokenizer's tokens.

    Added tokens do not count, and may be beyond the model's vocabulary: text models have tokenizers with tokens for
    images.
    """
    if num_tokens > model_vocab_size:
        raise InvalidRequest(
            f"the tokenizer {tokenizer} has {num_tokens} tokens, and vocab_size in {source} is {model_vocab_size}:"
            " the tokenizer belongs to another model",
            field="model",
        )


def check_tokenizer(folder: Path, model_vocab_size: int) -> None:
    """Raises InvalidRequest if the folder's tokenizer is broken or does not fit. Folders may have none.

    A tokenizer that this machine cannot convert is not checked: workers need it only for constraints.
    """
    try:
        path = tokenizer_folder(folder) / TOKENIZER_FILE
    except Unsupported:
        return
    if path.exists():
        check_fits(path, count_tokens(path), model_vocab_size, str(folder / "config.json"))


def count_tokens(path: Path) -> int:
    """Returns the number of tokens in tokenizer.json without the added ones. Raises InvalidRequest if it is broken."""
    try:
        vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise InvalidRequest(
            f"model file {path} is not a valid tokenizer: {type(error).__name__}: {error}", field="model"
        ) from error
    if not isinstance(vocabulary, (dict, list)):
        raise InvalidRequest(
            f"model file {path} is not a valid tokenizer: its vocabulary must be an object or a list", field="model"
        )
    return len(vocabulary)
