"""Replaces texts in structural tags by added tokens, with which models write their markup, special or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from baton.gateway.parsing.grammar.forms import Form, const, sequence

AddedId = Callable[[str], int | None]  # the id of the added token with this text, or None


def with_special_tokens(form: Form, texts: Iterable[str], added_id: AddedId) -> Form:
    """Returns the form with each of the texts replaced by its added token, if the vocabulary has one."""
    ids = {text: token_id for text in texts if (token_id := added_id(text)) is not None}
    return _Marker(ids).form(form)


class _Marker:
    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None

    def form(self, form: Form) -> Form:
        """Returns the form with the texts replaced in all its parts."""
        match form["type"]:
            case "const_string":
                parts = self._spelled(form["value"])
                return parts[0] if len(parts) == 1 else sequence(*parts)
            case "sequence":
                return sequence(*(part for element in form["elements"] for part in self._flat(element)))
            case "triggered":
                tags = [
                    {
                        "triggers": [one for trigger in tag["triggers"] for one in self._trigger(trigger)],
                        "content": self.form(tag["content"]),
                    }
                    for tag in form["tags"]
                ]
                return self._with_ids({**form, "tags": tags})
            case "any_text":
                return self._with_ids(form)
            case "members":
                several = [{**one, "content": self.form(one["content"])} for one in form["members"]]
                return {**form, "members": several}
            case "or":
                return {**form, "elements": [self.form(element) for element in form["elements"]]}
            case "repeat":
                return {**form, "content": self.form(form["content"])}
            case _:
                return form

    def _flat(self, element: Form) -> list[Any]:
        form = self.form(element)
        return list(form["elements"]) if form["type"] == "sequence" else [form]

    def _spelled(self, text: str) -> list[Form]:
        pieces = self._pattern.split(text) if self._pattern is not None else [text]
        return [self._token(piece) if piece in self._ids else const(piece) for piece in pieces if piece]

    def _token(self, text: str) -> Form:
        return {"type": "token", "token_id": self._ids[text]}

    def _trigger(self, trigger: Form) -> list[Form]:
        """Returns the triggers for a text: also as plain text, since the model may spell an added token in other
        tokens.
        """
        text = trigger["value"]
        return [self._token(text), trigger] if text in self._ids else [trigger]

    def _with_ids(self, form: Form) -> Form:
        token_ids = [self._ids[text] for text in form.get("special", ()) if text in self._ids]
        rest = {key: value for key, value in form.items() if key != "special"}
        return {**rest, "token_ids": token_ids} if token_ids else rest
