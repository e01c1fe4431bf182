"""Structural tags as a Lark grammar: free text in which some marks must be followed by what their tags say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

SchemaOptions = Callable[[dict[str, Any]], dict[str, Any]]

_MAX_TAGS = 512


def structural_tag_lark(tag: dict[str, Any], with_options: SchemaOptions) -> str:
    """The grammar of a structural tag in either of its two forms. Raises ValueError that says what is wrong."""
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type is {tag['type']!r}; it must be 'structural_tag'")
    writer = _Writer(with_options)
    form = _form_of_structures(tag) if "structures" in tag else tag.get("format")
    if form is None:
        raise ValueError("it must have `format`, or `structures` and `triggers`")
    start = writer.expression(form, "format")
    return f"start: {start}\n" + "".join(f"{rule}\n" for rule in writer.rules)


def _form_of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    structures = _list(tag, "structures", "structures")
    tags = [
        {
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema")},
            "end": structure.get("end"),
        }
        for structure in structures
        if isinstance(structure, dict)
    ]
    if len(tags) < len(structures):
        raise ValueError("structures must hold objects with begin, schema and end")
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects the rules that an expression needs."""

    def __init__(self, with_options: SchemaOptions) -> None:
        self.rules: list[str] = []
        self._with_options = with_options
        self._forms: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda form, path: literal(_text(form, "value", path)),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "token": lambda form, path: _token(form.get("token_id"), f"{path}.token_id"),
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._alternatives,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, form: Any, path: str) -> str:
        """What stands for this part in a rule's body."""
        if not isinstance(form, dict):
            raise ValueError(f"{path} must be an object")
        write = self._forms.get(str(form.get("type")))
        if write is None:
            raise ValueError(f"{path}.type is {form.get('type')!r}; it must be one of {', '.join(self._forms)}")
        if len(self.rules) > 8 * _MAX_TAGS:
            raise ValueError("it has too many parts")
        return write(form, path)

    def _add(self, name: str, body: str, attributes: str = "") -> str:
        """A new rule; returns its name."""
        rule = f"{name}_{len(self.rules)}"
        self.rules.append(f"{rule}{attributes}{body}")
        return rule

    def _json_schema(self, form: dict[str, Any], path: str) -> str:
        schema = form.get("json_schema")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError(f"{path}: a JSON schema must be an object or true")
        return self._add("json", f": %json {json.dumps(self._with_options(schema))}")

    def _regex(self, form: dict[str, Any], path: str) -> str:
        return self._add("regex", f": {regex_literal(_text(form, 'pattern', path))}")

    def _any_text(self, form: dict[str, Any], path: str) -> str:
        """Text, in which these special tokens may stand; text alone has none."""
        tokens = form.get("token_ids") or []
        if not isinstance(tokens, list):
            raise ValueError(f"{path}.token_ids must be a list")
        if not tokens:
            return self._add("text", r": /(.|\n)*/")
        parts = [self._add("text", r": /(.|\n)+/")]
        parts += [_token(token, f"{path}.token_ids.{index}") for index, token in enumerate(tokens)]
        return f"({' | '.join(parts)})*"

    def _grammar(self, form: dict[str, Any], path: str) -> str:
        text = _text(form, "grammar", path)
        try:
            lark = any_to_lark(text)
        except Exception as error:  # the converter raises whatever its parser met
            raise ValueError(f"{path}.grammar: {error}") from error
        return self._add("grammar", f": %lark {{\n{lark}\n}}")

    def _sequence(self, form: dict[str, Any], path: str) -> str:
        elements = _list(form, "elements", path)
        parts: list[str] = []
        free = False  # the element before is free text, which ends where this one begins
        for index, element in enumerate(elements):
            where = f"{path}.elements.{index}"
            if free:
                parts.append(self._up_to(element, where))
                free = False
            elif isinstance(element, dict) and element.get("type") == "any_text" and index + 1 < len(elements):
                free = True
            else:
                parts.append(self.expression(element, where))
        return f"({' '.join(parts)})"

    def _up_to(self, element: Any, path: str) -> str:
        """Free text, and the element that ends it."""
        kind = element.get("type") if isinstance(element, dict) else None
        if kind == "const_string":
            return self._free_until(_text(element, "value", path))
        if kind == "tag":
            return f"{self._free_until(_text(element, 'begin', path))} {self._after_begin(element, path)}"
        raise ValueError(f"{path}: any_text must be last, or before a const_string or a tag")

    def _alternatives(self, form: dict[str, Any], path: str) -> str:
        elements = _list(form, "elements", path)
        parts = [self.expression(element, f"{path}.elements.{index}") for index, element in enumerate(elements)]
        return f"({' | '.join(parts)})"

    def _tag(self, form: dict[str, Any], path: str) -> str:
        return self._add("tag", f": {literal(_text(form, 'begin', path))} {self._after_begin(form, path)}")

    def _after_begin(self, form: dict[str, Any], path: str) -> str:
        end = form.get("end", "")
        if not isinstance(end, str):
            raise ValueError(f"{path}.end must be a string")
        content = form.get("content")
        if end and isinstance(content, dict) and content.get("type") == "any_text":
            return self._free_until(end)
        return f"{self.expression(content, f'{path}.content')} {literal(end)}".rstrip()

    def _free_until(self, end: str) -> str:
        return self._add("until", rf": /(.|\n)*/ {literal(end)}", "[lazy]")

    def _triggered_tags(self, form: dict[str, Any], path: str) -> str:
        triggers, tags = _list(form, "triggers", path), _list(form, "tags", path)
        of_trigger: dict[str, list[str]] = {}
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise ValueError(f"{path}.triggers must be strings that are not empty")
            of_trigger[trigger] = []
        for index, tag in enumerate(tags):
            where = f"{path}.tags.{index}"
            if not isinstance(tag, dict):
                raise ValueError(f"{where} must be an object")
            begin = _text(tag, "begin", where)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"{where}.begin starts with none of the triggers")
            of_trigger[trigger].append(f"{literal(begin[len(trigger) :])} {self._after_begin(tag, where)}".strip())
        begun = [f"{self._free_until(trigger)} ({' | '.join(rests)})" for trigger, rests in of_trigger.items() if rests]
        one = self._add("tags", f": {' | '.join(begun)}")
        if form.get("stop_after_first"):
            return one
        text = self._add("text", r": /(.|\n)*/")
        return f"({one}{'+' if form.get('at_least_one') else '*'} {text})"

    def _tags_with_separator(self, form: dict[str, Any], path: str) -> str:
        tags = _list(form, "tags", path)
        parts = [self._tag(tag, f"{path}.tags.{index}") for index, tag in enumerate(tags) if isinstance(tag, dict)]
        if len(parts) < len(tags):
            raise ValueError(f"{path}.tags must be objects")
        one = self._add("tags", f": {' | '.join(parts)}")
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"({one})?"
        several = f"({one} ({literal(_text(form, 'separator', path, empty=True))} {one})*)"
        return several if form.get("at_least_one") else f"{several}?"


def literal(text: str) -> str:
    """The text as Lark has it. Empty for an empty text: the grammar has no empty literal."""
    # Its strings are JSON's, but for a character that it takes for the end of a line.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _token(token_id: Any, path: str) -> str:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
        raise ValueError(f"{path} must be a token's id")
    return f"<[{token_id}]>"


def _text(form: dict[str, Any], key: str, path: str, empty: bool = False) -> str:
    value = form.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{path}.{key} must be a string{'' if empty else ' that is not empty'}")
    return value


def _list(form: dict[str, Any], key: str, path: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_TAGS:
        raise ValueError(f"{path}.{key} must be a list of 1 to {_MAX_TAGS} items")
    return value


def regex_literal(pattern: str) -> str:
    """The regex as Lark has it, `\\d` being 0 to 9. Raises ValueError for an empty or an unfinished one."""
    if not pattern:
        raise ValueError("it is empty")
    # The whole text has to match: anchors at its ends say nothing, and the library has none.
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not _ends_in_escape(pattern[:-1]):
        pattern = pattern[:-1]
    if _ends_in_escape(pattern):
        raise ValueError("it ends with a backslash")
    return f"/{regex_to_lark(pattern, 'd')}/"


def _ends_in_escape(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1
