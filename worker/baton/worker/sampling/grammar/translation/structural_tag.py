"""Structural tags as a Lark grammar: free text in which each trigger must be followed by the content of its tag."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from baton.worker.sampling.grammar.translation.text_pattern import ANY_TEXT, literal, regex_literal, text_pattern

SchemaOptions = Callable[[dict[str, Any]], dict[str, Any]]

_MAX_TAGS = 512


def structural_tag_lark(tag: dict[str, Any], with_options: SchemaOptions) -> str:
    """Returns the grammar of a structural tag in either of its two forms. Raises ValueError."""
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
    """Builds an expression and collects its rules."""

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
            "triggered": self._triggered,
            "repeat": self._repeat,
            "members": self._members,
        }

    def expression(self, form: Any, path: str) -> str:
        """Returns the expression of this part, for a rule's body."""
        if not isinstance(form, dict):
            raise ValueError(f"{path} must be an object")
        write = self._forms.get(str(form.get("type")))
        if write is None:
            raise ValueError(f"{path}.type is {form.get('type')!r}; it must be one of {', '.join(self._forms)}")
        return write(form, path)

    def _add(self, name: str, body: str, attributes: str = "") -> str:
        """Adds a rule. Returns its name."""
        if len(self.rules) > 8 * _MAX_TAGS:
            raise ValueError("it has too many parts")
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
        """Returns text in which these special tokens may occur; plain text has none."""
        tokens = form.get("token_ids") or []
        if not isinstance(tokens, list):
            raise ValueError(f"{path}.token_ids must be a list")
        if not tokens:
            return self._add("TEXT", f": {text_pattern(form, path)}")
        ids = [_token(token, f"{path}.token_ids.{index}") for index, token in enumerate(tokens)]
        text = self._add("TEXT", f": {text_pattern(form, path)}")
        return f"(({text})? (({' | '.join(ids)}) ({text})?)*)"

    def _grammar(self, form: dict[str, Any], path: str) -> str:
        text = _text(form, "grammar", path)
        try:
            lark = any_to_lark(text)
        except Exception as error:  # the converter raises its parser's errors, of any type
            raise ValueError(f"{path}.grammar: {error}") from error
        return self._add("grammar", f": %lark {{\n{lark}\n}}")

    def _sequence(self, form: dict[str, Any], path: str) -> str:
        elements = _list(form, "elements", path)
        parts: list[str] = []
        free: dict[str, Any] | None = None  # the previous element, if it is free text that ends where this one begins
        for index, element in enumerate(elements):
            where = f"{path}.elements.{index}"
            if free is not None:
                parts.append(self._up_to(element, where, free))
                free = None
            elif isinstance(element, dict) and element.get("type") == "any_text" and index + 1 < len(elements):
                free = element
            else:
                parts.append(self.expression(element, where))
        return f"({' '.join(parts)})"

    def _up_to(self, element: Any, path: str, text: dict[str, Any]) -> str:
        """Returns free text and the element that ends it."""
        kind = element.get("type") if isinstance(element, dict) else None
        if kind == "token":
            return f"{self._any_text(text, path)} {self.expression(element, path)}"
        if kind == "const_string":
            return self._free_until(_text(element, "value", path), text_pattern(text, path))
        if kind == "tag":
            begin = self._free_until(_text(element, "begin", path), text_pattern(text, path))
            return f"{begin} {self._after_begin(element, path)}"
        raise ValueError(f"{path}: any_text must be last, or before a token, a const_string or a tag")

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
            return self._free_until(end, text_pattern(content, f"{path}.content"))
        return f"{self.expression(content, f'{path}.content')} {literal(end)}".rstrip()

    def _free_until(self, end: str, pattern: str = ANY_TEXT) -> str:
        text = pattern if pattern == ANY_TEXT else self._add("TEXT", f": {pattern}")
        return self._add("until", f": {text} {literal(end)}", "[lazy]")

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

    def _triggered(self, form: dict[str, Any], path: str) -> str:
        """Returns free text in which a tag's content follows each trigger, which is a string or a special token.

        `token_ids` may occur in the text. Text before the first tag does not begin with the regex `not_beginning`.
        """
        contents = []
        for index, tag in enumerate(_list(form, "tags", path)):
            where = f"{path}.tags.{index}"
            if not isinstance(tag, dict):
                raise ValueError(f"{where} must be an object")
            content = self._add("content", f": {self.expression(tag.get('content'), f'{where}.content')}")
            contents.append((_list(tag, "triggers", where), content, where))
        tokens = [_token(token, f"{path}.token_ids") for token in form.get("token_ids") or []]

        def up_to_any(pattern: str) -> str:
            """Returns text of this pattern and its end."""
            text = self._add("TEXT", f": {pattern}")
            parts = [f"({text})? {token}" for token in tokens]
            for triggers, content, where in contents:
                marks = [self._trigger(trigger, text, pattern, f"{where}.triggers") for trigger in triggers]
                parts.append(f"({' | '.join(marks)}) {content}")
            return self._add("segment", f": {' | '.join(parts)}")

        rest = f"({up_to_any(ANY_TEXT)})* {self._add('TEXT', f': {ANY_TEXT}')}"
        if "not_beginning" not in form:
            return f"({rest})"
        begin = text_pattern({"not_matches": [f"({_text(form, 'not_beginning', path)})(.|\\n)*"]}, path)
        return f"({up_to_any(begin)} {rest} | {self._add('TEXT', f': {begin}')})"

    def _trigger(self, trigger: Any, text: str, pattern: str, path: str) -> str:
        if isinstance(trigger, dict) and trigger.get("type") == "token":
            return f"({text})? {_token(trigger.get('token_id'), path)}"
        if not isinstance(trigger, dict) or trigger.get("type") != "const_string":
            raise ValueError(f"{path} must be tokens or const_strings")
        return self._free_until(_text(trigger, "value", path), pattern)

    def _repeat(self, form: dict[str, Any], path: str) -> str:
        """Returns one or more repetitions of the content with a separator between; with `optional`, also none."""
        content = self._add("item", f": {self.expression(form.get('content'), f'{path}.content')}")
        separator = form.get("separator")
        between = "" if separator is None else f"{self.expression(separator, f'{path}.separator')} "
        return f"({content} ({between}{content})*){'?' if form.get('optional') else ''}"

    def _members(self, form: dict[str, Any], path: str) -> str:
        """Returns members in their order with a separator between. Members that are not required may be missing."""
        members = _list(form, "members", path)
        separator = literal(_text(form, "separator", path, empty=True))
        first = after = ""  # expressions that begin at this member, and that follow the previous one
        for index in range(len(members) - 1, -1, -1):
            where = f"{path}.members.{index}"
            member = members[index]
            if not isinstance(member, dict):
                raise ValueError(f"{where} must be an object")
            content = self._add("member", f": {self.expression(member.get('content'), f'{where}.content')}")
            begun = f"{content} {after}".strip()
            if member.get("required"):
                first, following = begun, f"{separator} {begun}"
            else:
                first = f"({begun} | {first})" if first else f"({begun})?"
                following = f"({separator} {content})? {after}"
            after = self._add("rest", f": {following.strip()}")
            first = self._add("first", f": {first}")
        return first

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
