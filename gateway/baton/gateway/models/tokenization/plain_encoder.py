"""Encodes prompts in which client text contains control tokens: those become plain text, the template's stay tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from baton.gateway.models.tokenization.control_tokens import ControlTokens, Span, is_control
from baton.rpc.errors import InvalidRequest

# Noncharacters, which Unicode reserves for a program's internal use.
_OPEN, _CLOSE = "\ufdd0", "\ufdef"
_DIGITS = [chr(code) for code in range(0xFDD1, 0xFDEF)]

Encode = Callable[[str], list[int]]


class PlainEncoder:
    """Encodes with the model of `tokenizer`, with markers in place of control tokens. Thread-safe."""

    def __init__(self, tokenizer: RustTokenizer, control: ControlTokens) -> None:
        self._control = control
        self._rust = RustTokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._rust.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._rust.pre_tokenizer = tokenizer.pre_tokenizer
        self._markers = {token_id: _marker(at) for at, token_id in enumerate(control.tokens)}
        texts = [token for token in tokenizer.get_added_tokens_decoder().values() if not is_control(token)]
        self._rust.add_tokens([*texts, *(_renamed(control.tokens[id_], name) for id_, name in self._markers.items())])
        self._ids = self._ids_of(texts, tokenizer)
        self._plain = {text: self._spelled(text) for text in control.ids}

    def marked(self, text: str, spans: Iterable[Span]) -> str:
        """Returns the text with markers in place of the control tokens at `spans`.

        Raises InvalidRequest for markers in the text.
        """
        if _OPEN in text:
            raise InvalidRequest(
                f"the chat contains both control tokens and the noncharacter {_OPEN!r}", field="messages"
            )
        pieces, begin = [], 0
        for start, end in spans:
            pieces += [text[begin:start], self._markers[self._control.ids[text[start:end]]]]
            begin = end
        return "".join([*pieces, text[begin:]])

    def encode(self, marked: str) -> list[int]:
        """Returns the token ids of a marked text, without surrounding special tokens."""
        try:
            found: Sequence[int] = self._rust.encode_batch_fast([marked], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text contains a lone surrogate", field="prompt") from error
        result: list[int] = []
        for token_id in found:
            known = self._ids.get(token_id)
            if known is not None:
                result.append(known)
            elif token_id in self._control.tokens:
                # Some models have control tokens among the pieces of their words.
                result += self._plain[self._control.tokens[token_id].content]
            else:
                result.append(token_id)
        return result

    def _ids_of(self, texts: Iterable[AddedToken], tokenizer: RustTokenizer) -> dict[int, int]:
        """Maps this tokenizer's ids of added tokens to the original ids."""
        names = [(name, token_id) for token_id, name in self._markers.items()]
        names += [(token.content, tokenizer.token_to_id(token.content) or 0) for token in texts]
        return {self._rust.token_to_id(name) or 0: token_id for name, token_id in names}

    def _spelled(self, text: str) -> list[int]:
        ids = [token_id for char in text for token_id in self._rust.encode(char, add_special_tokens=False).ids]
        return [token_id for token_id in ids if token_id not in self._control.tokens]


def _marker(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return _OPEN + digits + _CLOSE


def _renamed(token: AddedToken, content: str) -> AddedToken:
    renamed = copy.copy(token)
    renamed.content = content
    renamed.special = False
    return renamed
