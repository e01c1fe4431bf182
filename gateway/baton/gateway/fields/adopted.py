"""Converts other servers' fields to this API's, in place.

Raises for fields that cannot be ignored without changing the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from msgspec.structs import astuple

from baton.gateway.fields.thinking import adopt_thinking
from baton.gateway.models.constraints.structured_output import RequestedConstraint, constraint_of
from baton.gateway.parsing.tool import ToolUse
from baton.gateway.schemas.foreign_fields import ForeignFields
from baton.gateway.schemas.requests import GenerationFields, StructuredOutputs
from baton.rpc.errors import InvalidRequest, ServiceError

# The field of structured_outputs that each one sets.
_FORMS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "format": "json",
}
_OTHER_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "thinking_budget": "thinking_token_budget",
}
_UNLIMITED = ("n_predict", "num_predict")  # by -1
_ANY_JSON = "json"  # a value of format
# Refused, except for these neutral values.
_REFUSED: Mapping[str, Sequence[Any]] = {
    "lora_path": ("", []),
    "lora": ([],),
    "adapter_id": ("",),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "samplers": ([], ""),
    "stop_regex": ("", []),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "watermark": (False,),
    "safe_prompt": (False,),
    "separate_reasoning": (True,),
}
# Ignored and listed, except for these neutral values.
_WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "guided_decoding_backend": ("", "auto"),
    "prediction": ({},),
    "service_tier": ("", "auto", "default"),
    "safety_identifier": ("",),
    "prompt_cache_retention": ("",),
    "client_metadata": ({},),
    "verbosity": ("", "medium"),
    "prompt_mode": ("",),
    "stream_reasoning": (True,),
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_FOREIGN = ForeignFields.__struct_fields__


def adopt(request: ForeignFields, max_tokens: str = "max_tokens", kept: Sequence[str] = ()) -> list[str]:
    """Sets the equivalent fields and returns the names of ignored ones.

    `max_tokens` is this request type's name of that field; `kept` fields are handled by the request type itself.
    """
    values = astuple(request)[: len(_FOREIGN)]  # fields of the base class come first
    if values.count(None) == len(_FOREIGN):
        return []
    given = {
        name: value for name, value in zip(_FOREIGN, values, strict=True) if value is not None and name not in kept
    }
    ignored = []
    for name, value in given.items():
        if name in _REFUSED and value not in _REFUSED[name]:
            raise InvalidRequest(f"{name} is not supported by this release; leave it out", field=name)
        if name in _WITHOUT_EFFECT and value not in _WITHOUT_EFFECT[name]:
            ignored.append(name)
    ignored += _adopt_names(request, given, max_tokens)
    ignored += adopt_thinking(request, given, set_equal)
    return ignored + _adopt_form(request, given)


def requested_constraint(request: GenerationFields, use: ToolUse | None = None) -> RequestedConstraint | None:
    """Returns the requested constraint with the client's field name. Raises InvalidRequest."""
    names = _names_of_form(request)
    with _renamed(names):
        requested = constraint_of(request, use)
    return None if requested is None else replace(requested, field=names.get(requested.field, requested.field))


def _adopt_names(request: ForeignFields, given: Mapping[str, Any], max_tokens: str) -> list[str]:
    ignored = []
    for name, target in _OTHER_NAMES.items():
        value = given.get(name)
        if value is None:
            continue
        own = max_tokens if target == "max_tokens" else target
        if not hasattr(request, own):
            ignored.append(name)
        elif name not in _UNLIMITED or value != -1:
            set_equal(request, own, value, name)
    if given.get("do_sample") is False:
        set_equal(request, "temperature", 0, "do_sample")
    return ignored


def set_equal(request: ForeignFields, own: str, value: Any, name: str) -> None:
    """Sets the request's own field that equals the client's. Raises InvalidRequest if it has another value."""
    if name in _UNLIMITED and value == 0:
        raise InvalidRequest(f"{name} is 0; give -1 or at least 1", field=name)
    if getattr(request, own) is None and own == "max_tokens" and hasattr(request, "max_completion_tokens"):
        own = "max_completion_tokens"
    before = getattr(request, own)
    if before is not None and before != value:
        raise InvalidRequest(f"{name} is {value} and {own} is {before}; they are the same field; set one", field=name)
    setattr(request, own, value)


def _adopt_form(request: ForeignFields, given: Mapping[str, Any]) -> list[str]:
    forms = [name for name in _FORMS if name in given and given[name] is not False and _form_of(name, given[name])]
    pattern = given.get("guided_whitespace_pattern")
    if not forms:
        return [] if pattern is None else ["guided_whitespace_pattern"]
    if len(forms) > 1:
        raise InvalidRequest(f"{forms[0]} and {forms[1]} exclude each other; set one", field=forms[1])
    name = forms[0]
    if getattr(request, "structured_outputs", None) is not None:
        raise InvalidRequest(f"{name} and structured_outputs exclude each other; set one", field=name)
    outputs = StructuredOutputs(whitespace_pattern=pattern)
    form = _form_of(name, given[name])
    setattr(outputs, form, form == "json_object" or given[name])
    request.structured_outputs = outputs  # type: ignore[attr-defined]
    return []


def _form_of(name: str, value: Any) -> str:
    """Returns the field of structured_outputs, or an empty text for none. Raises InvalidRequest."""
    if name != "format" or not isinstance(value, str):
        return _FORMS[name]
    if value not in ("", _ANY_JSON):
        raise InvalidRequest(f"format is {value[:40]!r}; give json, or a JSON schema as an object", field="format")
    return "json_object" if value else ""


def _names_of_form(request: ForeignFields) -> Mapping[str, str]:
    """Maps structured_outputs, and its field that is set, to the client's names."""
    for name in _FORMS:
        if getattr(request, name) not in (None, False) and (form := _form_of(name, getattr(request, name))):
            return {f"structured_outputs.{form}": name, "structured_outputs": name}
    return {}


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        if (name := names.get(error.field)) is not None:
            error.message, error.field = error.message.replace(error.field, name), name
        raise
