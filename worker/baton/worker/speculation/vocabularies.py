"""Whether a draft model guesses in the tokens of the model that verifies. Knows no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from baton.model_folder.tokenizers.folder import tokenizer_folder
from baton.model_folder.tokenizers.source import TOKENIZER_FILE
from baton.rpc.errors import InvalidRequest

_FIELD = "speculative_config"


def check_same_vocabulary(model: Path, draft: Path) -> None:
    """Raises InvalidRequest if the folders' tokenizers have other tokens, or if one folder has no tokenizer.

    A token that only one of them has is no difference: vocabularies are padded, and instruction models add tokens.
    """
    ours, theirs = _token_ids(model), _token_ids(draft)
    texts = {token_id: text for text, token_id in ours.items()}
    for text, token_id in theirs.items():
        known = ours.get(text, token_id)
        if known != token_id:
            raise _refused(draft, f"its token {text!r} is {token_id}, and {known} in {model}")
        if texts.get(token_id, text) != text:
            raise _refused(draft, f"its token {token_id} is {text!r}, and {texts[token_id]!r} in {model}")
    common = len(ours.keys() & theirs.keys())
    if 2 * common < max(len(ours), len(theirs)):
        raise _refused(draft, f"it has {len(theirs)} tokens, of which {model} has {common}")


def _refused(draft: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{_FIELD}: the draft model {draft} has another tokenizer: {reason}; give a model with the same one",
        field=_FIELD,
    )


def _token_ids(folder: Path) -> Mapping[str, int]:
    """Returns the tokens of a folder's tokenizer by their text."""
    path = tokenizer_folder(folder) / TOKENIZER_FILE
    try:
        tokenizer = json.loads(path.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # of unigram models: pairs of text and score
            vocabulary = {text: index for index, (text, *_) in enumerate(vocabulary)}
        added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", ())}
        return {**vocabulary, **added}
    except FileNotFoundError:
        raise InvalidRequest(
            f"{_FIELD}: {folder} has no {TOKENIZER_FILE}, so that nothing shows whether the draft model has the same "
            "tokens",
            field=_FIELD,
        ) from None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{_FIELD}: {path} is not a valid tokenizer: {type(error).__name__}: {error}", field=_FIELD
        ) from error
